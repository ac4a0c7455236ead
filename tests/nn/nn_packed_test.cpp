// SPDX-License-Identifier: Apache-2.0
// A model of packed sequences has the loss and the gradients of the same sequences in a padded batch.

#include "message_of.hpp"
#include "nn_model_case.hpp"

#include <heed/models/initialise.hpp>
#include <heed/models/source_stacks.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace heed;
using namespace heed_test;
using nn::Context;
using nn::LanguageModel;

namespace {

const std::vector<Index> kLengths = {5, 1, 17, 9, 9};

struct Tokens {
  std::vector<Index> starts{0}, inputs, targets;     // packed
  std::vector<Index> padded_inputs, padded_targets;  // (sequences, longest)

  Tokens() {
    const Index longest = *std::max_element(kLengths.begin(), kLengths.end());
    padded_inputs.assign(kLengths.size() * std::size_t(longest), 0);
    padded_targets.assign(padded_inputs.size(), nn::kIgnoreIndex);
    for (std::size_t n = 0; n < kLengths.size(); ++n) {
      for (Index t = 0; t < kLengths[n]; ++t) {
        const Index id = (Index(n) * 5 + t * t) % kVocabulary, next = (id + 3 * t) % kVocabulary;
        const bool counts = t % 3 != 1;
        inputs.push_back(id);
        targets.push_back(counts ? next : nn::kIgnoreIndex);
        const std::size_t at = n * std::size_t(longest) + std::size_t(t);
        padded_inputs[at] = id;
        padded_targets[at] = targets.back();
      }
      starts.push_back(Index(inputs.size()));
    }
  }
};

template <class Model>
[[nodiscard]] std::vector<double> gradients_of(Model& model) {
  std::vector<double> all;
  model.visit([&](const std::string&, Param<double>& value, Param<double>& grad) {
    for (Index i = 0; i < value.size(); ++i) all.push_back(grad[i]);
    grad.set_zero();
  });
  return all;
}

void check(const std::string& name, LanguageModel<double> model) {
  INFO(name);
  nn::initialise<double>(model, 3);
  // Positions and biases that are not 0.
  std::uint64_t stream = 50;
  model.visit([&](const std::string& weight, Param<double>& value, Param<double>&) {
    if (weight.find("pos") == std::string::npos) return;
    const CounterRandom random(7, ++stream);
    for (Index i = 0; i < value.size(); ++i) value[i] = 0.5 * random.normal(std::uint64_t(i));
  });
  REQUIRE(model.takes_packed());
  const Tokens tokens;
  Context<double> c;
  c.threads = 2;
  (void)gradients_of(model);
  const double padded =
      model.gradient(c, Index(kLengths.size()), tokens.padded_inputs, tokens.padded_targets);
  const std::vector<double> wanted = gradients_of(model);
  c.packed = &tokens.starts;
  const double packed = model.gradient(c, 1, tokens.inputs, tokens.targets);
  const std::vector<double> got = gradients_of(model);
  CHECK(std::abs(packed - padded) < 1e-12);
  CHECK(std::abs(model.loss(c, 1, tokens.inputs, tokens.targets) - padded) < 1e-12);
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    worst = std::max(worst, std::abs(got[i] - wanted[i]));
    largest = std::max(largest, std::abs(wanted[i]));
  }
  CHECK(worst < 1e-12 * (1 + largest));
  CHECK(largest > 1e-3);

  const std::vector<Index> no_starts{0};
  c.packed = &no_starts;
  CHECK(model.gradient(c, 1, {}, {}) == 0);
  const std::vector<double> none = gradients_of(model);
  CHECK(std::count(none.begin(), none.end(), 0.0) == std::ptrdiff_t(none.size()));
}

}  // namespace

TEST_CASE("a model of every variant learns from packed sequences what it learns from padded ones",
          "[nn]") {
  const nn::GptOptions o = small_gpt(20);
  std::vector<std::string> names = nn::attention_names();
  for (const std::string& extra : nn::extra_attention_names()) names.push_back(extra);
  for (const std::string& name : names) {
    const auto layer_of = [&](Index layer) {
      return nn::attention_by_name<double>(name, o.width, o.heads, layer, 4);
    };
    // A block that learns from each of its steps takes padded rows alone.
    if (layer_of(0)->scored_steps() > 1)
      CHECK_FALSE(layer_of(0)->takes_packed());
    else
      check(name, nn::make_gpt<double>(o, layer_of));
  }
  for (const auto gate : {nn::ExtraSource::projected, nn::ExtraSource::calculated})
    check("qkvi, rotated", nn::make_qkvi_lm<double>(o, gate));
  check("ode", nn::make_ode_lm<double>(o));
  check("dialectical", nn::make_dialectical_lm<double>(kVocabulary, 8, 6, 20, 2, {.max_steps = 3}));
}

TEST_CASE("packed sequences that do not fit a model are told in one sentence", "[nn]") {
  nn::GptOptions o = small_gpt(16);
  o.depth = 1;
  const auto make = [&](Halting halting) {
    return nn::make_gpt<double>(o, [&](Index) {
      const auto even = nn::AttentionOptions::even(8, 2);
      return std::make_unique<nn::ProjectedAttention<Dialectical<double>>>(
          even, make_dialectical<double>(even.heads, {.halting = halting}), causal<double>());
    });
  };
  LanguageModel<double> model = make(Halting::per_token), batch = make(Halting::batch);
  const Tokens tokens;
  Context<double> c;
  std::vector<Index> starts = tokens.starts;
  c.packed = &starts;
  const auto say = [&](LanguageModel<double>& of, Index count) {
    return message_of([&] { (void)of.loss(c, count, tokens.inputs, tokens.targets); });
  };
  CHECK(say(model, 1) == "LanguageModel: a sequence has 17 tokens, the table of positions has 16");
  CHECK_FALSE(batch.takes_packed());
  CHECK(say(batch, 1) ==
        "LanguageModel: packed sequences were given to a model whose rows depend on all rows of a "
        "batch, or choose their keys");
  starts.back() = 40;
  CHECK(say(model, 1) == "Context::packed ends with 40, there are 41 rows");
  CHECK(message_of([&] { (void)model.loss(c, 41, tokens.inputs, tokens.targets); }) ==
        "LanguageModel: packed sequences were given in several batches, they take one");
  nn::Matrix<double> logits(1, kVocabulary);
  auto cache = model.new_cache(1);
  const Index one[] = {3};
  CHECK(message_of([&] { model.step(c, one, cache, logits.view()); }) ==
        "LanguageModel::step: packed sequences were given, a cache has 1 of equal length");
}
