// SPDX-License-Identifier: Apache-2.0

// Own scores of users, differentiated by the library.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_check.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace {

using namespace heed;
using heed_test::message_of;

// A score that reads every field of a pair, and uses every word of a formula.
template <class T>
struct Everything {
  Param<T> slope = T(0.3), width = T(1.5);
  double offset = 0.25;
  static constexpr auto parameters =
      std::tuple{named("slope", &Everything::slope), named("offset", &Everything::offset),
                 named("width", &Everything::width, Range::positive)};
  using Features = SquaredNorms;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S near = math::exp(S(-squared_distance(pair) / (2.0 * p[1] * p[1] + 20.0)));
    const S bent = math::tanh(S(pair.logit + offset)) + math::sqrt(S(1.0 + pair.dot * pair.dot));
    const S far = math::maximum(S(distance(pair) - 2.5), math::constant<S>(0));
    return bent * near - p[0] * far / (1.0 + p[1]) + math::sigmoid(S(p[0] * pair.dot));
  }
};

// A score whose slope is missing in `parameters`.
template <class T>
struct Unnamed {
  Param<T> slope = T(0.3);
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * distance(pair);
  }
};
// A score that reads its option as a parameter.
template <class T>
struct OptionAsParameter {
  Param<T> slope = T(0.3);
  double cap = 2;
  static constexpr auto parameters =
      std::tuple{named("slope", &OptionAsParameter::slope), named("cap", &OptionAsParameter::cap)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[1] * math::tanh(S(p[0] * pair.logit));
  }
};
// Keys have norms, queries have none.
template <class T>
struct Featureless {
  using Features = SquaredKeyNorms;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit - pair.key[0] - pair.query[0];
  }
};

// The words of core/functions.hpp, and comparisons of what is differentiated.
template <class T>
struct MoreWords {
  Param<T> power = T(1.5), rate = T(0.7);
  static constexpr auto parameters = std::tuple{named("power", &MoreWords::power, Range::positive),
                                                named("rate", &MoreWords::rate)};
  using Features = SquaredNorms;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S wave = math::sin(S(p[1] * pair.dot)) + math::cos(pair.logit) * math::erf(pair.dot);
    const S grown =
        math::log1p(squared_distance(pair)) - math::expm1(S(-0.1 * pair.dot * pair.dot));
    const S raised = math::pow(S(pair.dot * pair.dot + 0.5), p[0]) + math::pow(S(p[0] + 1.0), 2);
    const S lower = math::minimum(pair.logit, math::softplus(S(pair.dot - 1.0)));
    return math::select(pair.logit > 0.1, S(wave + lower), S(0.2 * grown)) + 0.01 * raised;
  }
};

// One parameter, and inverse norms; no template parameter of its own.
template <class T>
struct Angle {
  Param<T> sharpness = T(2);
  static constexpr auto parameters = std::tuple{named("sharpness", &Angle::sharpness)};
  using Features = InverseNorms;
  auto score(const auto& pair, const auto& p) const { return p[0] * cosine(pair); }
};

// A score with its derivative by hand; wrong if `error` is not 0.
template <class T>
struct ByHand {
  Param<T> factor = T(0.7);
  double error = 0;
  static constexpr auto parameters =
      std::tuple{named("factor", &ByHand::factor), named("error", &ByHand::error)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * p[0];
  }
  template <class S>
  void score_vjp(const auto& pair, const auto& p, S g, auto& d, auto& dp) const {
    d.logit = g * p[0];
    dp[0] += g * pair.logit * (1.0 + error);
  }
};

// A score that is right wherever query and key differ.
template <class T>
struct Laplace {
  Param<T> rate = T(0.5);
  static constexpr auto parameters = std::tuple{named("rate", &Laplace::rate)};
  using Features = SquaredNorms;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return -p[0] * math::sqrt(squared_distance(pair));
  }
};

constexpr Geometry kSizes{2, 4, 4, 2, 37, 41, 9, 5};  // four heads

template <class T>
OwnAttention<Everything, T> everything() {
  OwnAttention<Everything, T> op;
  op.score.slope = {T(0.1), T(0.2), T(-0.3), T(0.4)};
  return op;
}

}  // namespace

