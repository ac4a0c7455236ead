// SPDX-License-Identifier: Apache-2.0
// Attention layers whose scores, normalisers and readouts read numbers of tokens, which they
// project from the same rows as their keys and values.

#include "catch.hpp"
#include "message_of.hpp"
#include "nn_case.hpp"
#include "token_parts.hpp"

#include <heed/check/causality.hpp>
#include <heed/nn/projected_attention.hpp>
#include <heed/plug/own_score.hpp>

#include <numeric>

using namespace heed_test;

namespace {

constexpr Index kWidth = 8, kHeads = 2, kBatch = 2, kLen = 6;

template <class Real>
struct Forgetting {
  using Features = heed::CumulativeInputs<1, heed::LogSigmoid>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.query[0] - pair.key[0];
  }
};
template <class Real>
struct Tempered {
  using Features = heed::TokenInputs<1, 2>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * (pair.query[0] + pair.key[0]) + pair.key[1];
  }
};
template <class Real>
struct Warm {
  using Features = heed::TokenInputs<1, 0>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0];
  }
};
using Forgets = nn::ProjectedAttention<heed::OwnAttention<Forgetting, double>>;
using Tempers = nn::ProjectedAttention<heed::OwnAttention<Tempered, double>>;
using Warms = nn::ProjectedAttention<heed::OwnAttention<Warm, double>>;
// Numbers of a formula of rows, of a readout, and of all parts at once.
using Weighs = nn::ProjectedAttention<
    heed::Attention<double, heed::DotScore<double>, GatedSink<double>, heed::Identity<double>>>;
using Gates = nn::ProjectedAttention<
    heed::Attention<double, heed::DotScore<double>, heed::Softmax<double>, Gate<double>>>;
using Streams = nn::ProjectedAttention<
    heed::Attention<double, heed::OwnScore<Warm, double>, StreamedSink<double>, Gate<double>>>;
using All = nn::ProjectedAttention<
    heed::Attention<double, heed::OwnScore<Tempered, double>, GatedSink<double>, Gate<double>>>;

[[nodiscard]] nn::AttentionOptions options(bool packed) {
  nn::AttentionOptions even = nn::AttentionOptions::even(kWidth, kHeads);
  if (!packed) even.names = nn::split_names();
  return even;
}

template <class Layer>
[[nodiscard]] std::vector<std::string> names(Layer& layer) {
  std::vector<std::string> all;
  layer.visit([&](const std::string& name, auto&, auto&) { all.push_back(name); });
  return all;
}

// Compares gradients of x, of the weights, and of a memory with `more` further tokens per sequence,
// with differences; no memory if the layer has none.
template <class Layer>
void check(Layer layer, Index more) {
  shake<double>(layer);
  nn::Context<double> c;
  c.threads = 1;
  const Index tokens = kBatch * kLen, others = kBatch * (kLen + more);
  auto x = normals<double>(tokens, kWidth, 1), memory = normals<double>(others, kWidth, 2);
  const auto g = normals<double>(tokens, kWidth, 3);
  nn::Matrix<double> y(tokens, kWidth), dx(tokens, kWidth), dmemory(others, kWidth);
  const auto run = [&] {
    const auto of_x = std::as_const(x).view();
    layer.forward(c, kBatch, of_x, more > 0 ? std::as_const(memory).view() : of_x, y.view());
    const auto out = numbers(y.view()), pull = numbers(g.view());
    return std::inner_product(out.begin(), out.end(), pull.begin(), 0.0);
  };
  std::vector<CheckedInput> inputs{{"x", &x, &dx}};
  if (more > 0) inputs.push_back({"memory", &memory, &dmemory});
  const auto report = check_layer(
      layer, run,
      [&] {
        run();
        const auto of_x = std::as_const(x).view();
        if (more > 0)
          layer.backward(c, kBatch, of_x, std::as_const(memory).view(), g.view(), dx.view(),
                         dmemory.view());
        else
          layer.backward(c, kBatch, of_x, g.view(), dx.view());
      },
      inputs);
  INFO(report.text());
  CHECK(report.passed);
}

}  // namespace

