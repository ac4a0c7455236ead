// SPDX-License-Identifier: Apache-2.0

// PonderNet in a model's last block: its loss from models of so many steps, its gradient by central differences, and the
// steps that chance chooses outside of training.

#include "catch.hpp"
#include "message_of.hpp"
#include "nn_model_case.hpp"

#include <heed/check/causality.hpp>
#include <heed/models/attention_weights.hpp>
#include <heed/models/layer_measures.hpp>

#include <cmath>
#include <map>
#include <numeric>

using namespace heed_test;

namespace {

constexpr Index kBatch = 2, kLen = 5, kSteps = 6;

using Model = nn::LanguageModel<double>;
using Ids = std::vector<Index>;

Model ponder_net(const nn::GptOptions& o = small_gpt(24)) {
  Model model = gpt_around<double>(nn::kDialecticalPonderNet, o);
  shake<double>(model);
  return model;
}
// The model whose last block takes so many steps, with the weights that it shares with `from`.
Model fixed_steps(Model& from, int steps, const nn::GptOptions& o = small_gpt(24)) {
  Model model =
      nn::make_gpt<double>(o, [&](Index layer) -> std::unique_ptr<nn::AttentionLayer<double>> {
        if (layer + 1 < o.depth)
          return nn::attention_by_name<double>("dialectical", o.width, o.heads, layer, 3);
        const auto even = nn::AttentionOptions::even(o.width, o.heads);
        return std::make_unique<nn::ProjectedAttention<heed::Dialectical<double>>>(
            even, heed::make_dialectical<double>(even.heads, {.max_steps = steps, .halt_eps = 0}),
            heed::causal<double>());
      });
  Index count = 0;
  model.visit([&](const std::string& name, auto& value, auto&) {
    const auto* source = find_weight<double>(from, name);
    REQUIRE(source != nullptr);
    value = *source;
    ++count;
  });
  REQUIRE(count > 20);
  return model;
}

nn::Context<double> training() {
  nn::Context<double> c;
  c.threads = 1;
  c.training = true;
  return c;
}

// Every token halts with this probability, whatever its rows are.
void halt_with(Model& model, double lambda) {
  find_weight<double>(model, "blocks.1.attn.halt.weight")->set_zero();
  (*find_weight<double>(model, "blocks.1.attn.halt.bias"))[0] = std::log(lambda / (1 - lambda));
}
// p_n for a constant probability; the last one is the rest.
std::vector<double> geometric(double lambda) {
  std::vector<double> p;
  double left = 1;
  for (Index n = 1; n < kSteps; ++n) {
    p.push_back(left * lambda);
    left *= 1 - lambda;
  }
  p.push_back(left);
  return p;
}

std::vector<double> numbers_of(Model& model, const std::string& wanted) {
  for (const nn::TokenNumbers& numbers : model.blocks().back().attention().token_diagnostics())
    if (numbers.name == wanted) return numbers.of;
  return {};
}

std::vector<double> logits_of(Model& model, Index batch, const Ids& ids, std::uint64_t seed = 0) {
  nn::Context<double> c;
  c.threads = 1;
  c.seed = seed;
  nn::Matrix<double> logits(Index(ids.size()), kVocabulary);
  model.forward(c, batch, ids, logits.view());
  return numbers(logits.view());
}

}  // namespace

TEST_CASE("The loss of PonderNet is the mean of the losses of each number of steps") {
  Model model = ponder_net();
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1), targets = some_targets(kBatch * kLen);
  nn::Context<double> c = training();
  std::vector<double> losses;
  for (Index n = 1; n <= kSteps; ++n) {
    Model fixed = fixed_steps(model, int(n));
    losses.push_back(fixed.loss(c, kBatch, ids, targets));
  }
  CHECK(losses.front() != Approx(losses.back()).epsilon(1e-4));
  for (const double lambda : {0.1, 0.4, 0.9}) {
    CAPTURE(lambda);
    halt_with(model, lambda);
    model.set_ponder(0.7);
    model.set_ponder_prior(0.25);
    const std::vector<double> p = geometric(lambda), prior = geometric(0.25);
    double mean = 0, divergence = 0, steps = 0;
    for (std::size_t n = 0; n < p.size(); ++n) {
      mean += p[n] * losses[n];
      divergence += p[n] * std::log(p[n] / prior[n]);
      steps += double(n + 1) * p[n];
    }
    CHECK(model.loss(c, kBatch, ids, targets) == Approx(mean).epsilon(1e-12));
    CHECK(model.ponder_cost() == Approx(0.7 * divergence).epsilon(1e-12));
    for (const double of : numbers_of(model, "steps")) CHECK(of == Approx(steps).epsilon(1e-12));
    model.set_ponder_prior(lambda);
    (void)model.loss(c, kBatch, ids, targets);
    CHECK(std::abs(model.ponder_cost()) < 1e-15);
  }
}

