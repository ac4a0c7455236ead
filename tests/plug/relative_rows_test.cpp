// SPDX-License-Identifier: Apache-2.0
// Learnt rows by distance, q . r(i - j): against the reference, with the same bits for any number
// of threads, in decoding, and with NaNs at places that must not be read.

#include "cached_tokens.hpp"
#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/kv_cache.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

// Read times a parameter, and once more squared, so that its gradient depends on the pair.
template <class T>
struct Relative {
  Param<T> factor = T(0.4), rows = Param<T>(std::vector<Index>{1, 7, 6});
  std::vector<Index> shape(const Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters = std::tuple{named("factor", &Relative::factor),
                                                tensor("rows", &Relative::rows, &Relative::shape)};
  static constexpr auto relative_rows = &Relative::rows;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit + p[0] * pair.table * (S(1.0) + S(0.1) * pair.table);
  }
};

template <class T>
void fill(OwnAttention<Relative, T>& op, Index heads, Index clip, Index dim) {
  op.score.rows = Param<T>(std::vector<Index>{heads, 2 * clip + 1, dim});
  for (Index n = 0; n < op.score.rows.size(); ++n)
    op.score.rows[n] = T(0.5 * std::sin(1 + 3 * double(n)));
}

void check(const Geometry& g, Index heads, Index clip) {
  OwnAttention<Relative, double> op;
  fill(op, heads, clip, g.dim_qk);
  check_passes(op, g, 12);
}

}  // namespace

TEST_CASE("Relative rows agree with the twin", "[plug]") {
  check({2, 4, 4, 2, 11, 11, 6, 6}, 4, 3);
  check({1, 2, 2, 1, 70, 90, 6, 3}, 1, 20);
  check({1, 2, 2, 1, 40, 35, 5, 3}, 2, 0);
}

TEST_CASE("Gradients of relative rows have the same bits for any number of threads", "[plug]") {
  OwnAttention<Relative, float> op;
  fill(op, 4, 128, 8);
  OpCall<OwnAttention<Relative, float>> call(op, {2, 4, 4, 2, 150, 190, 8, 8},
                                             causal<float>(Align::bottom_right));
  check_bits_on_threads(call);
}

TEST_CASE("What stands in hidden rows does not reach relative rows", "[plug]") {
  OwnAttention<Relative, float> op;
  fill(op, 2, 5, 4);
  // Document 1 has no queries; query 4 is of document 2, which has no keys.
  std::vector<Index> of_queries(40, 0), of_keys(45, 0);
  of_queries[4] = 2;
  for (std::size_t j = 3; j < 45; j += 7) of_keys[j] = 1;
  const Mask<float> mask = documents<float>(of_queries, of_keys);
  for (const Precision precision : {Precision(Precision::storage), Precision(Precision::mixed)}) {
    OpCall<OwnAttention<Relative, float>> call(op, {1, 2, 2, 2, 40, 45, 4, 4}, mask);
    call.options.precision = precision;
    const auto spoil = [](std::vector<float>& rows, std::size_t row) {
      std::fill_n(rows.begin() + Index(row * 4), 4, std::numeric_limits<float>::quiet_NaN());
    };
    for (const std::size_t head : {0U, 1U}) {
      spoil(call.query, head * 40 + 4);
      for (std::size_t j = 3; j < 45; j += 7) spoil(call.key, head * 45 + j);
    }
    for (const float number : gradients_of(call)) CHECK(std::isfinite(number));
    for (const float number : call.out) CHECK(std::isfinite(number));
  }
}

TEST_CASE("A query of a cache reads the rows of its own position", "[plug]") {
  const CachedTokens tokens(40, 6);
  OwnAttention<Relative, float> op;
  fill(op, 4, 9, 6);
  KvCache<float> cache = tokens.cache();
  const std::vector<float> out = tokens.last(op, cache.inputs(tokens.last_query()));
  CHECK(tokens.distance_to_whole(op, out) < 1e-5);
}

TEST_CASE("Relative rows that do not fit are refused", "[plug]") {
  OwnAttention<Relative, float> op;
  op.score.rows = Param<float>(std::vector<Index>{3, 8, 4});
  OpCall<OwnAttention<Relative, float>> call(op, {1, 2, 2, 2, 9, 9, 4, 4});
  CHECK(message_of([&] { call.forward(); }) ==
        "heed::forward: relative rows have shape (3,8,4), it must be (1 or 2,2 clip + 1,4)");
}
