// SPDX-License-Identifier: Apache-2.0

// The attention layer that learns its prototypes: its reading, its learning, the correction, and resuming a run.

#include "catch.hpp"
#include "message_of.hpp"
#include "nn_case.hpp"
#include "temporary.hpp"

#include <heed/check/causality.hpp>
#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/gpt.hpp>
#include <heed/models/weights_file.hpp>
#include <heed/nn/adamw.hpp>

#include <filesystem>

using namespace heed_test;

namespace {

using Layer = nn::PrototypeAttention<double>;
using Model = nn::LanguageModel<double>;

constexpr Index kBatch = 2, kLen = 7, kWidth = 12;

nn::KeyMemoryOptions<double> some_memory(double correction = 0) {
  nn::KeyMemoryOptions<double> memory;
  memory.capacity = 5;
  memory.vigilance = 0.55;
  memory.learning_rate = 0.3;
  memory.correction = correction;
  return memory;
}
nn::AttentionOptions four_heads() { return nn::AttentionOptions::even(kWidth, 4); }
nn::AttentionOptions shared_keys() {
  nn::AttentionOptions options = four_heads();
  options.heads.kv_heads = 2;
  return options;
}
nn::AttentionOptions turned_keys() {
  nn::AttentionOptions options = nn::AttentionOptions::even(kWidth, 3);
  options.query_key_norm = true;
  options.rope = nn::Rope{4, 100, nn::RopePairs::halves};
  return options;
}

Layer some_layer(const nn::AttentionOptions& options, const nn::KeyMemoryOptions<double>& memory) {
  Layer layer(options, heed::causal<double>(), memory);
  layer.projected.stage.op.score.strength = 0.8;
  layer.projected.stage.op.readout.pull = -0.6;
  shake<double>(layer);
  return layer;
}
nn::Context<double> context(bool training, int threads = 0) {
  nn::Context<double> c;
  c.training = training;
  c.threads = threads;
  return c;
}
std::vector<double> run(nn::AttentionLayer<double>& layer, nn::Context<double> c,
                        const nn::Matrix<double>& x) {
  nn::Matrix<double> y(x.rows(), kWidth);
  layer.forward(c, kBatch, x.view(), y.view());
  return numbers(y.view());
}
nn::Matrix<double> rows(std::uint64_t stream) {
  return normals<double>(kBatch * kLen, kWidth, stream);
}

// Prototypes and counts, one after the other.
template <class Part>
std::vector<double> state_of(Part& part) {
  std::vector<double> all;
  part.visit_state([&](const std::string&, heed::Param<double>& state) {
    all.insert(all.end(), state.data(), state.data() + state.size());
  });
  return all;
}
void set_state(Layer& layer, const std::vector<double>& numbers) {
  Index at = 0;
  layer.visit_state([&](const std::string&, heed::Param<double>& state) {
    std::copy_n(numbers.begin() + at, state.size(), state.data());
    at += state.size();
  });
}
std::vector<double> prototypes_of(const std::vector<heed::ArtMemory<double>>& memories) {
  std::vector<double> all;
  for (const auto& memory : memories) {
    all.push_back(double(memory.count()));
    all.insert(all.end(), memory.prototypes().begin(), memory.prototypes().end());
  }
  return all;
}
double measure(const Layer& layer, const std::string& wanted) {
  for (const auto& [name, value] : layer.diagnostics())
    if (name == wanted) return value;
  return NAN;
}

// One head of two columns whose keys are x, and a memory that holds (2, 0) only.
Layer readable_layer(double correction) {
  nn::KeyMemoryOptions<double> memory = some_memory(correction);
  memory.capacity = 1;
  memory.vigilance = 0.5;
  Layer layer(nn::AttentionOptions::even(2, 1), heed::causal<double>(), memory);
  heed::Param<double>& weight = *find_weight<double>(layer, "c_attn.weight");
  weight[4] = weight[7] = 1;
  set_state(layer, {2, 0, 1});
  return layer;
}
nn::Matrix<double> readable_rows() {
  nn::Matrix<double> x(4, 2);
  const std::vector<double> keys = {1, 0, 0, 1, -1, 0, 3, 4};
  std::copy(keys.begin(), keys.end(), x.view().data);
  return x;
}

Model small_gpt(const std::string& name, std::uint64_t seed = 3) {
  nn::GptOptions o;
  o.vocabulary = 17;
  o.width = 16;
  o.heads = 2;
  o.depth = 2;
  o.max_len = 12;
  o.dropout = 0.1;
  Model model = nn::make_gpt<double>(
      o, [&](Index) { return nn::extra_attention_by_name<double>(name, o.width, o.heads, 4); });
  shake<double>(model, seed);
  return model;
}
// Losses of the steps [first, last).
std::vector<double> train(Model& model, nn::AdamW<double>& optimiser, Index first, Index last,
                          int threads = 0) {
  nn::Context<double> c;
  c.training = true;
  c.seed = 7;
  c.threads = threads;
  std::vector<double> losses;
  for (Index step = first; step < last; ++step) {
    c.step = std::uint64_t(step);
    const auto ids = random_ids(3 * 12, 17, 1 + std::uint64_t(step) % 2);
    nn::clear_gradients<double>(model);
    losses.push_back(model.gradient(c, 3, ids, ids));
    optimiser.step(c, model);
  }
  return losses;
}

}  // namespace