TEST_CASE("The gradients of PonderNet are those of its loss and of its distance from the prior") {
  for (const bool tied : {true, false})
    for (const double dropout : {0.0, 0.2}) {
      CAPTURE(tied, dropout);
      nn::GptOptions o = small_gpt(24);
      o.tied = tied;
      o.dropout = o.attention_dropout = dropout;
      Model model = ponder_net(o);
      model.set_ponder(0.3);
      model.set_ponder_prior(0.2);
      nn::Context<double> c = training();
      const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1),
                targets = some_targets(kBatch * kLen);
      double of_gradient = 0;
      const auto report = check_layer(
          model,
          [&] {
            const double loss = model.loss(c, kBatch, ids, targets);
            return loss + model.ponder_cost();
          },
          [&] { of_gradient = model.gradient(c, kBatch, ids, targets); });
      INFO(report.text());
      CHECK(report.passed);
      CHECK(of_gradient == Approx(model.loss(c, kBatch, ids, targets)).epsilon(1e-12));
      for (const std::string name : {"weight", "bias"}) {
        const auto* grad = find_weight<double>(model, "blocks.1.attn.halt." + name, true);
        REQUIRE(grad != nullptr);
        CHECK(std::abs((*grad)[0]) > 1e-7);
      }
    }
}

TEST_CASE("Only tokens with a target draw PonderNet near its prior") {
  Model model = ponder_net();
  model.set_ponder(1);
  nn::Context<double> c = training();
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  // The same tokens in one sequence and in two, the second of which has no targets.
  const Ids half(ids.begin(), ids.begin() + kLen);
  const double loss = model.loss(c, 1, half, half), cost = model.ponder_cost();
  Ids targets = half;
  targets.resize(std::size_t(kBatch * kLen), nn::kIgnoreIndex);
  CHECK(cost > 1e-3);
  CHECK(model.loss(c, kBatch, ids, targets) == Approx(loss).epsilon(1e-12));
  CHECK(model.ponder_cost() == Approx(cost).epsilon(1e-12));
  // No token has a target.
  const Ids none(std::size_t(kBatch * kLen), nn::kIgnoreIndex);
  nn::clear_gradients<double>(model);
  CHECK(model.gradient(c, kBatch, ids, none) == 0);
  CHECK(model.ponder_cost() == 0);
  for (const double x : all_gradients<double>(model)) CHECK(x == 0);
}

TEST_CASE("Outside of training a token leaves after a step that chance chooses") {
  Model model = ponder_net();
  const double lambda = 0.35;
  halt_with(model, lambda);
  constexpr Index batch = 200, len = 24;
  const Ids ids = random_ids(batch * len, kVocabulary, 1);
  const std::vector<double> logits = logits_of(model, batch, ids);
  const std::vector<double> taken = numbers_of(model, "steps");
  REQUIRE(Index(taken.size()) == batch * len);
  std::map<int, Index> counts;
  for (const double n : taken) ++counts[int(n)];
  // 4,800 draws: four deviations are at most 0.029
  const std::vector<double> p = geometric(lambda);
  for (Index n = 0; n < kSteps; ++n) {
    CAPTURE(n);
    CHECK(double(counts[int(n) + 1]) / double(taken.size()) ==
          Approx(p[std::size_t(n)]).margin(0.029));
  }
  // Neighbours, and the same position of another sequence, draw independently.
  const auto both = [&](Index apart) {
    double same = 0;
    for (std::size_t t = std::size_t(apart); t < taken.size(); ++t)
      same += taken[t] == 1 && taken[t - std::size_t(apart)] == 1;
    return same / double(taken.size());
  };
  CHECK(both(1) == Approx(lambda * lambda).margin(0.025));
  CHECK(both(len) == Approx(lambda * lambda).margin(0.025));
  // Each row equals the row of the model that takes so many steps.
  for (Index n = 1; n <= kSteps; ++n) {
    Model fixed = fixed_steps(model, int(n));
    const std::vector<double> wanted = logits_of(fixed, batch, ids);
    double far = 0;
    for (std::size_t t = 0; t < taken.size(); ++t)
      for (std::size_t w = t * kVocabulary; w < (t + 1) * kVocabulary && taken[t] == double(n); ++w)
        far = std::max(far, std::abs(logits[w] - wanted[w]));
    CHECK(far < 1e-12);
  }
  // The same seed draws the same steps, another one does not.
  CHECK(same_bits(logits_of(model, batch, ids), logits));
  CHECK_FALSE(same_bits(logits_of(model, batch, ids, 1), logits));
}

