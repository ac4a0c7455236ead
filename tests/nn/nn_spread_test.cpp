// SPDX-License-Identifier: Apache-2.0
// A model whose tokens are spread over ranks has the loss and the gradients of one process. Ranks are threads.

#include "catch.hpp"
#include "message_of.hpp"
#include "thread_ranks.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/gpt.hpp>
#include <heed/models/initialise.hpp>
#include <heed/models/source_stacks.hpp>
#include <heed/mpi/spread_tokens.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

using namespace heed;
using namespace heed_test;
using nn::Context;
using nn::LanguageModel;

namespace {

constexpr Index kVocabulary = 11, kLen = 150, kRows = 3;

using Make = std::function<LanguageModel<double>()>;

// Models are equal at any time of making.
[[nodiscard]] LanguageModel<double> made(const Make& make) {
  LanguageModel<double> model = make();
  nn::initialise<double>(model, 3);
  // Positions and biases that are not 0.
  std::uint64_t stream = 50;
  model.visit([&](const std::string& weight, Param<double>& value, Param<double>& grad) {
    grad.set_zero();
    if (weight.find("pos") == std::string::npos) return;
    const CounterRandom random(7, ++stream);
    for (Index i = 0; i < value.size(); ++i) value[i] = 0.5 * random.normal(std::uint64_t(i));
  });
  if (model.counts_steps()) model.set_ponder(0.5);
  return model;
}

struct Tokens {
  std::vector<Index> inputs, targets;
  Tokens() {
    for (Index i = 0; i < kRows * kLen; ++i) {
      inputs.push_back(i * i % kVocabulary);
      targets.push_back(i % 3 == 1 ? nn::kIgnoreIndex : (i * 7 + i / 9) % kVocabulary);
    }
  }
};

[[nodiscard]] Context<double> training_context() {
  Context<double> c;
  c.threads = 1;
  c.training = true;
  c.seed = 3;
  c.step = 4;
  return c;
}

struct Answer {
  double loss = 0, evaluated = 0;  // in training, and outside
  std::vector<double> gradients;
};
template <class Model>
[[nodiscard]] Answer answer_of(double loss, Model& model) {
  Answer answer{loss, 0, {}};
  model.visit([&](const std::string&, Param<double>&, Param<double>& grad) {
    answer.gradients.insert(answer.gradients.end(), grad.data(), grad.data() + grad.size());
  });
  return answer;
}

[[nodiscard]] Answer in_one_process(const Make& make) {
  LanguageModel<double> model = made(make);
  Context<double> c = training_context();
  const Tokens all;
  Answer answer = answer_of(model.gradient(c, kRows, all.inputs, all.targets), model);
  c.training = false;
  answer.evaluated = model.loss(c, kRows, all.inputs, all.targets);
  return answer;
}

// `groups` groups of `ranks` ranks share the batch: a group has whole sequences, and its ranks share their tokens.
[[nodiscard]] Answer on_groups(const Make& make, int groups, int ranks) {
  Answer sum;
  const Tokens all;
  for (int group = 0; group < groups; ++group) {
    const Index first = kRows * group / groups, rows = kRows * (group + 1) / groups - first;
    std::vector<Answer> answers(std::size_t(ranks), Answer{});
    on_ranks(ranks, [&](const ThreadRank& comm) {
      LanguageModel<double> model = made(make);
      Context<double> c = training_context();
      const mpi::SpreadTokens spread(
          mpi::AnyCommunicator(comm),
          mpi::Shards::zigzag(kLen, ranks, model.spread_step(c, rows, kLen)));
      c.spread = &spread;
      c.part = {first * kLen, rows * kLen, kRows * kLen,
                Index(all.targets.size()) -
                    std::count(all.targets.begin(), all.targets.end(), nn::kIgnoreIndex)};
      std::vector<Index> inputs, targets;
      for (Index row = first; row < first + rows; ++row)
        for (const Index t : spread.tokens) {
          inputs.push_back(all.inputs[std::size_t(row * kLen + t)]);
          targets.push_back(all.targets[std::size_t(row * kLen + t)]);
        }
      Answer& answer = answers[std::size_t(comm.rank())];
      answer = answer_of(model.gradient(c, rows, inputs, targets), model);
      c.training = false;
      answer.evaluated = model.loss(c, rows, inputs, targets);
    });
    for (const Answer& one : answers) {
      sum.loss += one.loss;
      sum.evaluated += one.evaluated;
      sum.gradients.resize(one.gradients.size(), 0.0);
      for (std::size_t i = 0; i < one.gradients.size(); ++i) sum.gradients[i] += one.gradients[i];
    }
  }
  return sum;
}

// Sums of some thousands of numbers of size 1, added up in another order.
constexpr double kRounding = 1e-11;

void check(const std::string& name, const Make& make) {
  const Answer whole = in_one_process(make);
  double largest = 0;
  for (const double x : whole.gradients) largest = std::max(largest, std::abs(x));
  CHECK(largest > 1e-3);
  for (const auto& [groups, ranks] : {std::pair{1, 1}, {1, 3}, {2, 2}}) {
    INFO(name << ", " << groups << " groups of " << ranks << " ranks");
    const Answer parts = on_groups(make, groups, ranks);
    CHECK(std::abs(parts.loss - whole.loss) < kRounding * (1 + std::abs(whole.loss)));
    // Outside of training rows are not parts of a batch: the steps that chance chooses are those of the group's own sequences.
    if (groups == 1 || name != nn::kDialecticalPonderNet)
      CHECK(std::abs(parts.evaluated - whole.evaluated) < kRounding * (1 + whole.evaluated));
    double worst = 0;
    for (std::size_t i = 0; i < whole.gradients.size(); ++i)
      worst = std::max(worst, std::abs(parts.gradients[i] - whole.gradients[i]));
    CHECK(worst < kRounding * (1 + largest));
  }
}

[[nodiscard]] nn::GptOptions options() {
  nn::GptOptions o;
  o.vocabulary = kVocabulary;
  o.width = 8;
  o.heads = 2;
  o.depth = 2;
  o.max_len = kLen;
  o.dropout = 0.2;
  o.attention_dropout = 0.2;
  return o;
}

}  // namespace

