// SPDX-License-Identifier: Apache-2.0

// The measures of attention layers (models/attention_measures.hpp) against counts by hand.

#include "catch.hpp"
#include "nn_case.hpp"

#include <heed/compiled.hpp>
#include <heed/measure/resonance.hpp>
#include <heed/models/attention_measures.hpp>
#include <heed/nn/attention_layers.hpp>
#include <heed/ops/prototype.hpp>

#include <map>

using namespace heed_test;

namespace {

constexpr Index kWidth = 16, kHeads = 2, kDim = 8, kBatch = 2, kLen = 7;

template <class Layer>
std::map<std::string, double> measures_after_forward(Layer& layer, const nn::Matrix<double>& x) {
  nn::Context<double> c;
  nn::Matrix<double> y(x.rows(), kWidth);
  layer.forward(c, kBatch, x.view(), y.view());
  std::map<std::string, double> found;
  for (const auto& [name, value] : nn::measures_of(layer, kBatch)) found[name] = value;
  return found;
}

// Rows [first, first + count) of a weight (rows, kWidth).
double* rows_of(heed::Param<double>& weight, Index first) { return weight.data() + first * kWidth; }

}  // namespace

TEST_CASE("DAR's crossings and mean resonance are those of its visible pairs") {
  heed::Dar<double> op;
  op.score.vigilance = 0.2;
  auto layer = nn::dar_attention<double>(kWidth, kHeads, op);
  shake<double>(layer);
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  const auto found = measures_after_forward(layer, x);

  const auto in = layer.inputs(kBatch);
  double crossings = 0, resonance = 0, pairs = 0;
  for (Index b = 0; b < kBatch; ++b)
    for (Index h = 0; h < kHeads; ++h)
      for (Index i = 0; i < kLen; ++i)
        for (Index j = 0; j <= i; ++j) {
          double qk = 0, qq = 0, kk = 0;
          for (Index c = 0; c < kDim; ++c) {
            const double q = in.query(b, h, i, c), k = in.key(b, h, j, c);
            qk += q * k;
            qq += q * q;
            kk += k * k;
          }
          const double cosine = qk / std::sqrt(qq * kk);
          crossings += cosine > 0.2;
          resonance += 1 / (1 + std::exp(-8 * (cosine - 0.2)));
          ++pairs;
        }
  CHECK(crossings > 0);
  CHECK(crossings < pairs);
  CHECK(found.at("vigilance_crossings") == Approx(crossings / pairs).epsilon(1e-12));
  CHECK(found.at("mean_resonance") == Approx(resonance / pairs).epsilon(1e-6));
}

TEST_CASE("Crossings are those of the gate's own input, for every gate and whoever counts them") {
  using heed::GateKind;
  for (const GateKind gate :
       {GateKind::logistic, GateKind::centred, GateKind::tanh, GateKind::piecewise_linear})
    for (const int iterations : {1, 3}) {
      heed::Dar<double> op;
      op.score.gate = gate;
      op.score.iterations = iterations;
      op.score.vigilance = 0.3;
      auto layer = nn::dar_attention<double>(kWidth, kHeads, op);
      shake<double>(layer);
      const auto found = measures_after_forward(layer, normals<double>(kBatch * kLen, kWidth, 1));

      const auto in = layer.inputs(kBatch);
      double crossings = 0, open = 0, pairs = 0;
      for (Index b = 0; b < kBatch; ++b)
        for (Index h = 0; h < kHeads; ++h)
          for (Index i = 0; i < kLen; ++i)
            for (Index j = 0; j <= i; ++j, ++pairs) {
              double qk = 0, qq = 0, kk = 0;
              for (Index c = 0; c < kDim; ++c) {
                const double q = in.query(b, h, i, c), k = in.key(b, h, j, c);
                qk += q * k;
                qq += q * q;
                kk += k * k;
              }
              const double cosine = qk / std::sqrt(qq * kk);
              const double input = gate == GateKind::centred ? (cosine + 1) / 2 : cosine;
              crossings += input > 0.3;
              double r = 0;
              for (int t = 0; t < iterations; ++t) {
                const double y = 8 * (input + 0.5 * r - 0.3);
                r = gate == GateKind::tanh               ? (1 + std::tanh(y)) / 2
                    : gate == GateKind::piecewise_linear ? std::min(1.0, std::max(0.0, y + 0.5))
                                                         : 1 / (1 + std::exp(-y));
              }
              open += r > 0.5;
            }
      INFO("gate " << int(gate) << ", iterations " << iterations);
      CHECK(crossings > 0);
      CHECK(crossings < pairs);
      CHECK(found.at("vigilance_crossings") == Approx(crossings / pairs).epsilon(1e-12));
      const auto statistics = heed::resonance_statistics(layer.stage.op, in.query.plain(),
                                                         in.key.plain(), heed::causal<double>());
      double mean = 0;
      for (const double share : statistics.crossing) mean += share / double(kHeads);
      CHECK(mean == Approx(crossings / pairs).epsilon(1e-12));
      // Feedback opens gates whose input lies below the vigilance.
      if (iterations == 1)
        CHECK(open == crossings);
      else
        CHECK(open > crossings);
    }
}