TEST_CASE("The winner of a row is an index: no mean of it is told") {
  const auto names = [](const std::string& variant) {
    const auto layer = nn::attention_by_name<double>(variant, kWidth, 2, 0, 3, 1);
    nn::Context<double> c;
    nn::Matrix<double> wide(4, kWidth), y(4, kWidth);
    for (Index i = 0; i < 4 * kWidth; ++i) wide.view().data[i] = std::sin(double(i));
    layer->forward(c, 1, wide.view(), y.view());
    std::vector<std::string> means, tokens;
    for (const auto& [name, mean] : layer->diagnostics()) means.push_back(name);
    for (const auto& numbers : layer->token_diagnostics()) tokens.push_back(numbers.name);
    CHECK(means == tokens);
    return means;
  };
  CHECK(names("prototype").empty());
  CHECK(names("ode-equilibrium") == std::vector<std::string>{"residual"});
}

TEST_CASE("A layer without prototypes yet is plain attention") {
  Layer layer = some_layer(four_heads(), some_memory());
  nn::ProjectedAttention<heed::ScaledDot<double>> plain(four_heads(), {}, heed::causal<double>());
  layer.visit([&](const std::string& name, heed::Param<double>& value, heed::Param<double>&) {
    if (heed::Param<double>* same = find_weight<double>(plain, name)) *same = value;
  });
  const auto x = rows(1);
  CHECK(largest_difference(run(layer, context(false), x), run(plain, context(false), x)) < 1e-14);
  CHECK(largest_difference(run(layer, context(true), x), run(plain, context(true), x)) < 1e-14);
  CHECK(largest_difference(run(layer, context(true), x), run(plain, context(true), x)) > 0.1);
}

TEST_CASE("The layer is the op with the prototypes of its memories") {
  const auto options = GENERATE(0, 1) == 0 ? four_heads() : turned_keys();
  Layer layer = some_layer(options, some_memory());
  (void)run(layer, context(true), rows(1));
  heed::Prototype<double> op;
  op.score.take(layer.memories());
  REQUIRE(op.score.count(0) > 1);
  nn::ProjectedAttention<heed::Prototype<double>> fixed(options, op, heed::causal<double>());
  layer.visit([&](const std::string& name, heed::Param<double>& value, heed::Param<double>&) {
    *find_weight<double>(fixed, name) = value;
  });
  const auto x = rows(2);
  CHECK(largest_difference(run(layer, context(false), x), run(fixed, context(false), x)) < 1e-14);
}

TEST_CASE("Memories learn in training what memories of their own learn from the same keys") {
  const auto options = GENERATE(0, 1, 2);
  Layer layer = some_layer(options == 0   ? four_heads()
                           : options == 1 ? shared_keys()
                                          : turned_keys(),
                           some_memory());
  std::vector<heed::ArtMemory<double>> own = layer.memories();
  CHECK(own.size() == (options == 0 ? 4U : options == 1 ? 2U : 3U));
  for (std::uint64_t step = 0; step < 3; ++step) {
    (void)run(layer, context(true), rows(step));
    heed::learn_after_forward(own, layer.projected.inputs(kBatch).key.plain());
    CHECK(same_bits(prototypes_of(layer.memories()), prototypes_of(own)));
  }
  CHECK(own[0].count() > 1);
}

