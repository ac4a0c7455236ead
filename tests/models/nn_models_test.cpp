// SPDX-License-Identifier: Apache-2.0

// Language models around every attention: gradients, causality, steps, sizes, determinism.

#include "catch.hpp"
#include "nn_model_case.hpp"

#include <heed/check/causality.hpp>
#include <heed/models/initialise.hpp>
#include <heed/models/source_stacks.hpp>

using namespace heed_test;

namespace {

constexpr Index kBatch = 2, kLen = 5;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Model = nn::LanguageModel<double>;
using Ids = std::vector<Index>;

Model dialectical(heed::Halting halting, bool causal) {
  const heed::DialecticalOptions options{.halt_eps = 0.1, .halting = halting};
  Model model = nn::make_dialectical_lm<double>(kVocabulary, 8, 4, 6, 2, options, causal);
  shake<double>(model);
  return model;
}
// A model with weights of zeros.
Model fresh_model(const std::string& name, const nn::GptOptions& o = small_gpt()) {
  if (name == "dialectical-lm") return nn::make_dialectical_lm<double>(kVocabulary, 8, 4, 6, 2, {});
  if (name == "qkvi") return nn::make_qkvi_lm<double>(o, nn::ExtraSource::projected);
  if (name == "qkvi-from-q")
    return nn::make_qkvi_lm<double>(o, nn::ExtraSource::from_query, nn::RopePairs::halves);
  if (name == "qkvi-calculated") return nn::make_qkvi_lm<double>(o, nn::ExtraSource::calculated);
  if (name == "ode-lm") return nn::make_ode_lm<double>(o);
  return gpt_around<double>(name, o);
}
Model small_model(const std::string& name, const nn::GptOptions& o = small_gpt()) {
  Model model = fresh_model(name, o);
  shake<double>(model);
  return model;
}
const std::vector<std::string> kStacks = {"qkvi", "qkvi-from-q", "qkvi-calculated", "ode-lm",
                                          "dialectical-lm"};
std::vector<std::string> all_names() {
  std::vector<std::string> names = nn::attention_names();
  names.insert(names.end(), kStacks.begin(), kStacks.end());
  names.push_back(nn::kGatedAttention);
  names.push_back(nn::kDialecticalAct);
  return names;
}

// b_pos and b_neg cancel; a static gate has no feedback.
bool has_gradient(const std::string& model, const std::string& weight) {
  return !weight.ends_with("b_pos") && !weight.ends_with("b_neg") &&
         !(weight.ends_with("feedback") && (model == "dar" || model.starts_with("dar,")));
}

void check_model(Model& model, nn::Context<double>& c, const std::string& what) {
  c.threads = 1;
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1), targets = some_targets(kBatch * kLen);
  double loss_of_gradient = 0;
  const auto report = check_layer(
      model, [&] { return model.loss(c, kBatch, ids, targets); },
      [&] { loss_of_gradient = model.gradient(c, kBatch, ids, targets); });
  INFO(what << ": " << report.text());
  CHECK(report.passed);
  model.visit([&](const std::string& name, auto&, auto& grad) {
    INFO(name);
    double largest = 0;
    for (Index i = 0; i < grad.size(); ++i) largest = std::max(largest, std::abs(grad[i]));
    CHECK((largest > 1e-7) == has_gradient(what, name));
  });
  CHECK(loss_of_gradient == Approx(model.loss(c, kBatch, ids, targets)).epsilon(1e-9));
}

std::vector<double> logits_of(Model& model, Index batch, const Ids& ids) {
  nn::Context<double> c;
  c.threads = 1;
  nn::Matrix<double> logits(Index(ids.size()), model.options().vocabulary);
  model.forward(c, batch, ids, logits.view());
  return numbers(logits.view());
}