TEST_CASE("An intent that q, k and v could have given has distance 0, one across them 1") {
  constexpr Index kTall = 64, kSmall = 4;  // 3 kSmall rows leave most of the space free
  auto layer = nn::intent_attention<double>(kTall, kTall / kSmall, nn::ExtraSource::projected,
                                            nn::RopePairs::halves);
  shake<double>(layer);
  heed::Param<double>& w = *find_weight<double>(layer, "c_attn.weight");
  const Index rows = w.extent(1);
  REQUIRE(rows == kTall);
  const auto row = [&](Index part, Index r) { return w.data() + (part * kTall + r) * kTall; };
  const auto distance = [&] {
    nn::Context<double> c;
    const auto x = normals<double>(kBatch * kLen, kTall, 2);
    nn::Matrix<double> y(x.rows(), kTall);
    layer.forward(c, kBatch, x.view(), y.view());
    for (const auto& [name, value] : nn::measures_of(layer, kBatch))
      if (name == "intent_distance") return value;
    return -1.0;
  };
  CHECK(distance() == Approx(std::sqrt(1.0 - 3.0 * kSmall / kTall)).margin(0.03));

  // Each row of the intent: a mixture of rows of q, k and v of its own head.
  for (Index r = 0; r < kTall; ++r)
    for (Index c = 0; c < kTall; ++c) {
      const Index neighbour = r / kSmall * kSmall + (r + 1) % kSmall;
      row(3, r)[c] = row(0, r)[c] - 2 * row(1, neighbour)[c] + 0.5 * row(2, r)[c];
    }
  CHECK(distance() < 1e-12);

  // The intent of another head: almost all of it is outside.
  for (Index r = 0; r < kTall; ++r)
    std::copy(row(0, (r + kSmall) % kTall), row(0, (r + kSmall) % kTall) + kTall, row(3, r));
  CHECK(distance() > 0.8);
}

TEST_CASE("The mean gate is the mean of its sigmoids") {
  auto layer = nn::intent_attention<double>(kWidth, kHeads, nn::ExtraSource::projected,
                                            nn::RopePairs::halves);
  shake<double>(layer);
  const auto found = measures_after_forward(layer, normals<double>(kBatch * kLen, kWidth, 3));
  const auto gate = layer.inputs(kBatch).extra;
  double sum = 0;
  for (Index b = 0; b < kBatch; ++b)
    for (Index h = 0; h < kHeads; ++h)
      for (Index t = 0; t < kLen; ++t)
        for (Index c = 0; c < kDim; ++c) sum += 1 / (1 + std::exp(-gate(b, h, t, c)));
  CHECK(found.at("mean_gate") == Approx(sum / double(kBatch * kLen * kWidth)).epsilon(1e-12));
}