TEST_CASE("Query heads that share keys share their prototypes") {
  Layer layer = some_layer(shared_keys(), some_memory());
  (void)run(layer, context(true), rows(1));
  (void)run(layer, context(false), rows(1));
  const auto memories = layer.memories();
  const auto& score = layer.projected.stage.op.score;
  for (Index h = 0; h < 4; ++h) {
    const auto expected = memories[std::size_t(h / 2)].prototypes();
    REQUIRE(score.count(h) == memories[std::size_t(h / 2)].count());
    CHECK(std::equal(expected.begin(), expected.end(), score.prototype(h, 0)));
  }
}

TEST_CASE("Rows do not see what they teach, and evaluation teaches nothing") {
  Layer layer = some_layer(four_heads(), some_memory(0.3));
  (void)run(layer, context(true), rows(1));
  const auto x = rows(2);
  const std::vector<double> before = state_of(layer);
  const std::vector<double> frozen = run(layer, context(false), x);
  CHECK(same_bits(state_of(layer), before));
  CHECK(same_bits(run(layer, context(true), x), frozen));
  CHECK_FALSE(same_bits(state_of(layer), before));
  CHECK_FALSE(same_bits(run(layer, context(false), x), frozen));
}

TEST_CASE("Prototypes are no weights") {
  Layer layer = some_layer(four_heads(), some_memory());
  std::vector<std::string> names;
  layer.visit([&](const std::string& name, heed::Param<double>&, heed::Param<double>&) {
    names.push_back(name);
  });
  CHECK(names == std::vector<std::string>{"c_attn.weight", "c_attn.bias", "strength", "pull",
                                          "c_proj.weight", "c_proj.bias"});
}

TEST_CASE("Gradients are those of the loss, the correction included") {
  const bool turned = GENERATE(false, true);
  const double correction = GENERATE(0.0, 7.0);
  Layer layer = some_layer(turned ? turned_keys() : shared_keys(), some_memory(correction));
  (void)run(layer, context(true), rows(1));
  const std::vector<double> taught = state_of(layer);
  nn::Matrix<double> x = rows(2), y(x.rows(), kWidth), dx(x.rows(), kWidth);
  const nn::Matrix<double> dy = rows(3);
  nn::Context<double> c = context(true);
  const auto loss = [&] {
    set_state(layer, taught);
    layer.forward(c, kBatch, x.view(), y.view());
    double sum = measure(layer, "correction_loss");
    for (Index r = 0; r < x.rows(); ++r)
      for (Index i = 0; i < kWidth; ++i) sum += y.view().row(r)[i] * dy.view().row(r)[i];
    return sum;
  };
  (void)loss();
  const double share = measure(layer, "resonating_keys");
  CHECK(share > 0.1);
  CHECK(share < 0.95);
  CHECK((measure(layer, "correction_loss") > 1) == (correction > 0));
  const auto report = check_layer(layer, loss,
                                  [&] {
                                    (void)loss();
                                    layer.backward(c, kBatch, x.view(), dy.view(), dx.view());
                                  },
                                  {{"x", &x, &dx}});
  INFO(report.text());
  CHECK(report.passed);
}

TEST_CASE("No correction is left for the backward pass of an evaluation") {
  Layer with = some_layer(four_heads(), some_memory(7)),
        without = some_layer(four_heads(), some_memory());
  nn::Matrix<double> y(kBatch * kLen, kWidth), dx(kBatch * kLen, kWidth);
  std::vector<double> gradients;
  for (Layer* layer : {&with, &without}) {
    (void)run(*layer, context(true), rows(1));
    (void)run(*layer, context(true), rows(1));
    (void)run(*layer, context(false), rows(1));
    nn::Context<double> c = context(false);
    layer->backward(c, kBatch, rows(1).view(), rows(2).view(), dx.view());
    if (gradients.empty()) gradients = numbers(dx.view());
  }
  CHECK(same_bits(numbers(dx.view()), gradients));
}