std::vector<double> in_steps(Model& model, const Ids& ids, const Ids& chunks) {
  nn::Context<double> c;
  c.threads = 1;
  const Index len = Index(ids.size()) / kBatch, words = model.options().vocabulary;
  auto cache = model.new_cache(kBatch);
  std::vector<double> all(ids.size() * std::size_t(words));
  for (const Index count : chunks) {
    const Index first = cache.len();
    Ids part;
    for (Index b = 0; b < kBatch; ++b)
      part.insert(part.end(), ids.begin() + b * len + first, ids.begin() + b * len + first + count);
    nn::Matrix<double> logits(kBatch * count, words);
    model.step(c, part, cache, logits.view());
    for (Index b = 0; b < kBatch; ++b)
      std::copy_n(logits.view().row(b * count), count * words,
                  all.data() + (b * len + first) * words);
  }
  CHECK(cache.len() == len);
  return all;
}

// Fills the weights of `to` that `from` has under the same name.
void copy_weights(Model& from, Model& to) {
  to.visit([&](const std::string& name, auto& value, auto&) {
    if (const auto* source = find_weight<double>(from, name)) value = *source;
  });
}

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}
bool holds(const std::string& text, const std::vector<std::string>& parts) {
  return std::all_of(parts.begin(), parts.end(),
                     [&](const std::string& part) { return text.find(part) != std::string::npos; });
}

}  // namespace

TEST_CASE("The gradients of a GPT around any attention are those of its loss") {
  for (const std::string& name : nn::attention_names())
    for (const nn::NormKind norm : {nn::NormKind::layer, nn::NormKind::rms})
      for (const bool tied : {true, false}) {
        nn::GptOptions o = small_gpt();
        o.norm = norm;
        o.tied = tied;
        o.mlp_bias = tied;
        o.activation = tied ? nn::Activation::gelu_erf : nn::Activation::gelu_tanh;
        Model model = small_model(name, o);
        nn::Context<double> c;
        check_model(model, c,
                    name + (tied ? ", tied" : ", not tied") +
                        (norm == nn::NormKind::rms ? ", RMS" : ", LayerNorm"));
      }
}

TEST_CASE("The gradients of a model with dropout are those of its loss with the same numbers") {
  nn::GptOptions o = small_gpt();
  o.dropout = 0.25;
  for (const std::string& name : nn::attention_names()) {
    Model model = small_model(name, o);
    nn::Context<double> c;
    c.training = true;
    c.seed = 5;
    c.step = 3;
    check_model(model, c, name);
  }
}

TEST_CASE("Dropout draws other numbers in each step and none outside of training") {
  nn::GptOptions o = small_gpt();
  o.dropout = 0.25;
  Model model = small_model("sdpa", o);
  nn::Context<double> c;
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1), targets = some_targets(kBatch * kLen);
  const double plain = model.loss(c, kBatch, ids, targets);
  c.training = true;
  const double first = model.loss(c, kBatch, ids, targets);
  CHECK(first == model.loss(c, kBatch, ids, targets));
  c.step = 1;
  const double second = model.loss(c, kBatch, ids, targets);
  c.seed = 1;
  const double third = model.loss(c, kBatch, ids, targets);
  CHECK(plain != first);
  CHECK(first != second);
  CHECK(second != third);
}

TEST_CASE("The gradients of the dialectical model are those of its loss") {
  // Some ops let rows wait for others.
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  Model alone = dialectical(heed::Halting::per_token, true),
        together = dialectical(heed::Halting::batch, true);
  CHECK(logits_of(alone, kBatch, ids) != logits_of(together, kBatch, ids));
  for (const auto halting : {heed::Halting::per_token, heed::Halting::batch})
    for (const bool causal : {true, false}) {
      Model model = dialectical(halting, causal);
      nn::Context<double> c;
      check_model(model, c, causal ? "causal" : "without a mask");
    }
}

