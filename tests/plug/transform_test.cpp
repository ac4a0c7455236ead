// SPDX-License-Identifier: Apache-2.0
// Row transforms of queries and keys, and their parameters: against the reference, with the same
// bits for any number of threads, from a cache, and against calls on transformed tensors.

#include "cached_tokens.hpp"
#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"
#include "turned_scores.hpp"

#include <heed/kv_cache.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

// Squared distances of transformed rows: features and products are of the same rows.
template <class T>
struct ScaledMetric {
  using Transform = Diagonal<T>;
  using Features = SquaredNorms;
  Param<T> precision = T(0.2);
  static constexpr auto parameters = std::tuple{named("precision", &ScaledMetric::precision)};
  using PlaceFree = ScaledMetric;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return S(-0.5) * p[0] * squared_distance(pair);
  }
};

template <class T>
using TwoMaps = Attention<T, OwnScore<Turned, T>, Difference<T, GivenLambda<T>>, Identity<T>>;

// Sets parameters to ordinary values: one value or per head, gains other than 1.
template <class Op>
void fill(Op& op, const Geometry& g, bool per_head) {
  using T = typename Op::Scalar;
  const Index heads = per_head ? g.heads : 1;
  if constexpr (requires { op.score.log_base; }) {
    op.score.log_base = Param<T>(std::vector<Index>{heads});
    for (Index h = 0; h < heads; ++h) op.score.log_base[h] = T(4 + 0.5 * double(h));
  }
  const auto fill_gain = [&](Param<T>& gain, double at) {
    gain = Param<T>(std::vector<Index>{heads, g.dim_qk});
    for (Index n = 0; n < gain.size(); ++n) gain[n] = T(1 + 0.4 * std::sin(at + double(n)));
  };
  if constexpr (requires { op.score.query_gain; }) fill_gain(op.score.query_gain, 1);
  if constexpr (requires { op.score.key_gain; }) fill_gain(op.score.key_gain, 2);
  if constexpr (requires { op.score.gain; }) fill_gain(op.score.gain, 3);
}

template <class Op>
void check(Index dim) {
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, dim, 6}, Geometry{1, 2, 2, 1, 30, 29, dim, 3}})
    for (const bool per_head : {false, true}) {
      Op op;
      fill(op, g, per_head);
      check_passes(op, g, 16);
    }
}

}  // namespace

TEST_CASE("Row transforms agree with the twin", "[plug]") {
  SECTION("a rotation of learnt base") { check<OwnAttention<Turned, double>>(6); }
  SECTION("a norm, then a rotation") { check<OwnAttention<NormedTurned, double>>(6); }
  SECTION("a learnt metric, with norms of its rows") {
    check<OwnAttention<ScaledMetric, double>>(6);
    check<OwnAttention<ScaledMetric, double>>(5);  // rows that do not fill whole cache lines
  }
}

TEST_CASE("Each map transforms its own columns", "[plug]") {
  TwoMaps<double> op;
  const Geometry g{1, 2, 2, 1, 13, 15, 8, 4};
  fill(op, g, true);
  const OpReport report = check_op(op, g, {.max_entries_per_tensor = 16});
  INFO(report.text());
  CHECK(report.passed());
}

TEST_CASE("Gradients through transforms have the same bits for any number of threads", "[plug]") {
  const Geometry g{2, 4, 4, 2, 100, 150, 8, 8};
  for (const bool per_head : {false, true}) {
    OwnAttention<NormedTurned, float> op;
    fill(op, g, per_head);
    OpCall<OwnAttention<NormedTurned, float>> call(op, g, causal<float>(Align::bottom_right));
    check_bits_on_threads(call);
  }
}

TEST_CASE("What a hidden key holds does not get through a transform", "[plug]") {
  const Geometry g{1, 2, 2, 2, 40, 45, 4, 4};
  std::vector<Index> of_keys(45, 0);
  for (std::size_t j = 3; j < 45; j += 7) of_keys[j] = 1;  // a document without queries
  OwnAttention<NormedTurned, float> op;
  fill(op, g, true);
  OpCall<OwnAttention<NormedTurned, float>> call(
      op, g, documents<float>(std::vector<Index>(40, 0), of_keys));
  for (std::size_t j = 3; j < 45; j += 7)
    for (const std::size_t row : {j, 45 + j})
      std::fill_n(call.key.begin() + Index(row * 4), 4, std::numeric_limits<float>::quiet_NaN());
  for (const float number : gradients_of(call)) CHECK(std::isfinite(number));
  for (const float number : call.out) CHECK(std::isfinite(number));
}