TEST_CASE("Correction and diagnostics, by hand") {
  Layer layer = readable_layer(0.8);
  const nn::Matrix<double> x = readable_rows();
  nn::Matrix<double> y(4, 2), dx(4, 2), zeros(4, 2);
  zeros.fill(0);
  nn::Context<double> c = context(true);
  layer.forward(c, 1, x.view(), y.view());
  CHECK(measure(layer, "prototypes") == 1);
  CHECK(measure(layer, "resonating_keys") == 0.5);  // (1, 0) and (3, 4)
  CHECK(measure(layer, "key_match") == Approx((1 + 0 - 1 + 0.6) / 4).margin(1e-7));
  CHECK(measure(layer, "correction_loss") == Approx(0.8 / 2 * (1 + 17) / 4));
  layer.backward(c, 1, x.view(), zeros.view(), dx.view());
  const std::vector<double> expected = {0.2 * -1, 0, 0, 0, 0, 0, 0.2 * 1, 0.2 * 4};
  CHECK(largest_difference(numbers(dx.view()), expected) < 1e-14);
  // min((1, 0), (2, 0)), then min((3, 4), .): steps of 0.3.
  CHECK(largest_difference(state_of(layer), {1.7, 0, 1}) < 1e-14);
}

TEST_CASE("Nothing that an evaluated layer writes depends on a later token or another sequence") {
  Layer layer = some_layer(turned_keys(), some_memory());
  for (std::uint64_t step = 0; step < 3; ++step) (void)run(layer, context(true), rows(step));
  const auto x = rows(4);
  const auto report = heed::audit_causality(
      [&](const std::vector<double>& changed) {
        nn::Matrix<double> seen(x.rows(), kWidth);
        std::copy(changed.begin(), changed.end(), seen.view().data);
        return run(layer, context(false), seen);
      },
      numbers(x.view()), kLen);
  INFO(report.text());
  CHECK(report.causal);
}

TEST_CASE("Tokens through a cache read the frozen memory as the whole does") {
  Layer layer = some_layer(turned_keys(), some_memory());
  (void)run(layer, context(true), rows(1));
  const auto x = rows(2);
  const std::vector<double> before = state_of(layer);
  REQUIRE(layer.can_step());
  auto cache = layer.new_cache(kBatch);
  nn::Context<double> c = context(true);
  nn::Matrix<double> token(kBatch, kWidth), y(kBatch, kWidth), all(kBatch * kLen, kWidth);
  for (Index t = 0; t < kLen; ++t) {
    for (Index b = 0; b < kBatch; ++b)
      std::copy_n(x.view().row(b * kLen + t), kWidth, token.view().row(b));
    layer.step(c, kBatch, token.view(), y.view(), cache);
    for (Index b = 0; b < kBatch; ++b)
      std::copy_n(y.view().row(b), kWidth, all.view().row(b * kLen + t));
  }
  const std::vector<double> whole = run(layer, context(false), x);
  CHECK(largest_difference(numbers(all.view()), whole) < 1e-13);
  CHECK(same_bits(state_of(layer), before));
}

TEST_CASE("A resumed run goes on bit for bit, its memories included") {
  const heed_test::TemporaryFolder folder;
  const std::filesystem::path path = folder.path / "model.safetensors";
  Model straight = small_gpt("prototype-art-pull"), resumed = small_gpt("prototype-art-pull", 99);
  nn::AdamW<double> optimiser, second;
  (void)train(straight, optimiser, 0, 3);
  heed::io::SafetensorsWriter writer;
  nn::add_weights<double>(writer, straight, "model.");
  writer.write(path);
  const auto file = heed::io::Safetensors::read(path);
  CHECK(file.info("model.blocks.1.attn.memory.prototypes").shape == std::vector<Index>{2, 4, 8});
  CHECK(file.values<double>("model.blocks.1.attn.memory.counts")[0] > 1);

  nn::read_weights<double>(file, path, resumed, "model.");
  CHECK(same_bits(state_of(resumed), state_of(straight)));
  second.prepare(resumed);
  second.set_steps(3);
  std::vector<std::vector<double>> moments;
  optimiser.visit_state([&](const std::string&, auto& first, auto& squares) {
    moments.push_back(first);
    moments.push_back(squares);
  });
  std::size_t next = 0;
  second.visit_state([&](const std::string&, auto& first, auto& squares) {
    first = moments[next++];
    squares = moments[next++];
  });
  const std::vector<double> saved = state_of(resumed);
  CHECK(train(straight, optimiser, 3, 6) == train(resumed, second, 3, 6));
  CHECK(same_bits(all_weights<double>(resumed), all_weights<double>(straight)));
  CHECK(same_bits(state_of(resumed), state_of(straight)));
  CHECK_FALSE(same_bits(state_of(resumed), saved));
}