TEST_CASE("A unit that never halts takes all steps, one that does at once takes one") {
  Model model = ponder_net();
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  nn::Context<double> c = training();
  for (const bool at_once : {false, true}) {
    CAPTURE(at_once);
    find_weight<double>(model, "blocks.1.attn.halt.weight")->set_zero();
    (*find_weight<double>(model, "blocks.1.attn.halt.bias"))[0] = at_once ? 800 : -800;
    Model fixed = fixed_steps(model, at_once ? 1 : int(kSteps));
    CHECK(largest_difference(logits_of(model, kBatch, ids), logits_of(fixed, kBatch, ids)) < 1e-13);
    model.set_ponder(0.5);
    nn::clear_gradients<double>(model);
    CHECK(model.gradient(c, kBatch, ids, ids) ==
          Approx(fixed.loss(c, kBatch, ids, ids)).epsilon(1e-13));
    CHECK(std::isfinite(model.ponder_cost()));
    for (const double x : all_gradients<double>(model)) CHECK(std::isfinite(x));
  }
}

TEST_CASE("PonderNet decodes to the rows of the whole, and hears of no later token") {
  Model model = ponder_net();
  const Ids ids = random_ids(kBatch * 24, kVocabulary, 1);
  const std::vector<double> whole = logits_of(model, kBatch, ids);
  for (const Ids& chunks : {Ids(24, 1), Ids{7, 1, 1, 9, 6}}) {
    for (const bool trains : {false, true}) {  // decoding leaves one row for a token, always
      nn::Context<double> c;
      c.training = trains;
      auto cache = model.new_cache(kBatch);
      double far = 0;
      for (const Index count : chunks) {
        const Index first = cache.len();
        Ids part;
        for (Index b = 0; b < kBatch; ++b)
          part.insert(part.end(), ids.begin() + b * 24 + first,
                      ids.begin() + b * 24 + first + count);
        nn::Matrix<double> logits(kBatch * count, kVocabulary);
        model.step(c, part, cache, logits.view());
        for (Index r = 0; r < kBatch * count; ++r)
          for (Index w = 0; w < kVocabulary; ++w)
            far = std::max(
                far,
                std::abs(
                    logits.view().row(r)[w] -
                    whole[std::size_t(((r / count) * 24 + first + r % count) * kVocabulary + w)]));
      }
      CHECK(far < 1e-11);
    }
  }
  heed::CausalityOptions options;
  options.batch = kBatch;
  options.vocabulary = kVocabulary;
  const auto report =
      heed::audit_causality([&](const Ids& changed) { return logits_of(model, kBatch, changed); },
                            random_ids(kBatch * kLen, kVocabulary, 1), kLen, options);
  INFO(report.text());
  CHECK(report.causal);
  CHECK(report.effective == report.runs);
}

TEST_CASE("PonderNet learns with the same bits on any number of threads") {
  check_determinism<float>(nn::kDialecticalPonderNet);
}

TEST_CASE("Steps and tension of PonderNet are reported, of all tokens and of some") {
  Model model = ponder_net();
  (void)logits_of(model, kBatch, random_ids(kBatch * kLen, kVocabulary, 1));
  const auto& layer = model.blocks().back().attention();
  std::map<std::string, double> all, some, others;
  const auto measure = [&](std::map<std::string, double>& to, const nn::ChosenTokens& chosen) {
    for (const auto& [name, value] : nn::measures_of(layer, kBatch, kBatch, chosen))
      to[name] = value;
  };
  std::vector<char> marks(std::size_t(kBatch * kLen), 0), rest(marks.size(), 1);
  for (const std::size_t t : {std::size_t(1), std::size_t(7), std::size_t(8)}) {
    marks[t] = 1;
    rest[t] = 0;
  }
  measure(all, {});
  measure(some, {marks, kLen});
  measure(others, {rest, kLen});
  const std::vector<double> taken = numbers_of(model, "steps");
  CHECK(some.at("steps") == Approx((taken[1] + taken[7] + taken[8]) / 3));
  for (const std::string name : {"steps", "tension"})
    CHECK(all.at(name) == Approx(0.3 * some.at(name) + 0.7 * others.at(name)));
  CHECK(all.at("tension") > 0.26);
  CHECK(all.at("tension") < 0.74);
  const auto weights = nn::weights_of(layer, nn::Context<double>{}, kBatch);
  REQUIRE(weights);
  CHECK(weights->entropy[std::size_t(weights->row(1, 1, 0))] == Approx(0).margin(1e-12));
}

