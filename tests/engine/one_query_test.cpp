// SPDX-License-Identifier: Apache-2.0
// One query and grouped heads, as in decoding: heads may be computed as rows of one head only if no
// part of the op can tell the difference.

#include "catch.hpp"
#include "door_case.hpp"

#include <heed/plug/own_score.hpp>

using namespace heed;
using namespace heed_test;

namespace {

// Two groups of three heads, one query, 23 keys.
constexpr Geometry kDecoding{2, 6, 6, 2, 1, 23, 6, 5};

// Compares forward and backward with the reference and its tape, under masks that allow folding and that do not.
template <class Op>
void check_decoding(const Op& op, Geometry g = kDecoding) {
  const std::vector<Index> documents_of_keys = [&] {
    std::vector<Index> ids;
    for (Index n = 0; n < g.batch * g.len_kv; ++n) ids.push_back(n % 3);
    return ids;
  }();
  const std::pair<const char*, Mask<double>> masks[] = {
      {"no mask", {}},
      {"causal, bottom right", causal<double>(Align::bottom_right)},
      {"window, bottom right", window<double>(9, 0, Align::bottom_right)},
      {"key lengths", key_lengths<double>({7, 0})},
      {"documents", documents<double>({1, 2}, documents_of_keys)},
      {"slopes", alibi<double>({0.1, 0.2, 0.3, 0.4, 0.5, 0.6}, Align::bottom_right)},
      {"soft cap", soft_cap<double>(1.5)}};
  for (const auto& [name, mask] : masks) {
    INFO(name);
    check_twin(op, g, mask, 5);
  }
}

template <class T>
struct Recency {
  Param<T> slope = T(0.5);
  static constexpr auto parameters = std::tuple{named("slope", &Recency::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * distance(pair);
  }
};

// A score that reads no position, and promises it.
template <class T>
struct Closeness {
  using Features = SquaredNorms;
  using PlaceFree = Closeness;
  Param<T> pull = T(0.3);
  static constexpr auto parameters = std::tuple{named("pull", &Closeness::pull)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * squared_distance(pair);
  }
};

// A score that inherits from one with the promise, and reads positions.
template <class T>
struct LateDot : DotScore<T> {
  static constexpr bool plain = false;
  template <class S>
  [[nodiscard]] S score(const PairOf<LateDot, S>& pair, const auto&) const {
    return pair.logit * (math::constant<S>(1) + math::constant<S>(0.5) * pair.query_index);
  }
  template <class S>
  void score_vjp(const PairOf<LateDot, S>& pair, const auto&, S g, PairOf<LateDot, S>& d,
                 auto&) const {
    d.logit = g * (math::constant<S>(1) + math::constant<S>(0.5) * pair.query_index);
  }
};

// A score that reads a dot product without the norm by which DAR's cosine multiplies it.
template <class T>
struct RawDar : DarScore<T> {
  template <class S>
  [[nodiscard]] S score(const PairOf<RawDar, S>& pair, const auto& p) const {
    return DarScore<T>::template score<S>(pair, p) + math::constant<S>(0.1) * pair.dot;
  }
  template <class S>
  void score_vjp(const PairOf<RawDar, S>& pair, const auto& p, S g, PairOf<RawDar, S>& d,
                 auto& dp) const {
    DarScore<T>::score_vjp(pair, p, g, d, dp);
    d.dot += math::constant<S>(0.1) * g;
  }
};

// A softmax whose every second head reads its keys from the other end of the row.
template <class T>
struct CrossedHalves : Softmax<T> {
  using PlaceFree = CrossedHalves;
  [[nodiscard]] Source source(const Geometry& g, Index h, int) const {
    const Index half = g.dim_qk / 2;
    return {h, g.kv_head(h), (h % 2) * half, ((h + 1) % 2) * half, half};
  }
};

}  // namespace

TEST_CASE(
    "one query of grouped heads: every pairing of differential heads agrees with the slow twin") {
  for (const HeadPairing pairing :
       {HeadPairing::halves, HeadPairing::halves_apart, HeadPairing::halves_repeated_keys}) {
    INFO("pairing " << int(pairing));
    Differential<double> op;
    op.normaliser.pairing = pairing;
    check_decoding(op);
    for (const Index width : {Index(1), Index(3)}) {
      DifferentialV1<double> v1 = make_differential_v1<double>(width, 2);
      v1.normaliser.pairing = pairing;
      v1.normaliser.lambda_q1[0] = v1.normaliser.lambda_k1[0] = 0.4;
      Geometry g = kDecoding;
      g.dim_qk = g.dim_v = 2 * width;
      check_decoding(v1, g);
    }
  }
  for (const HeadPairing pairing : {HeadPairing::heads, HeadPairing::heads_apart}) {
    DifferentialV2<double> op;
    op.normaliser.pairing = pairing;
    Geometry g = kDecoding;
    g.query_heads = 2 * g.heads;
    check_decoding(op, g);
  }
}

TEST_CASE(
    "one query of grouped heads: an own score that reads positions sees the position of its "
    "query") {
  OwnAttention<Recency, double> op;
  check_decoding(op);
  op.score.slope = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6};
  check_decoding(op);
}

TEST_CASE(
    "one query of grouped heads: an own score that promises to read no place agrees with the slow "
    "twin") {
  static_assert(place_free<OwnScore<Closeness, double>> && !place_free<OwnScore<Recency, double>>);
  OwnAttention<Closeness, double> op;
  check_decoding(op);
}

TEST_CASE("one query of grouped heads: the promise to read no place is not inherited") {
  static_assert(place_free<DotScore<double>> && !place_free<LateDot<double>>);
  check_decoding(Attention<double, LateDot<double>, Softmax<double>, Identity<double>>{});
}

TEST_CASE("a score that inherits the promise of normed dots may read dot products as they are") {
  static_assert(normed_dots<DarScore<double>> && !normed_dots<RawDar<double>>);
  const Geometry g{1, 2, 2, 1, 9, 9, 4, 4};
  std::string worst;
  for (const double scale : {0.01, 30.0}) {
    auto problem = random_problem<double>(g, 0, 5);
    problem.scale = scale;
    CHECK(twin_deviation(Attention<double, RawDar<double>, Softmax<double>, Identity<double>>{},
                         problem, {}, worst) < 1e-11);
  }
}

TEST_CASE("one query of grouped heads: columns that depend on the head keep heads apart") {
  check_decoding(Attention<double, DotScore<double>, CrossedHalves<double>, Identity<double>>{});
}