TEST_CASE(
    "The gradients of a model that ponders are those of its loss and of what its steps cost") {
  // With these weights no row is near a jump of its number of steps, where differences would mean nothing.
  Model model = small_model(nn::kDialecticalAct);
  model.set_ponder(0.3);
  nn::Context<double> c;
  c.threads = 1;
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1), targets = some_targets(kBatch * kLen);
  const auto whole = [&] {
    const double loss = model.loss(c, kBatch, ids, targets);
    return loss + model.ponder_cost();
  };
  double of_gradient = 0;
  const auto report =
      check_layer(model, whole, [&] { of_gradient = model.gradient(c, kBatch, ids, targets); });
  INFO(report.text());
  CHECK(report.passed);
  // Reported losses are cross-entropies.
  CHECK(of_gradient == Approx(model.loss(c, kBatch, ids, targets)).epsilon(1e-12));
  // 0.3 times the mean of N + R in each of the two blocks, 2 to 7 steps.
  CHECK(model.ponder_cost() > 2 * 0.3);
  CHECK(model.ponder_cost() < 2 * 0.3 * 7);
  const double cost = model.ponder_cost();
  model.set_ponder(0.6);
  CHECK(whole() == Approx(of_gradient + 2 * cost).epsilon(1e-12));
  model.set_ponder(0);
  CHECK(whole() == of_gradient);

  Model plain = small_model("sdpa"), by_size = small_model("dialectical");
  CHECK(model.counts_steps());
  CHECK_FALSE(plain.counts_steps());
  CHECK_FALSE(by_size.counts_steps());
  CHECK(message_of([&] { plain.set_ponder(0.1); }) ==
        "OpStage::set_ponder: the weight is 0.1, the op's readout counts no steps "
        "(plug/readout.hpp)");
  CHECK(message_of([&] { by_size.set_ponder(0.1); }) ==
        "OpStage::set_ponder: the weight is 0.1, the op's rows halt by the size of their steps; "
        "halting must be adaptive");
  CHECK(message_of([&] { model.set_ponder(-1); }) ==
        "OpStage::set_ponder: the weight is -1, it must be finite and not negative");
  Model remembers = small_model("prototype-art");
  CHECK(message_of([&] { remembers.set_ponder(0.1); }) ==
        "AttentionLayer::set_ponder: the weight is 0.1, the layer counts no steps; it must be 0");
  remembers.set_ponder(0);
}

TEST_CASE("The gradients of the stacks with a frame of their own are those of their loss") {
  for (const std::string& name : kStacks)
    for (const bool tied : {true, false}) {
      nn::GptOptions o = small_gpt();
      o.tied = tied;
      Model model = small_model(name, o);
      nn::Context<double> c;
      check_model(model, c, name + (tied ? ", tied" : ", not tied"));
    }
  Model learns = nn::make_ode_lm<double>(small_gpt(), {}, true);
  shake<double>(learns);
  REQUIRE(find_weight<double>(learns, "blocks.1.attn.rho") != nullptr);
  nn::Context<double> c;
  check_model(learns, c, "an ODE that learns");
}

TEST_CASE("The QKVI stack is its blocks between embedding, norm and head, without positions") {
  constexpr Index width = 8, heads = 2;
  nn::GptOptions o = small_gpt();
  o.hidden = 0;
  o.norm = nn::NormKind::layer;
  Model model = nn::make_qkvi_lm<double>(o, nn::ExtraSource::projected, nn::RopePairs::halves, 100);
  shake<double>(model);
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  const Index tokens = kBatch * kLen;
  nn::Context<double> c;
  nn::Embedding<double> embedding(kVocabulary, width);
  embedding.weight.value = *find_weight<double>(model, "embed.weight");
  nn::Matrix<double> x(tokens, width), y(tokens, width), logits(tokens, kVocabulary);
  embedding.forward(c, ids, x.view(), nn::Into::overwrite);
  for (const std::string start : {"blocks.0.", "blocks.1."}) {
    nn::TransformerBlock<double> block(
        {}, nn::NormKind::rms, width,
        std::make_unique<nn::ProjectedAttention<heed::IntentGated<double>>>(
            nn::intent_attention<double>(width, heads, nn::ExtraSource::projected,
                                         nn::RopePairs::halves, 100)),
        nn::Mlp<double>(width, 4 * width, nn::Activation::gelu_erf, false, "0", "2"));
    block.visit([&](const std::string& name, auto& value, auto&) {
      INFO(start + name);
      REQUIRE(find_weight<double>(model, start + name) != nullptr);
      value = *find_weight<double>(model, start + name);
    });
    block.forward(c, kBatch, x.view(), y.view());
    std::swap(x, y);
  }
  nn::RMSNorm<double> norm(width);
  norm.visit([&](const std::string&, auto& value, auto&) {
    value = *find_weight<double>(model, "ln_f.weight");
  });
  norm.forward(c, x.view(), y.view());
  nn::Linear<double> head(width, kVocabulary, false);
  head.weight.value = embedding.weight.value;
  head.forward(c, y.view(), logits.view());
  CHECK(largest_difference(numbers(logits.view()), logits_of(model, kBatch, ids)) < 1e-13);
  CHECK(find_weight<double>(model, "pos_emb.weight") == nullptr);
  CHECK(nn::count_weights<double>(model) ==
        kVocabulary * width + 2 * (4 + 1 + 8) * width * width + 2 * (2 * width + 2 * 4) + width);
}

