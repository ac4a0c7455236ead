// SPDX-License-Identifier: Apache-2.0
// The pairs for which the engine computes scores: every pair that the mask shows, once in each pass; and further pairs that
// a band or a key length hides, only if they share a vector of queries with a query that sees the key. A strip that skips
// too much, a tile that is computed whole, and a pair that two strips compute all show.

#include "catch.hpp"

#include <heed/check/op_call.hpp>
#include <heed/compiled.hpp>
#include <heed/core/random.hpp>
#include <heed/explain.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/differential.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

using namespace heed;

namespace {

// The number of times that each pair (query, key) of a call of one head was computed.
struct Asked {
  Index len_q = 0, len_kv = 0;
  std::vector<int> scores, derivatives;  // [len_q][len_kv]

  void start(Index queries, Index keys) {
    len_q = queries;
    len_kv = keys;
    scores.assign(std::size_t(queries * keys), 0);
    derivatives = scores;
  }
  // Lanes behind the last query do not count.
  template <class Real>
  void count(std::vector<int>& of, Pack<Real> query, Pack<Real> key) const {
    for (int lane = 0; lane < kLanes<Real>; ++lane) {
      const Index i = Index(query.lane(lane)), j = Index(key.lane(lane));
      if (i < len_q && j < len_kv) ++of[std::size_t(i * len_kv + j)];
    }
  }
};
Asked asked;  // filled by calls on one thread

template <class Real>
struct RecordingScore : PlainScore {
  template <class S>
  [[nodiscard]] S score(const PairOf<RecordingScore, S>& pair, const auto&) const {
    if constexpr (std::is_same_v<S, Pack<Real>>)
      asked.count(asked.scores, pair.query_index, pair.key_index);
    return pair.logit;
  }
  template <class S>
  void score_vjp(const PairOf<RecordingScore, S>& pair, const auto&, S g,
                 PairOf<RecordingScore, S>& d, auto&) const {
    if constexpr (std::is_same_v<S, Pack<Real>>)
      asked.count(asked.derivatives, pair.query_index, pair.key_index);
    d.logit = g;
  }
};

// Queries that are computed with the same keys, in panels of so many lanes.
template <class Real>
[[nodiscard]] Index together(Index lanes) {
  return std::min<Index>(lanes, kStripVectors<Real> * kLanes<Real>);
}

template <class Real>
struct Case {
  std::string name;
  Index len_q, len_kv;
  Mask<Real> mask;
};

// The last panel has more queries than are taken one by one.
template <class Real>
[[nodiscard]] std::vector<Case<Real>> cases() {
  return {
      {"no mask", 159, 170, {}},
      {"causal", 159, 159, causal<Real>()},
      {"causal, whole panels", 256, 256, causal<Real>()},
      {"causal, cached keys", 159, 203, causal<Real>(Align::bottom_right)},
      {"causal, before the first key", 159, 159, causal<Real>(Align::top_left, -37)},
      {"causal, offset", 159, 239, causal<Real>(Align::top_left, 21)},
      {"causal, key length", 159, 159, causal<Real>() & key_lengths<Real>({93})},
      {"a key length in front of the last queries", 159, 159,
       window<Real>(30, 5) & key_lengths<Real>({77})},
      {"a window to the left", 239, 239, window<Real>(40, 0)},
      {"a window to both sides", 239, 239, window<Real>(19, 26)},
      {"a window of one key", 159, 159, window<Real>(0, 0)},
      {"a window to the right", 159, 159, window<Real>(3, 60)},
      {"keys from the own one on", 159, 159, window<Real>(0, -1)},
  };
}

// True if the mask shows key j to query i, or to another of the `width` queries that are computed with it.
template <class Real>
[[nodiscard]] bool computed(const BoundMask<Real>& mask, Index width, Index i, Index j) {
  const Index first = i / width * width;
  for (Index r = first; r < std::min(first + width, asked.len_q); ++r)
    if (mask.visible(0, 0, r, j)) return true;
  return false;
}

template <class Real>
void check_counts(const std::vector<int>& counts, const BoundMask<Real>& mask, Index width,
                  int times) {
  Index wrong = 0;
  for (Index i = 0; i < asked.len_q; ++i)
    for (Index j = 0; j < asked.len_kv; ++j) {
      const int expected = computed(mask, width, i, j) ? times : 0;
      if (counts[std::size_t(i * asked.len_kv + j)] != expected && wrong++ == 0)
        UNSCOPED_INFO("query " << i << ", key " << j << ": asked "
                               << counts[std::size_t(i * asked.len_kv + j)] << " times, expected "
                               << expected);
    }
  CHECK(wrong == 0);
}

// Runs forward and backward with tiles and panels of several sizes.
template <class Op>
void check_op(const Op& op) {
  using Real = typename Op::Scalar;
  constexpr int maps = Op::NormaliserType::maps;
  for (const Case<Real>& c : cases<Real>()) {
    const Geometry g{1, 1, 1, 1, c.len_q, c.len_kv, 8, 4};
    const BoundMask<Real> bound(c.mask, g, "test");
    for (const Index key_tile : {0, 1, 48})
      for (const int vectors : {0, 2}) {
        INFO(c.name << ", key_tile " << key_tile << ", panel_vectors " << vectors);
        // A panel of few queries at the end is computed as a whole.
        const Index lanes = explain(op, g, c.mask, Pass::forward, {.panel_vectors = vectors}).lanes;
        REQUIRE((c.len_q - 1) % lanes + 1 > kFewRows<Real>);
        const Index width = together<Real>(lanes);
        OpCall call(op, g, c.mask, {.threads = 1, .key_tile = key_tile, .panel_vectors = vectors});
        asked.start(c.len_q, c.len_kv);
        call.forward();
        check_counts(asked.scores, bound, width, maps);
        asked.start(c.len_q, c.len_kv);
        call.backward();
        check_counts(asked.scores, bound, width, maps);
        check_counts(asked.derivatives, bound, width, maps);
      }
  }
}

// A boolean mask that hides the same pairs: no part of a tile is skipped.
template <class Op>
void check_against_boolean(const Op& op) {
  using Real = typename Op::Scalar;
  for (const Case<Real>& c : cases<Real>()) {
    const Geometry g{1, 1, 1, 1, c.len_q, c.len_kv, 8, 4};
    const BoundMask<Real> bound(c.mask, g, "test");
    const auto allowed = std::make_unique<bool[]>(std::size_t(c.len_q * c.len_kv));
    for (Index i = 0; i < c.len_q; ++i)
      for (Index j = 0; j < c.len_kv; ++j)
        allowed[std::size_t(i * c.len_kv + j)] = bound.visible(0, 0, i, j);
    const auto hidden = boolean<Real>({allowed.get(), Shape{1, 1, c.len_q, c.len_kv}});
    const auto results = [&](const Mask<Real>& mask, Index key_tile) {
      OpCall call(op, g, mask, {.threads = 1, .key_tile = key_tile});
      call.forward();
      call.backward();
      std::vector<NamedTensor> all = call.gradients();
      all.push_back({"out", {call.out.begin(), call.out.end()}});
      return all;
    };
    const auto expected = results(hidden, 0);
    for (const Index key_tile : {0, 1, 32, 48}) {
      const auto found = results(c.mask, key_tile);
      REQUIRE(found.size() == expected.size());
      for (std::size_t t = 0; t < found.size(); ++t) {
        REQUIRE(found[t].values.size() == expected[t].values.size());
        double error = 0;
        for (std::size_t i = 0; i < found[t].values.size(); ++i) {
          const double x = expected[t].values[i],
                       e = std::abs(found[t].values[i] - x) / std::max(1.0, std::abs(x));
          if (!(e <= error)) error = e;
        }
        INFO(c.name << ", key_tile " << key_tile << ", " << found[t].name);
        CHECK(error < 100 * double(std::numeric_limits<Real>::epsilon()));
      }
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("a score is asked about the pairs of vectors that see the key, once each", "",
                   float, double) {
  using Score = RecordingScore<TestType>;
  SECTION("tiles that stream") {
    check_op(Attention<TestType, Score, Softmax<TestType>, Identity<TestType>>{});
  }
  SECTION("whole rows") {
    Attention<TestType, Score, Difference<TestType, GivenLambda<TestType>>, Identity<TestType>> op;
    op.normaliser.lambda = {TestType(0.4)};
    check_op(op);
  }
}

// The panels of a group add to dK and dV together where all of them see the same keys of a tile; the first of them may
// still skip pairs of it.
TEMPLATE_TEST_CASE("what is skipped adds to no result, in tiles of any width", "", float, double) {
  SECTION("plain scores") { check_against_boolean(ScaledDot<TestType>{}); }
  SECTION("scores with derived values of keys") {
    Dar<TestType> op;
    op.score.strength = {TestType(0.7)};
    check_against_boolean(op);
  }
  SECTION("whole rows") {
    Attention<TestType, DotScore<TestType>, Difference<TestType, GivenLambda<TestType>>,
              Identity<TestType>>
        op;
    op.normaliser.lambda = {TestType(0.4)};
    check_against_boolean(op);
  }
}

TEST_CASE("explain counts the pairs that are computed") {
  const Index len = 640, width = together<float>(kPanelLanes<float>);
  const Geometry g{2, 3, 3, 3, len, len, 16, 16};
  double pairs = 0;
  for (Index first = 0; first < len; first += width) pairs += double(width * (first + width));
  CHECK(explain(ScaledDot<float>{}, g, causal<float>()).computed_flops == 4.0 * 16 * 6 * pairs);
  CHECK(explain(ScaledDot<float>{}, g, causal<float>(), Pass::backward).computed_flops ==
        10.0 * 16 * 6 * pairs);
}