TEST_CASE("PonderNet says what does not fit") {
  const nn::GptOptions o = small_gpt(24);
  const auto layer = [&] {
    return nn::attention_by_name<double>(nn::kDialecticalPonderNet, o.width, o.heads, 0);
  };
  CHECK(message_of([&] { (void)nn::make_gpt<double>(o, [&](Index) { return layer(); }); }) ==
        "LanguageModel: block 0 of 2 learns from the loss of each of its steps, which only the "
        "last block has; it must be the last one");
  Model model = ponder_net(), plain = gpt_around<double>("sdpa", o);
  CHECK(model.scores_steps());
  CHECK(model.counts_steps());
  CHECK_FALSE(plain.scores_steps());
  const Ids ids = random_ids(kBatch * kLen, kVocabulary, 1);
  nn::Context<double> c, trains = training();
  nn::Matrix<double> logits(kBatch * kLen, kVocabulary);
  Ids likeliest(ids.size());
  CHECK(message_of([&] { (void)model.gradient(c, kBatch, ids, ids); }) ==
        "LanguageModel::gradient: the context is not training, where the last block leaves each "
        "token after one of its steps; it must be, to have the loss of all of them");
  CHECK(message_of([&] { model.forward(trains, kBatch, ids, logits.view()); }) ==
        "LanguageModel::forward: the context is training, where the last block has an answer for "
        "each of its 6 steps; it must not be, to have one for each token");
  CHECK(message_of([&] { (void)model.loss(trains, kBatch, ids, ids, likeliest); }) ==
        "LanguageModel::loss: the context is training, where the last block has an answer for each "
        "of its 6 steps; it must not be, to have one for each token");
  CHECK(message_of([&] { model.set_ponder(-1); }) ==
        "PonderAttention::set_ponder: the weight is -1, it must be finite and not negative");
  CHECK(message_of([&] { model.set_ponder_prior(1); }) ==
        "PonderAttention::set_ponder_prior: the prior is 1, it must lie between 0 and 1, and be "
        "neither");
  CHECK(message_of([&] { plain.set_ponder_prior(0.5); }) ==
        "LanguageModel::set_ponder_prior: the prior is 0.5, the last block's steps are not scored, "
        "it has none");
  CHECK(message_of([&] { plain.blocks()[0].attention().set_ponder_prior(0.5); }) ==
        "AttentionLayer::set_ponder_prior: the prior is 0.5, the layer has none; its steps have no "
        "probabilities that a prior could draw near");
  nn::PonderAttention<double> alone(nn::AttentionOptions::even(8, 2), 3, heed::causal<double>());
  const auto x = normals<double>(4, 8, 1);
  nn::Matrix<double> y(12, 8), dx(4, 8);
  alone.forward(trains, 1, x.view(), y.view());
  CHECK(message_of([&] { alone.backward(trains, 1, x.view(), y.view(), dx.view()); }) ==
        "PonderAttention::backward: the losses of the steps are missing; take_step_losses() comes "
        "first");
  const std::vector<double> losses(12), parts(3);
  CHECK(message_of([&] { alone.take_step_losses(losses, parts); }) ==
        "PonderAttention::take_step_losses: 12 losses were given for 3 tokens of 3 steps, the last "
        "forward() in training had 12");
  CHECK(message_of([&] {
          nn::PonderAttention<double>(nn::AttentionOptions::even(8, 2), 1, heed::causal<double>());
        }) == "ProjectedAttention: halting is outside, max_steps is 1, it must be at least 2");
  // Around the op alone no time could have a cost.
  const auto even = nn::AttentionOptions::even(8, 2);
  nn::ProjectedAttention<heed::Dialectical<double>> bare(
      even,
      heed::make_dialectical<double>(even.heads,
                                     {.max_steps = 3, .halting = heed::Halting::outside}),
      heed::causal<double>());
  CHECK_FALSE(bare.counts_steps());
  CHECK(message_of([&] { bare.set_ponder(0.1); }) ==
        "OpStage::set_ponder: the weight is 0.1, the op's steps are what each of them leaves, not "
        "the time that they take");
}