TEST_CASE("a model of every variant learns from tokens on ranks what it learns in one process",
          "[nn]") {
  const nn::GptOptions o = options();
  std::vector<std::string> names = nn::attention_names();
  for (const std::string& extra : nn::extra_attention_names()) names.push_back(extra);
  for (const std::string& name : names) {
    const auto layer_of = [&](Index layer) {
      return nn::attention_by_name<double>(nn::name_in_block(name, layer, o.depth), o.width,
                                           o.heads, layer, 4);
    };
    if (name == nn::kPrototypeArt || name == nn::kPrototypeArtPull)
      CHECK(layer_of(0)->spread_step(training_context(), kRows, kLen) == 0);
    else
      check(name, [&] { return nn::make_gpt<double>(o, layer_of); });
  }
}

TEST_CASE("the sources' own stacks learn from tokens on ranks, rotated ones too", "[nn]") {
  const nn::GptOptions o = options();
  for (const auto gate : {nn::ExtraSource::projected, nn::ExtraSource::calculated})
    check("qkvi, rotated", [&] { return nn::make_qkvi_lm<double>(o, gate); });
  check("ode", [&] { return nn::make_ode_lm<double>(o); });
  check("dialectical", [] {
    return nn::make_dialectical_lm<double>(kVocabulary, 8, 6, kLen, 2, {.max_steps = 3});
  });
}

TEST_CASE("what cannot be spread over ranks is told in one sentence", "[nn]") {
  const Tokens all;
  const auto says = [&](const std::string& name, auto&& change) {
    return message_of([&] {
      on_ranks(1, [&](const ThreadRank& comm) {
        LanguageModel<double> model = made([&] {
          return nn::make_gpt<double>(options(), [&](Index layer) {
            return nn::attention_by_name<double>(name, 8, 2, layer, 4);
          });
        });
        Context<double> c = training_context();
        const mpi::SpreadTokens spread(mpi::AnyCommunicator(comm), mpi::Shards::zigzag(kLen, 1));
        c.spread = &spread;
        c.part = {0, kRows * kLen, kRows * kLen, 1};
        std::vector<Index> starts = {0, kRows * kLen};
        change(c, starts);
        (void)model.gradient(c, kRows, all.inputs, all.targets);
      });
    });
  };
  CHECK(
      says("prototype-art", [](auto&, auto&) {}) ==
      "LanguageModel: the tokens are spread over ranks, the attention of block 0 must have all of "
      "a batch");
  CHECK(says("sdpa", [](auto& c, auto&) { c.part = {}; }) ==
        "LanguageModel: 450 ids were given for 3 sequences that are spread over ranks, 150 of 150 "
        "tokens here, and Context::part has 0 tokens; it must be 450 ids of 450");
  CHECK(says("sdpa", [](auto& c, auto&) { c.spread = nullptr; }) == "nothing was thrown");
  on_ranks(1, [](const ThreadRank& comm) {
    CHECK(message_of([&] {
            (void)mpi::SpreadTokens(mpi::AnyCommunicator(comm), mpi::Shards::zigzag(0, 1));
          }) ==
          "SpreadTokens: rank 0 of 1 has none of the 0 tokens of a sequence; each must have some");
    CHECK(message_of([&] {
            (void)mpi::SpreadTokens(mpi::AnyCommunicator(comm), mpi::Shards::zigzag(9, 2));
          }) == "SpreadTokens: the shards are for 2 ranks, the communicator has 1");
  });
}