TEST_CASE("Training gives the same bits for any number of threads") {
  std::vector<double> expected;
  for (const int threads : {1, 2, 3}) {
    Model model = small_gpt("prototype-art-pull");
    nn::AdamW<double> optimiser;
    (void)train(model, optimiser, 0, 4, threads);
    std::vector<double> all = all_weights<double>(model), state = state_of(model);
    all.insert(all.end(), state.begin(), state.end());
    if (expected.empty()) expected = all;
    CHECK(same_bits(all, expected));
  }
}

TEST_CASE("Models with learned prototypes train") {
  for (const std::string name : {nn::kPrototypeArt, nn::kPrototypeArtPull}) {
    INFO(name);
    Model model = small_gpt(name);
    nn::AdamW<double> optimiser;
    optimiser.options.learning_rate = 0.01;
    const std::vector<double> losses = train(model, optimiser, 0, 60);
    CHECK((losses[58] + losses[59]) / 2 < 0.5 * (losses[0] + losses[1]) / 2);
    for (auto& block : model.blocks()) CHECK(block.attention().diagnostics()[0].second > 1);
  }
}

TEST_CASE("Every name beside the variants makes a layer") {
  const auto names = nn::extra_attention_names();
  for (const std::string wanted : {"sdpa-latent", "prototype-art", "prototype-art-pull"})
    CHECK(std::count(names.begin(), names.end(), wanted) == 1);
  for (const std::string& name : names)
    CHECK(nn::extra_attention_by_name<double>(name, 8, 2) != nullptr);
  CHECK(nn::extra_attention_by_name<double>("sdpa", 8, 2) == nullptr);
  const auto layer = nn::extra_attention_by_name<double>("prototype-art-pull", 8, 2, 7);
  const auto* found = dynamic_cast<const Layer*>(layer.get());
  REQUIRE(found);
  CHECK(found->options().capacity == 7);
  CHECK(found->options().correction == 1e-4);
}

TEST_CASE("Keys that are not finite, and states that are none, are refused in one sentence") {
  Layer layer = some_layer(four_heads(), some_memory(0.1));
  (void)run(layer, context(true), rows(1));
  const std::vector<double> before = state_of(layer);
  nn::Matrix<double> x = rows(2);
  x.view().row(kLen + 3)[0] = NAN;
  CHECK(message_of([&] {
          (void)run(layer, context(true), x);
        }).find("key of head 0, sequence 1, token 3 is not finite") != std::string::npos);
  CHECK(same_bits(state_of(layer), before));
  CHECK(message_of([&] { (void)run(layer, context(false), x); }) == "nothing was thrown");
  CHECK(std::isfinite(measure(layer, "key_match")));

  for (const double count : {2.5, -1.0, 6.0, double(NAN)}) {
    std::vector<double> wrong = before;
    wrong.back() = count;
    set_state(layer, wrong);
    CHECK(message_of([&] {
            (void)run(layer, context(false), rows(1));
          }).find("for head 3, it must be a whole number in [0, 5]") != std::string::npos);
  }
  std::vector<double> wrong = before;
  wrong[0] = NAN;
  set_state(layer, wrong);
  CHECK(message_of([&] { (void)run(layer, context(false), rows(1)); }).find("must be finite") !=
        std::string::npos);
  CHECK(message_of([] { (void)some_layer(four_heads(), some_memory(-1)); }) ==
        "PrototypeAttention: correction is -1, it must be finite and at least 0");
}