TEST_CASE("Layers project the numbers that scores read of tokens") {
  const auto causal = heed::causal<double>();
  SECTION("packed") {
    check(Forgets(options(true), {}, causal), 0);
    check(Tempers(options(true), {}, causal), 0);
  }
  SECTION("one projection each, of the memory too") {
    check(Forgets(options(false), {}, causal), 0);
    check(Tempers(options(false), {}, {}), 3);
  }
}

TEST_CASE("Layers project the numbers that normalisers and readouts read of tokens") {
  const auto causal = heed::causal<double>();
  SECTION("packed") {
    check(Gates(options(true), {}, causal), 0);
    check(All(options(true), {}, causal), 0);
  }
  SECTION("one projection each, of the memory too") {
    check(Weighs(options(false), {}, {}), 3);
    check(All(options(false), {}, {}), 3);
  }
  // As many columns per head as all parts read together.
  All layer(options(false), {}, {});
  CHECK(find_weight<double>(layer, "query_inputs_proj.weight")->shape() ==
        std::vector<Index>{4 * kHeads, kWidth});
  CHECK(find_weight<double>(layer, "key_inputs_proj.weight")->shape() ==
        std::vector<Index>{4 * kHeads, kWidth});
}

TEST_CASE("Projections of numbers of tokens have names and refuse gates of another source") {
  Tempers layer(options(false), {}, {});
  const auto all = names(layer);
  for (const char* name : {"query_inputs_proj.weight", "key_inputs_proj.weight"})
    CHECK(std::count(all.begin(), all.end(), name) == 1);
  CHECK(find_weight<double>(layer, "key_inputs_proj.weight")->shape() ==
        std::vector<Index>{2 * kHeads, kWidth});
  nn::AttentionOptions gated = options(false);
  gated.extra = nn::ExtraSource::from_query;
  CHECK(message_of([&] { Tempers(gated, {}, {}); }) ==
        "ProjectedAttention: a gate was asked for, the op reads numbers of tokens, too");
}

TEST_CASE("A layer that forgets is causal") {
  Forgets layer(options(true), {}, heed::causal<double>());
  shake<double>(layer);
  nn::Context<double> c;
  const auto x = numbers(normals<double>(kBatch * kLen, kWidth, 1).view());
  const auto run = [&](const std::vector<double>& tokens) {
    nn::Matrix<double> y(kBatch * kLen, kWidth);
    layer.forward(c, kBatch, {tokens.data(), kBatch * kLen, kWidth}, y.view());
    return numbers(y.view());
  };
  const auto report = heed::audit_causality(run, x, kLen, {.batch = kBatch});
  INFO(report.text());
  CHECK(report.causal);
}

TEST_CASE("A layer takes steps where no key has numbers that a cache would have to keep") {
  CHECK(!Forgets(options(true), {}, heed::causal<double>()).can_step());
  CHECK(!Tempers(options(true), {}, heed::causal<double>()).can_step());
  CHECK(!Weighs(options(true), {}, heed::causal<double>()).can_step());
  const auto check_steps = [](auto layer) {
    shake<double>(layer);
    REQUIRE(layer.can_step());
    nn::Context<double> c;
    const auto x = normals<double>(kLen, kWidth, 1);
    nn::Matrix<double> whole(kLen, kWidth), y(1, kWidth);
    layer.forward(c, 1, x.view(), whole.view());
    auto cache = layer.new_cache(1);
    for (Index t = 0; t < kLen; ++t) {
      layer.step(c, 1, x.view().row_range(t, 1), y.view(), cache);
      for (Index column = 0; column < kWidth; ++column)
        CHECK(std::abs(y.view().row(0)[column] - whole.view().row(t)[column]) < 1e-12);
    }
  };
  check_steps(Warms(options(true), {}, heed::causal<double>()));
  check_steps(Gates(options(true), {}, heed::causal<double>()));
  check_steps(Streams(options(false), {}, heed::causal<double>()));
}
