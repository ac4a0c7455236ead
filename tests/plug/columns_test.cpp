// SPDX-License-Identifier: Apache-2.0
// Scores that add up a formula of each column: against the reference and difference quotients, from caches of any storage, with
// the same bits on any number of threads, and with pairs that nobody sees and whose formula is no number.

#include "cached_tokens.hpp"
#include "catch.hpp"
#include "fading_columns.hpp"
#include "hessian_products.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/kv_cache.hpp>
#include <heed/ops/differential.hpp>
#include <heed/plug/own_score.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

// Two numbers per column on each side, two weights per column, and all that a score reads beside.
template <class T>
struct Everything {
  using Features = SquaredNorms;
  Param<T> height = T(0.3), bends;
  std::vector<Index> bends_shape(const Geometry& g) const { return {-1, 2, g.dim_qk / 2}; }
  static constexpr auto parameters =
      std::tuple{named("height", &Everything::height),
                 tensor("bends", &Everything::bends, &Everything::bends_shape)};
  static constexpr int numbers_per_column = 2, weights_per_column = 2;
  static constexpr auto column_weights = &Everything::bends;

  template <class S>
  S column(const auto& q, const auto& k, const auto& w) const {
    const S far = q[0] - k[0];
    return w[0] * math::tanh(S(far * far)) + w[1] * q[1] * math::sigmoid(S(k[1] + q[0]));
  }
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.dot * pair.dot + pair.logit + S(0.05) * pair.query[0] * pair.key[0];
  }
};
template <class T>
OwnAttention<Everything, T> everything(Index heads, Index dim) {
  OwnAttention<Everything, T> op;
  op.score.bends = Param<T>(std::vector<Index>{heads, 2, dim / 2});
  for (Index n = 0; n < op.score.bends.size(); ++n) op.score.bends[n] = T(std::cos(double(n + 1)));
  return op;
}

template <class T>
struct Laplace {
  Param<T> rate = T(0.7);
  static constexpr auto parameters = std::tuple{named("rate", &Laplace::rate)};
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return math::absolute(S(q[0] - k[0]));
  }
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return -p[0] * pair.dot;
  }
};

// The fading columns with a learnt factor of each.
template <class T>
struct Weighed : Fading<T> {
  Param<T> factors;
  std::vector<Index> factors_shape(const Geometry& g) const { return {-1, 1, g.dim_qk / 2}; }
  static constexpr auto parameters =
      std::tuple{tensor("factors", &Weighed::factors, &Weighed::factors_shape)};
  static constexpr auto column_weights = &Weighed::factors;
  template <class S>
  S column(const auto& q, const auto& k, const auto& w) const {
    return w[0] * Fading<T>::template column<S>(q, k, w);
  }
};

// What a column behind the last one would give is not 0.
template <class T>
struct Bells {
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    const S far = q[0] - k[0];
    return math::exp(S(-far * far));
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.dot;  // a number more in each sum is no common shift
  }
};

template <class T>
struct Turned {
  using Transform = Rotation<T>;
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return q[0] * k[0] - S(0.1) * q[0] * q[0];
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

}  // namespace

TEST_CASE("formulas of columns agree with the reference and difference quotients", "[columns]") {
  check_passes(everything<double>(4, 6), {2, 4, 4, 2, 11, 11, 6, 6}, 12);
  check_passes(everything<double>(1, 10), {1, 2, 2, 1, 70, 90, 10, 3}, 12);
  check_passes(OwnAttention<Turned, double>{}, {1, 2, 2, 1, 19, 37, 6, 3}, 12);
}

TEST_CASE("Hessian products of formulas of columns are those of central differences", "[columns]") {
  Geometry g = kHessianSizes;
  g.dim_qk = 6;
  const auto op = everything<double>(g.heads, g.dim_qk);
  check_differences(OpCall(op, g, causal<double>()));
  check_differences(OpCall(op, g, {}, {.key_tile = 8}));
  check_differences(OpCall(OwnAttention<Turned, double>{}, g, causal<double>()));
}

TEST_CASE("formulas of columns have the same bits on any number of threads", "[columns]") {
  check_bits_on_threads(OpCall<OwnAttention<Everything, float>>(
      everything<float>(4, 8), {2, 4, 4, 2, 150, 190, 8, 8}, causal<float>(Align::bottom_right)));
}

// The workers of a head take turns at its keys, and leave them when the last map has been added.
TEST_CASE("columns of two maps have the same bits on any number of threads", "[columns]") {
  using TwoMaps = Attention<float, OwnScore<Laplace, float>, Difference<float, GivenLambda<float>>,
                            Identity<float>>;
  for (int run = 0; run < 8; ++run)
    check_bits_on_threads(
        OpCall<TwoMaps>(TwoMaps{}, {1, 2, 2, 1, 200, 150, 8, 4}, causal<float>()));
}