TEST_CASE("A score of one's own agrees with the slow twin and its gradient in double", "[own]") {
  const Geometry sizes{2, 4, 4, 2, 13, 15, 5, 3};
  const OpReport report = check_op(everything<double>(), sizes, {.max_entries_per_tensor = 12});
  INFO(report.text());
  CHECK(report.passed());
  CHECK(report.cases.size() == 19);
}

TEST_CASE("Every further word of a formula has its gradient", "[own]") {
  OwnAttention<MoreWords, double> op;
  op.score.rate = {0.3, 0.7, -0.4, 1.1};
  const OpReport report = check_op(op, {2, 4, 4, 2, 13, 15, 5, 3}, {.max_entries_per_tensor = 12});
  INFO(report.text());
  CHECK(report.passed());
  OpCall fast(OwnAttention<MoreWords, float>(), kSizes, causal<float>());
  OpCall exact(OwnAttention<MoreWords, double>(), kSizes, causal<double>());
  fast.forward();
  exact.forward();
  double worst = 0;
  for (std::size_t i = 0; i < exact.out.size(); ++i)
    worst = std::max(worst, std::abs(fast.out[i] - exact.out[i]));
  CHECK(worst < 2e-5);
}

TEST_CASE("In float it gives what it gives in double, in tiles of any size", "[own]") {
  const Geometry sizes{2, 4, 4, 2, 67, 71, 9, 5};
  const auto masks = [&]<class T>(std::vector<Mask<T>>& list) {
    list = {{},
            causal<T>(Align::bottom_right),
            window<T>(7, 4) & key_lengths<T>({71, 13}),
            causal<T>() & soft_cap<T>(T(1.5)) & alibi<T>({1, T(0.5), 2, 0})};
  };
  std::vector<Mask<float>> in_float;
  std::vector<Mask<double>> in_double;
  masks(in_float);
  masks(in_double);
  for (std::size_t m = 0; m < in_float.size(); ++m) {
    INFO("mask " << m);
    Options tiles;
    tiles.key_tile = m % 2 == 0 ? 0 : 1;
    tiles.panel_vectors = m % 2 == 0 ? 0 : 1;
    OpCall fast(everything<float>(), sizes, in_float[m], tiles);
    OpCall exact(everything<double>(), sizes, in_double[m]);
    const auto run = [](auto& call) {
      call.forward();
      call.backward();
    };
    run(fast);
    run(exact);
    const auto compare = [&](const char* what, const auto& a, const auto& b) {
      INFO(what);
      double top = 1, error = 0;
      for (std::size_t i = 0; i < std::size_t(b.size()); ++i) {
        REQUIRE(std::isfinite(a.data()[i]));
        top = std::max(top, std::abs(b.data()[i]));
        error = std::max(error, std::abs(double(a.data()[i]) - b.data()[i]));
      }
      CHECK(error < 2e-5 * top);
    };
    compare("out", fast.out, exact.out);
    compare("grad_query", fast.grad_query, exact.grad_query);
    compare("grad_key", fast.grad_key, exact.grad_key);
    compare("grad_value", fast.grad_value, exact.grad_value);
    compare("slope", fast.grad_op.score.slope, exact.grad_op.score.slope);
    compare("width", fast.grad_op.score.width, exact.grad_op.score.width);
  }
}

TEST_CASE("check_op passes scores with and without a derivative, and tells what is wrong",
          "[own]") {
  OwnAttention<Angle, float> angle;
  CHECK(check_op(angle).passed());
  angle.score.sharpness = {1.0F, -2.0F, 3.0F, 0.5F};
  const OpReport per_head = check_op(angle);
  INFO(per_head.text());
  CHECK(per_head.passed());
  CHECK(per_head.cases.size() == 31);

  OwnAttention<ByHand, double> by_hand;
  CHECK(check_op(by_hand).passed());
  by_hand.score.error = 1e-3;
  const OpReport wrong = check_op(by_hand);
  CHECK_FALSE(wrong.passed());
  CHECK(wrong.cases[0].first == "score_vjp");
  CHECK(wrong.cases[0].second.worst.tensor == "dp");
  CHECK(wrong.cases[1].second.passed);  // forward is right
  CHECK(wrong.cases[2].second.worst.tensor == "score.factor");
}