TEST_CASE("The lambda of a token-wise difference is the mean of its sigmoids") {
  auto layer = nn::differential_v2_attention<double>(kWidth, kHeads);
  shake<double>(layer);
  const auto found = measures_after_forward(layer, normals<double>(kBatch * kLen, kWidth, 4));
  const auto extra = layer.inputs(kBatch).extra;
  double sum = 0;
  for (Index b = 0; b < kBatch; ++b)
    for (Index h = 0; h < kHeads; ++h)
      for (Index t = 0; t < kLen; ++t) sum += 1 / (1 + std::exp(-extra(b, h, t, 0)));
  CHECK(found.at("lambda") == Approx(sum / double(kBatch * kLen * kHeads)).epsilon(1e-12));
}

TEST_CASE("A lambda of four vectors is reported as the number that they make") {
  auto layer = nn::differential_v1_attention<double>(kWidth, kHeads, 2);
  shake<double>(layer);
  const auto found = measures_after_forward(layer, normals<double>(kBatch * kLen, kWidth, 5));
  const auto& n = layer.stage.op.normaliser;
  const auto along = [](const heed::Param<double>& a, const heed::Param<double>& b) {
    double sum = 0;
    for (Index i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return std::exp(sum);
  };
  const double init = 0.8 - 0.6 * std::exp(-0.3);
  CHECK(found.at("lambda") ==
        Approx(along(n.lambda_q1, n.lambda_k1) - along(n.lambda_q2, n.lambda_k2) + init));
}

TEST_CASE("Prototypes in use are those that some key resembles most") {
  const auto options = nn::AttentionOptions::even(kWidth, kHeads);
  nn::ProjectedAttention<heed::Prototype<double>> layer(
      options, heed::make_prototype<double>(options.heads, 3), heed::causal<double>());
  // Keys are the columns x[kWidth / 2 h ...], each a unit vector of its own sign pattern.
  heed::Param<double>& weight = *find_weight<double>(layer, "c_attn.weight");
  weight.set_zero();
  find_weight<double>(layer, "c_attn.bias")->set_zero();
  for (Index r = 0; r < kWidth; ++r) rows_of(weight, kWidth + r)[r] = 1;
  heed::Param<double>& prototypes = layer.stage.op.score.W;
  prototypes.set_zero();
  for (Index h = 0; h < kHeads; ++h)
    for (Index m = 0; m < 3; ++m) prototypes.data()[(h * 3 + m) * kDim + m] = 1;
  nn::Matrix<double> x(kBatch * kLen, kWidth);
  std::fill_n(x.view().data, x.rows() * kWidth, 0.0);
  for (Index t = 0; t < x.rows(); ++t) {
    x.view().row(t)[t % 2] = 1;     // head 0: prototypes 0 and 1
    x.view().row(t)[kDim + 2] = 1;  // head 1: prototype 2
  }
  CHECK(measures_after_forward(layer, x).at("prototypes_in_use") == Approx(1.5));
}

TEST_CASE(
    "Numbers of tokens have the means of the layer's diagnostics, and the steps of those that "
    "ponder") {
  auto layer = nn::ProjectedAttention<heed::Dialectical<double>>(
      nn::AttentionOptions::even(kWidth, kHeads),
      heed::make_dialectical<double>(nn::AttentionOptions::even(kWidth, kHeads).heads,
                                     {.max_steps = 5, .halting = heed::Halting::adaptive}),
      heed::causal<double>());
  shake<double>(layer);
  const auto found = measures_after_forward(layer, normals<double>(kBatch * kLen, kWidth, 6));
  const auto mean = [](const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v;
    return sum / double(x.size());
  };
  const auto tokens = layer.token_diagnostics();
  REQUIRE(tokens.size() == 4);
  CHECK(tokens[3].name == "steps");
  for (const nn::TokenNumbers& numbers : tokens) {
    REQUIRE(numbers.of.size() == std::size_t(kBatch * kLen));
    if (numbers.name == "steps") continue;
    CHECK(mean(numbers.of) == Approx(found.at(numbers.name)));
  }
  // N < rho <= N + 1, of means over heads, too; and row t of head 0 stands where row_index() says
  for (std::size_t t = 0; t < tokens[3].of.size(); ++t) {
    CHECK(tokens[3].of[t] > tokens[1].of[t]);
    CHECK(tokens[3].of[t] <= tokens[1].of[t] + 1);
    double steps = 0;
    for (Index h = 0; h < kHeads; ++h)
      steps += layer.stage.steps()[(t / kLen * kHeads + std::size_t(h)) * kLen + t % kLen];
    CHECK(tokens[3].of[t] == Approx(steps / double(kHeads)));
  }
}

TEST_CASE("Shares of steps sum to 1 and have the reported mean") {
  auto layer = nn::dialectical_head<double>(kWidth, kWidth);
  shake<double>(layer);
  const auto found = measures_after_forward(layer, normals<double>(kBatch * kLen, kWidth, 6));
  double sum = 0, mean = 0;
  for (const auto& [name, share] : found)
    if (name.starts_with("steps_used=")) {
      sum += share;
      mean += share * std::stod(name.substr(11));
    }
  CHECK(sum == Approx(1));
  CHECK(mean == Approx(found.at("steps_used")));
}

namespace {

// Measures of the first and of the other tokens of each sequence, and of all.
template <class Layer>
std::array<std::map<std::string, double>, 3> parts_after_forward(Layer& layer, Index first) {
  nn::Context<double> c;
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  nn::Matrix<double> y(x.rows(), layer.width_out());
  layer.forward(c, kBatch, x.view(), y.view());
  std::array<std::vector<char>, 2> marks;
  for (Index t = 0; t < kBatch * kLen; ++t) {
    marks[0].push_back(t % kLen < first);
    marks[1].push_back(t % kLen >= first);
  }
  std::array<std::map<std::string, double>, 3> found;
  for (std::size_t part = 0; part < 2; ++part)
    for (const auto& [name, value] : nn::measures_of(layer, kBatch, kBatch, {marks[part], kLen}))
      found[part][name] = value;
  for (const auto& [name, value] : nn::measures_of(layer, kBatch, kBatch)) found[2][name] = value;
  return found;
}

}  // namespace

TEST_CASE("Measures of some tokens and of the others make those of all") {
  constexpr Index first = 3;
  // Each row counts once; the pairs of query i count i + 1 times.
  const double rows = double(first) / kLen,
               pairs = double(first * (first + 1)) / double(kLen * (kLen + 1));
  const auto check = [&](auto layer, const std::vector<std::string>& names, double share) {
    shake<double>(layer);
    const auto [some, others, all] = parts_after_forward(layer, first);
    for (const std::string& name : names) {
      INFO(name);
      CHECK(some.at(name) != Approx(others.at(name)).epsilon(1e-6));
      CHECK(share * some.at(name) + (1 - share) * others.at(name) ==
            Approx(all.at(name)).epsilon(1e-12));
    }
  };
  check(nn::dar_attention<double>(kWidth, kHeads, heed::Dar<double>{}), {"mean_resonance"}, pairs);
  check(nn::differential_v2_attention<double>(kWidth, kHeads), {"lambda"}, rows);
  check(nn::intent_attention<double>(kWidth, kHeads, nn::ExtraSource::projected,
                                     nn::RopePairs::halves),
        {"mean_gate"}, rows);
  heed::DialecticalOptions halting;
  check(nn::dialectical_head<double>(kWidth, 4, halting, true), {"tension"}, rows);
}

TEST_CASE("Of no tokens there are no measures, and marks must fit") {
  auto layer = nn::dar_attention<double>(kWidth, kHeads, heed::Dar<double>{});
  nn::Context<double> c;
  const auto x = normals<double>(kBatch * kLen, kWidth, 1);
  nn::Matrix<double> y(x.rows(), kWidth);
  layer.forward(c, kBatch, x.view(), y.view());
  const std::vector<char> none(std::size_t(kBatch * kLen), 0);
  CHECK(nn::measures_of(layer, kBatch, kBatch, {none, kLen}).empty());
  CHECK_THROWS_WITH(nn::measures_of(layer, kBatch, kBatch, {none, kLen - 1}),
                    "measures_of: chosen has 14 marks for sequences of 6 tokens, the layer has "
                    "read 2 sequences of 7");
}