TEST_CASE(
    "A gate per head and token scales the rows of a head, and learns from its own columns of "
    "c_attn") {
  constexpr Index width = 8, heads = 2;
  Model gated = small_model(nn::kGatedAttention);
  nn::Context<double> c;
  check_model(gated, c, nn::kGatedAttention);
  const std::string packed = "blocks.0.attn.c_attn.weight", bias = "blocks.0.attn.c_attn.bias";
  REQUIRE(find_weight<double>(gated, packed)->shape() ==
          std::vector<Index>{3 * width + heads, width});
  // Gates of sigmoid(40) = 1 give plain attention; of sigmoid(-40) = 0, only what c_proj adds.
  Model plain = small_model("sdpa");
  copy_weights(gated, plain);
  for (const std::string block : {"0", "1"})
    for (const std::string part : {".attn.c_attn.weight", ".attn.c_attn.bias"}) {
      heed::Param<double>& all = *find_weight<double>(gated, "blocks." + block + part);
      heed::Param<double>& first = *find_weight<double>(plain, "blocks." + block + part);
      const Index columns = all.size() / (3 * width + heads);
      first = heed::Param<double>(columns > 1 ? std::vector<Index>{3 * width, columns}
                                              : std::vector<Index>{3 * width});
      std::copy_n(all.data(), first.size(), first.data());
      std::fill_n(all.data() + first.size(), heads * columns, columns > 1 ? 0.0 : 40.0);
    }
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  CHECK(largest_difference(logits_of(gated, kBatch, ids), logits_of(plain, kBatch, ids)) < 1e-13);
  for (const std::string block : {"0", "1"}) {
    heed::Param<double>& gates =
        *find_weight<double>(gated, "blocks." + block + ".attn.c_attn.bias");
    gates[3 * width + 1] = -40;  // the second head
    heed::Param<double>& values =
        *find_weight<double>(plain, "blocks." + block + ".attn.c_attn.weight");
    heed::Param<double>& biases =
        *find_weight<double>(plain, "blocks." + block + ".attn.c_attn.bias");
    const Index half = 2 * width + width / heads;
    std::fill_n(values.data() + half * width, (3 * width - half) * width, 0.0);
    std::fill_n(biases.data() + half, 3 * width - half, 0.0);
  }
  CHECK(largest_difference(logits_of(gated, kBatch, ids), logits_of(plain, kBatch, ids)) < 1e-13);
}

TEST_CASE("A stack says what its frame cannot take") {
  nn::GptOptions o = small_gpt();
  o.width = 6;
  CHECK(holds(message_of([&] { (void)nn::make_qkvi_lm<double>(o, nn::ExtraSource::projected); }),
              {"width of 6", "2 heads", "even"}));
  Model longer = small_model("qkvi");
  CHECK(logits_of(longer, 1, random_ids(40, kVocabulary, 1)).size() == 40 * kVocabulary);
}

TEST_CASE("Logits do not depend on a later id or another sequence") {
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  heed::CausalityOptions options;
  options.batch = kBatch;
  options.vocabulary = kVocabulary;
  for (const std::string& name : all_names()) {
    Model model = small_model(name);
    const auto report = heed::audit_causality(
        [&](const Ids& changed) { return logits_of(model, kBatch, changed); }, ids, kLen, options);
    INFO(name << ": " << report.text());
    CHECK(report.causal);
    CHECK(report.effective == report.runs);
  }
  Model sees_all = dialectical(heed::Halting::per_token, false);
  CHECK_FALSE(heed::audit_causality(
                  [&](const Ids& changed) { return logits_of(sees_all, kBatch, changed); }, ids,
                  kLen, options)
                  .causal);
}