TEST_CASE("panels that take turns add up what one does", "[columns]") {
  const auto op = everything<double>(4, 8);
  const Geometry g{1, 4, 4, 2, 70, 90, 8, 8};
  OpCall<OwnAttention<Everything, double>> wide(op, g, causal<double>(Align::bottom_right)),
      narrow(op, g, causal<double>(Align::bottom_right), {.key_tile = 16, .panel_vectors = 1});
  const auto a = results_of(wide), b = results_of(narrow);
  for (std::size_t n = 0; n < a.size(); ++n) {
    INFO(a[n].name);
    for (std::size_t i = 0; i < a[n].values.size(); ++i)
      REQUIRE(std::abs(a[n].values[i] - b[n].values[i]) < 1e-11);
  }
}

TEST_CASE("sums of columns write a row for each key, and nothing behind them", "[columns]") {
  using Score = OwnScore<Laplace, float>;
  const Score score;
  const ColumnsOf<Score, float> columns(score);
  constexpr Index W = kLanes<float>, count = 11;
  const std::vector<float> key(std::size_t(count + 1), 1.0F);
  std::vector<float> query(std::size_t(W), 3.0F), out(std::size_t((count + 1) * W), -5.0F);
  ColumnPairs<float> pairs;
  pairs.queries[0] = {query.data(), 1, W};
  pairs.vectors = 1;
  pairs.keys[0] = key.data();
  pairs.strides = {1, 1};
  pairs.count = count;
  pairs.width = 1;
  columns.sums(pairs, {out.data(), count, W});
  for (Index n = 0; n < (count + 1) * W; ++n)
    CHECK(out[std::size_t(n)] == (n < count * W ? 2.0F : -5.0F));
}

TEST_CASE("a query of a cache adds up columns of keys in any storage", "[columns]") {
  for (const Index dim : {2, 6, 34}) {
    const CachedTokens tokens(40, dim);
    const auto check = [&](const auto& op) {
      KvCache<float> cache = tokens.cache();
      CHECK(tokens.distance_to_whole(op, tokens.last(op, cache.inputs(tokens.last_query()))) <
            1e-5);
      KvCache<bfloat16> narrow(1, 2, dim, dim);
      narrow.append(tokens.keys(), tokens.keys());
      CHECK(tokens.distance_to_whole(op, tokens.last(op, narrow.inputs(tokens.last_query()))) <
            0.03);
    };
    check(everything<float>(4, dim));
    check(OwnAttention<Bells, float>{});
  }
}

TEST_CASE("pairs that nobody sees give nothing, whatever their columns are", "[columns]") {
  const Geometry g{1, 2, 2, 1, 70, 70, 8, 5};
  OwnAttention<Weighed, double> op;
  op.score.factors = Param<double>(std::vector<Index>{2, 1, 4});
  for (Index n = 0; n < 8; ++n) op.score.factors[n] = 1 - 0.1 * double(n);
  OpCall call(op, g, causal<double>());
  const auto decay = [&](std::vector<double>& rows, Index row) {
    for (Index c = 4; c < 8; ++c)
      rows[std::size_t(row * 8 + c)] = -800.0 * double(row % 70) - double(c);
  };
  for (Index row = 0; row < 140; ++row) decay(call.query, row);
  for (Index row = 0; row < 70; ++row) decay(call.key, row);
  const auto before = results_of(call);
  for (const NamedTensor& tensor : before)
    for (const double x : tensor.values) REQUIRE(std::isfinite(x));
  // A token has decayed by 800 more than the one before it: exp(800) is infinite.
  const reference::Result<double> slow = reference::forward(call.op, problem_of<double>(call));
  for (std::size_t n = 0; n < slow.out.size(); ++n)
    REQUIRE(std::abs(call.out[n] - slow.out[n]) < 1e-12);

  // Keys behind a length may hold anything.
  OpCall cut(op, g, key_lengths<double>({41}));
  const auto wanted = results_of(cut);
  for (Index j = 41; j < 70; ++j)
    std::fill_n(cut.key.begin() + j * 8, 8, std::numeric_limits<double>::quiet_NaN());
  check_results(cut, wanted);
}

TEST_CASE("a distance of columns is 0 between equal rows, and its slope, too", "[columns]") {
  const Geometry g{1, 1, 1, 1, 1, 1, 5, 3};
  OpCall<OwnAttention<Laplace, float>> call({}, g);
  call.query = call.key;
  call.forward();
  CHECK(call.saved.lse[0] == 0.0F);
}

namespace {

template <class T>
struct TwoOfOne {
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return q[1] * k[0];
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

}  // namespace

TEST_CASE("columns that do not fit are refused in one sentence", "[columns]") {
  const Geometry g{1, 2, 2, 2, 9, 9, 5, 4};
  const auto refusal = [&](auto op) {
    return message_of([&] {
      OpCall<decltype(op)> call(op, g);
      call.forward();
    });
  };
  CHECK(refusal(OwnAttention<Fading, float>{}) ==
        "heed::forward: dim_qk is 5, it must be a multiple of the numbers per column, 2");
  CHECK(refusal(OwnAttention<TwoOfOne, float>{}) ==
        "heed::forward: the formula reads q[1], its numbers_per_column is 1 (plug/own_score.hpp)");
  Geometry even = g;
  even.dim_qk = 6;
  CHECK(message_of([&] {
          OpCall<OwnAttention<Everything, float>> call(everything<float>(3, 6), even);
          call.forward();
        }) == "heed::forward: column weights have shape (3,2,3), it must be (1 or 2,2,3)");
}