TEST_CASE("A rotation is what a call on rotated tensors gives", "[plug]") {
  const Geometry g{1, 4, 4, 2, 100, 100, 16, 8};
  OwnAttention<Turned, float> op;
  OpCall<OwnAttention<Turned, float>> call(op, g, causal<float>());
  OpCall<ScaledDot<float>> rotated({}, g, causal<float>());
  for (auto* rows : {&rotated.query, &rotated.key})
    for (std::size_t row = 0; row < rows->size() / 16; ++row)
      for (std::size_t m = 0; m < 8; ++m) {
        const double angle = double(row % 100) * std::pow(10000.0, -double(m) / 8);
        float &a = (*rows)[row * 16 + m], &b = (*rows)[row * 16 + m + 8];
        const double x = a, y = b;
        a = float(x * std::cos(angle) - y * std::sin(angle));
        b = float(x * std::sin(angle) + y * std::cos(angle));
      }
  const auto worst = [&] {
    double difference = 0;
    for (std::size_t n = 0; n < call.out.size(); ++n)
      difference = std::max(difference, std::abs(double(call.out[n]) - double(rotated.out[n])));
    return difference;
  };
  call.forward();
  rotated.forward();
  CHECK(worst() < 1e-4);  // angles up to 100, each off by 2^-22 of itself
  // Where products are rounded to bfloat16, a number between two of them may go either way.
  call.options.precision = rotated.options.precision = Precision::mixed;
  call.forward();
  rotated.forward();
  CHECK(worst() < 2e-2);
}

TEST_CASE("A cache keeps transformed keys, and refuses those of other parameters", "[plug]") {
  const Index len = 40;
  const CachedTokens tokens(len, 4);
  for (const bool per_head : {false, true}) {
    OwnAttention<Turned, float> op;
    fill(op, {1, 4, 4, 2, 1, len, 4, 4}, per_head);
    KvCache<float> cache = tokens.cache();
    std::vector<float> out;
    for (int call = 0; call < 2; ++call) {
      out = tokens.last(op, cache.inputs(tokens.last_query()));
      CHECK(cache.key_features().len() == len);
      Inputs<float> in{tokens.last_query(), cache.keys(), cache.values()};
      in.first_query = len - 1;
      CHECK(out == tokens.last(op, in));
    }
    CHECK(tokens.distance_to_whole(op, out) < 1e-5);
    op.score.log_base[0] += 0.25F;
    const std::string said =
        message_of([&] { (void)tokens.last(op, cache.inputs(tokens.last_query())); });
    CHECK(said.find("heed::forward: log_base[0] is ") == 0);
    CHECK(said.find("; KvCache::forget_features() makes room for those of this call") !=
          std::string::npos);
  }
}

TEST_CASE("A cache keeps normed keys, and refuses those of another eps", "[plug]") {
  OwnAttention<NormedTurned, float> op;
  const Shape kept{1, 2, 9, 4}, one{1, 4, 1, 4};
  std::vector<float> rows(72), query(16), out(16);
  for (std::size_t n = 0; n < rows.size(); ++n) rows[n] = float(std::sin(3 * double(n)));
  std::copy_n(rows.begin(), 16, query.begin());
  KvCache<float> cache(1, 2, 4, 4);
  cache.append({rows.data(), kept}, {rows.data(), kept});
  const TensorView<const float> q(query.data(), one);
  forward(op, cache.inputs(q), {}, {out.data(), one});
  CHECK(cache.key_features().len() == 9);
  op.score.eps = 1e-3;
  CHECK(message_of([&] {
          forward(op, cache.inputs(q), {}, {out.data(), one});
        }).find("is 0.001, the key_features that are kept are of an op with 1e-06") !=
        std::string::npos);
}

TEST_CASE("Gains that do not fit are refused", "[plug]") {
  OwnAttention<ScaledMetric, float> op;
  op.score.gain = Param<float>(std::vector<Index>{3, 4});
  OpCall<OwnAttention<ScaledMetric, float>> call(op, {1, 2, 2, 2, 9, 9, 4, 4});
  CHECK(message_of([&] {
          call.forward();
        }).find("gain has 3 rows, the call has 2 heads; it needs 1 row, or one per head") !=
        std::string::npos);
}