TEST_CASE("A token of NaN leaves the logits before it as they are") {
  nn::GptOptions o = small_gpt();
  o.tied = false;
  for (const std::string& name : all_names()) {
    INFO(name);
    Model model = small_model(name, o);
    Ids ids = random_ids(kBatch * kLen, kVocabulary - 1, 1);
    const Index at = 2;
    ids[at] = kVocabulary - 1;
    const std::vector<double> before = logits_of(model, kBatch, ids);
    const std::string embedding = name == "dialectical-lm" ? "emb.weight" : "embed.weight";
    heed::Param<double>& rows = *find_weight<double>(model, embedding);
    std::fill_n(rows.data() + (kVocabulary - 1) * 8, 8, kNan);
    const std::vector<double> after = logits_of(model, kBatch, ids);
    for (Index t = 0; t < kBatch * kLen; ++t) {
      const std::ptrdiff_t from = t * kVocabulary, to = from + kVocabulary;
      const std::vector<double> was(before.begin() + from, before.begin() + to),
          is(after.begin() + from, after.begin() + to);
      CHECK(same_bits(was, is) == (t < at || t >= kLen));
    }
    CHECK(std::isnan(after[std::size_t(at * kVocabulary)]));
  }
}

TEST_CASE("Steps through a cache give the logits of the whole") {
  nn::GptOptions o = small_gpt();
  o.max_len = 24;
  const Ids ids = random_ids(kBatch * 24, kVocabulary, 1),
            few = random_ids(kBatch * 6, kVocabulary, 1);
  for (const std::string& name : all_names()) {
    INFO(name);
    Model model = small_model(name, o);
    CHECK(model.can_step());
    const bool is_short = model.options().max_len == 6;
    const std::vector<double> whole = logits_of(model, kBatch, is_short ? few : ids);
    CHECK(largest_difference(in_steps(model, is_short ? few : ids, Ids(is_short ? 6 : 24, 1)),
                             whole) < 1e-11);
    CHECK(largest_difference(
              in_steps(model, is_short ? few : ids, is_short ? Ids{1, 3, 2} : Ids{7, 1, 1, 9, 6}),
              whole) < 1e-11);
  }
}

TEST_CASE("A sequence may have as many tokens as there are positions, and no more") {
  for (const std::string name : {"sdpa", "dialectical-lm"}) {
    Model model = small_model(name);
    nn::Context<double> c;
    nn::Matrix<double> logits(kBatch * 6, kVocabulary);
    const Ids fits = random_ids(kBatch * 6, kVocabulary, 1),
              longer = random_ids(kBatch * 7, kVocabulary, 1);
    model.forward(c, kBatch, fits, logits.view());
    CHECK(std::isfinite(model.gradient(c, kBatch, fits, fits)));
    CHECK(holds(message_of([&] { (void)model.loss(c, kBatch, longer, longer); }),
                {"7 tokens", "has 6"}));
    auto cache = model.new_cache(kBatch);
    model.step(c, fits, cache, logits.view());
    nn::Matrix<double> next(kBatch, kVocabulary);
    CHECK(holds(message_of([&] {
                  model.step(c, Ids{1, 2}, cache, next.view());
                }),
                {"7 tokens", "has 6"}));
    CHECK(cache.len() == 6);
  }
}

TEST_CASE("A model says what does not fit") {
  Model model = small_model("sdpa");
  nn::Context<double> c;
  const Ids ids = random_ids(10, kVocabulary, 1);
  nn::Matrix<double> logits(10, kVocabulary), narrow(10, 4);
  const auto loss = [&](Index batch, const Ids& read, const Ids& targets) {
    return message_of([&] { (void)model.gradient(c, batch, read, targets); });
  };
  CHECK(holds(loss(3, ids, ids), {"10 ids", "batch of 3"}));
  CHECK(holds(loss(0, ids, ids), {"10 ids", "batch of 0"}));
  CHECK(holds(loss(2, ids, Ids(9, 1)), {"9 targets", "10"}));
  CHECK(holds(loss(2, Ids(10, 11), ids), {"id 11", "11 rows"}));
  CHECK(holds(loss(2, Ids(10, -1), ids), {"id -1", "11 rows"}));
  CHECK(holds(loss(2, ids, Ids(10, 11)), {"target 11", "11 classes"}));
  CHECK(holds(message_of([&] { model.forward(c, 2, ids, narrow.view()); }), {"10 x 4", "10 x 11"}));
  CHECK(holds(message_of([&] { (void)nn::attention_by_name<double>("sdpo", 8, 2, 0); }),
              {"sdpo", "sdpa", "ode"}));
  CHECK(
      holds(message_of([&] { (void)nn::attention_by_name<double>("sdpa", 9, 2, 0); }), {"9", "2"}));
}