TEST_CASE("check_op finds gradients that are not finite where query and key are the same",
          "[own]") {
  const OpReport report = check_op(OwnAttention<Laplace, float>{});
  INFO(report.text());
  CHECK_FALSE(report.passed());
  for (const auto& [name, found] : report.cases) CHECK(found.passed == (name != "finite"));
  CHECK(report.text().ends_with("FAILED\n"));
}

TEST_CASE("Directions that a value does not depend on stay 0 beside infinity and NaN", "[own]") {
  using D = LaneDual<double, 3>;
  const D x = D::variable<0>(2.0), y = D::variable<2>(3.0);
  const D product = x * y, ratio = x / y, kept = math::select(true, x, y);
  CHECK(product.moves[0]);
  CHECK_FALSE(product.moves[1]);
  CHECK(product.grad[0] == 3);
  CHECK(product.grad[2] == 2);
  CHECK(ratio.grad[0] == Approx(1.0 / 3));
  CHECK(ratio.grad[2] == Approx(-2.0 / 9));
  CHECK(kept.grad[0] == 1);
  CHECK(kept.grad[2] == 0);
  CHECK((1.0 - x).grad[0] == -1);
  CHECK((6.0 / x).grad[0] == -1.5);
  CHECK(math::absolute(-x).grad[0] == 1);
  CHECK(math::maximum(x, y).grad[2] == 1);
  const D blown = x * D(kInfinity<double>);
  CHECK_FALSE(blown.moves[1]);
  CHECK(math::falling_sigmoid(x).grad[0] == Approx(-math::sigmoid_slope(2.0)));
}

TEST_CASE("Wrong sizes and ranges are told in one sentence", "[own]") {
  OwnAttention<Everything, float> op;
  const auto said = [&] { return message_of([&] { op.validate(kSizes, "heed::forward"); }); };
  op.score.slope = {1.0F, 2.0F, 3.0F};
  CHECK(
      said() ==
      "heed::forward: slope has 3 values, the call has 4 heads; it needs 1 value, or one per head");
  op.score.slope = 1.0F;
  op.score.width = {1.0F, 1.0F, 0.0F, 1.0F};
  CHECK(said() == "heed::forward: width is 0, it must be positive");
  op.score.width = 1.0F;
  op.score.offset = kInfinity<double>;
  CHECK(said() == "heed::forward: offset is inf, it must be finite");
  CHECK(message_of([] { require_within(-1, interval_of(Range::not_negative), "f", "x"); }) ==
        "f: x is -1, it must not be negative");
}

TEST_CASE("A formula that reads numbers which nobody gives is told so", "[own]") {
  const auto said = [](const auto& op) {
    return message_of([&] { op.validate(kSizes, "heed::forward"); });
  };
  CHECK(said(OwnAttention<Unnamed, float>{}) ==
        "heed::forward: the formula reads p[0], `parameters` names so many numbers per "
        "head, options not counted: 0 (plug/own_score.hpp)");
  CHECK(said(OwnAttention<OptionAsParameter, double>{}) ==
        "heed::forward: the formula reads p[1], `parameters` names so many numbers per "
        "head, options not counted: 1 (plug/own_score.hpp)");
  CHECK(said(OwnAttention<Featureless, float>{}) ==
        "heed::forward: the formula reads pair.query[0], its Features give each query "
        "row so many numbers: 0 (plug/own_score.hpp)");
}

TEST_CASE("Options and parameters go along when an op is converted", "[own]") {
  OwnAttention<Everything, float> op;
  op.score.offset = 3.5;
  op.score.slope = {1.0F, 2.0F};
  const auto cast = cast_op<double>(op);
  CHECK(cast.score.offset == 3.5);
  CHECK(cast.score.slope[1] == 2.0);
  CHECK(cast.score.width[0] == 1.5);
  CHECK(scalars_of<decltype(op.score)> == 2);
  CHECK(scalar_of<float>(op.score, 1, 0) == 1.5F);
}