TEST_CASE("A head in several chunks gives loss and gradient of a head in one") {
  const bool tied = GENERATE(true, false);
  constexpr Index words = 200000, len = 7, batch = 5;  // chunks of 20 tokens; 35 are two
  nn::GptOptions o = small_gpt();
  o.vocabulary = words;
  o.max_len = len;
  o.width = 4;
  o.tied = tied;
  o.depth = 1;
  Model model = small_model("sdpa", o);
  nn::Context<double> c;
  const Ids ids = random_ids(batch * len, words, 1);
  Ids targets = random_ids(batch * len, words, 2);
  for (const std::size_t ignored : {0U, 8U, 9U, 30U}) targets[ignored] = nn::kIgnoreIndex;
  const double loss = model.gradient(c, batch, ids, targets);
  const std::vector<double> whole = all_gradients<double>(model);
  CHECK(loss == Approx(model.loss(c, batch, ids, targets)).epsilon(1e-14));

  double sum = 0;
  std::vector<double> parts(whole.size());
  for (Index b = 0; b < batch; ++b) {
    const auto of_row = [&](const Ids& all) {
      return Ids(all.begin() + b * len, all.begin() + (b + 1) * len);
    };
    const Ids row = of_row(targets);
    const double share = double(len - std::count(row.begin(), row.end(), nn::kIgnoreIndex)) / 31;
    nn::clear_gradients<double>(model);
    sum += share * model.gradient(c, 1, of_row(ids), row);
    const std::vector<double> part = all_gradients<double>(model);
    for (std::size_t i = 0; i < part.size(); ++i) parts[i] += share * part[i];
  }
  CHECK(loss == Approx(sum).epsilon(1e-13));
  CHECK(largest_difference(whole, parts) < 1e-13);

  // The likeliest id at each target, in whichever chunk it is; other entries stay as they were.
  Ids likeliest(targets.size(), -7);
  CHECK(model.loss(c, batch, ids, targets, likeliest) == model.loss(c, batch, ids, targets));
  nn::Matrix<double> logits(batch * len, words);
  model.forward(c, batch, ids, logits.view());
  for (Index t = 0; t < batch * len; ++t) {
    const double* row = logits.view().row(t);
    const bool asked = targets[std::size_t(t)] != nn::kIgnoreIndex;
    CHECK(likeliest[std::size_t(t)] == (asked ? std::max_element(row, row + words) - row : -7));
  }
  CHECK(holds(message_of([&] {
                Ids few(3);
                (void)model.loss(c, batch, ids, targets, few);
              }),
              {"likeliest has 3 entries", "targets has 35"}));
}

TEST_CASE("The gradient of a tied embedding is that of the embedding and that of the head") {
  nn::GptOptions o = small_gpt();
  Model tied = small_model("dar", o);
  o.tied = false;
  Model apart = small_model("dar", o);
  copy_weights(tied, apart);
  *find_weight<double>(apart, "lm_head.weight") = *find_weight<double>(tied, "embed.weight");
  nn::Context<double> c;
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1), targets = some_targets(kBatch * kLen);
  CHECK(tied.gradient(c, kBatch, ids, targets) == apart.gradient(c, kBatch, ids, targets));
  const auto& both = *find_weight<double>(tied, "embed.weight", true);
  const auto& read = *find_weight<double>(apart, "embed.weight", true);
  const auto& written = *find_weight<double>(apart, "lm_head.weight", true);
  for (Index i = 0; i < both.size(); ++i)
    CHECK(both[i] == Approx(read[i] + written[i]).margin(1e-15));
}

TEST_CASE("Targets that are all ignored give a loss and gradients of 0") {
  Model model = small_model("sdpa");
  nn::Context<double> c;
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  CHECK(model.gradient(c, kBatch, ids, Ids(ids.size(), nn::kIgnoreIndex)) == 0);
  for (const double gradient : all_gradients<double>(model)) CHECK(gradient == 0);
}

TEST_CASE("Resonance of strength 0 gives the logits of plain attention") {
  Model plain = small_model("sdpa");
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  const std::vector<double> want = logits_of(plain, kBatch, ids);
  for (const std::string name : {"dar", "dar-unrolled", "prototype"}) {
    INFO(name);
    Model model = small_model(name);
    copy_weights(plain, model);
    CHECK(largest_difference(logits_of(model, kBatch, ids), want) > 1e-4);
    model.visit([](const std::string& weight, auto& value, auto&) {
      if (weight.ends_with("strength") || weight.ends_with("pull")) value.set_zero();
    });
    CHECK(largest_difference(logits_of(model, kBatch, ids), want) < 1e-13);
  }
}

TEST_CASE("Two steps of AdamW give the same bits for any number of threads, in double") {
  for (const std::string& name : layer_names()) check_determinism<double>(name);
}

TEST_CASE(
    "Matrices start with the deviation asked for, those that write to the residual stream with "
    "less") {
  const bool fan_in = GENERATE(false, true);
  nn::GptOptions o = small_gpt();
  o.width = 64;
  o.hidden = 0;
  o.tied = false;
  Model gpt = gpt_around<double>("sdpa", o);
  Model halting = nn::make_dialectical_lm<double>(100, 64, 64, 32, 4, {});
  for (Model* model : {&gpt, &halting}) {
    if (fan_in)
      nn::initialise(*model, 7, nn::first_weights_named("fan-in"));
    else
      nn::initialise(*model, 7);
    const double depth = double(model->blocks().size());
    model->visit([&](const std::string& name, auto& value, auto&) {
      INFO(name);
      double sum = 0, squares = 0;
      for (Index i = 0; i < value.size(); ++i) {
        sum += value[i];
        squares += value[i] * value[i];
      }
      const double mean = sum / double(value.size()),
                   root = std::sqrt(squares / double(value.size()));
      if (value.shape().size() < 2) {
        const bool norm =
            name.find("ln") != std::string::npos || name.find("ff.0") != std::string::npos;
        CHECK(squares == (norm && name.ends_with("weight") ? double(value.size()) : 0.0));
        return;
      }
      bool writes = false;
      for (const char* end : {"attn.c_proj.weight", ".out.weight", "mlp.2.weight", "ff.3.weight"})
        writes = writes || name.ends_with(end);
      const double from = double(value.shape().back()), all = fan_in ? 1 / std::sqrt(from) : 0.02;
      const double want = writes ? all / std::sqrt(2 * depth) : all;
      const double spread = 5 / std::sqrt(double(value.size()));
      CHECK(std::abs(root / want - 1) < spread);
      CHECK(std::abs(mean) < want * spread);
    });
  }
}

TEST_CASE("First weights of an unknown name are refused") {
  CHECK(nn::first_weights_named("gpt2") == nn::FirstWeights::gpt2);
  CHECK(message_of([] { (void)nn::first_weights_named("xavier"); }) ==
        "first_weights_named: name is \"xavier\", it must be gpt2 or fan-in");
}

TEST_CASE("Initialising fills the same bits for the same seed and leaves what is not zero") {
  for (const std::string& name : all_names()) {
    INFO(name);
    const auto fresh = [&](std::uint64_t seed) {
      Model model = fresh_model(name);
      nn::initialise(model, seed);
      return model;
    };
    Model one = fresh(1), same = fresh(1), other = fresh(2);
    CHECK(same_bits(all_weights<double>(one), all_weights<double>(same)));
    CHECK_FALSE(same_bits(all_weights<double>(one), all_weights<double>(other)));
    const std::vector<double> before = all_weights<double>(one);
    nn::initialise(one, 9);
    CHECK(same_bits(all_weights<double>(one), before));
  }
}
