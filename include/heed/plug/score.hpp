// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plug point 1, the score: what does a query-key pair score?
//
// A score is a struct of options and parameters with these members (S is the scalar of the moment: a
// SIMD pack in the engine; double, std::complex<double>, a dual number or a tape variable in tests):
//
//   static constexpr bool plain            score(pair) == pair.logit: the engine skips the pass
//   static constexpr int scalars           numbers per head that score() reads as p[0..scalars)
//   static constexpr int query_features    side values per query row, read as pair.query[f]
//   static constexpr int key_features      side values per key row, read as pair.key[f]
//   static constexpr bool has_projection   pair.projected is (q P).(k P) where projection() is given
//   static constexpr bool has_table        pair.table is q . table_row(category of the key)
//   visit(f)                               f("name", Param<Real>&) for each parameter, same order always
//   using PlaceFree, NormedDots            optional promises (plug/promises.hpp)
//   validate(geometry, where)              throws std::invalid_argument with one clear sentence
//   visit_ranges(f), keep_jointly()        if parameters have bounds (core/interval.hpp)
//   scalar(i, h) -> Real                   value of p[i] for head h
//   chain_scalars(h, dp, grad)             adds the gradients of scalar 0..scalars-1 to `grad`, an
//                                          object of the score's own type
//   score(pair, p) -> S                    the number that is normalised
//   score_vjp(pair, p, g, d, dp)           d.<field> = g * dscore/dfield for every field of `d`, which
//                                          arrives zeroed; dp[i] += g * dscore/dp[i]. May be left out:
//                                          dual numbers then differentiate score().
//   query_features_of(row, f)              fills f[0..query_features) from a row (see LaneRow)
//   query_features_vjp(row, f, df, add)    adds df . df/drow through add.add_x(c, value) and so on
//   key_features_of, key_features_vjp      likewise for key rows
//   projection() -> const Param<Real>&     (dim, rank), fixed; empty for none    [has_projection]
//   table_size(), prepare_table(h, dim, out), table_vjp(h, dim, dtable, grad)    [has_table]
//                                          the table of head h, (table_size, dim) row-major; key
//                                          feature 0 is the table row of the key (its category)
//
// Laws (test "every score obeys its laws"): pure; finite for finite input; reads nothing but its
// arguments; score_vjp agrees with the derivative of score.

#include <heed/core/geometry.hpp>
#include <heed/core/param.hpp>
#include <heed/plug/promises.hpp>
#include <heed/plug/tile.hpp>

#include <array>

namespace heed {
inline namespace HEED_ABI {

// What one pair offers. Also the type of its gradient.
template <class S, int QueryFeatures, int KeyFeatures>
struct Pair {
  S dot{};        // q . k
  S logit{};      // scale * q . k, soft-capped if the mask says so
  S projected{};  // (q P) . (k P)
  S table{};      // entry of the query's table at the key's category
  std::array<S, std::size_t(QueryFeatures)> query{};
  std::array<S, std::size_t(KeyFeatures)> key{};
  S query_index{}, key_index{};  // positions i and j; they carry no gradient
};

template <class Score, class S>
using PairOf = Pair<S, Score::query_features, Score::key_features>;
template <class Score, class S>
using ScalarsOf = std::array<S, std::size_t(Score::scalars)>;

// What a score without side values, projection and table inherits.
struct NoSideValues {
  static constexpr bool plain = false;
  static constexpr int query_features = 0, key_features = 0;
  static constexpr bool has_projection = false, has_table = false;
  template <class Row, class S>
  void query_features_of(const Row&, S*) const {}
  template <class Row, class S, class Add>
  void query_features_vjp(const Row&, const S*, const S*, const Add&) const {}
  template <class Row, class S>
  void key_features_of(const Row&, S*) const {}
  template <class Row, class S, class Add>
  void key_features_vjp(const Row&, const S*, const S*, const Add&) const {}
};

// score(i, j) = scale * q_i . k_j
template <class Real>
struct DotScore : NoSideValues {
  static constexpr bool plain = true;
  static constexpr int scalars = 0;
  template <class U>
  using rebind = DotScore<U>;
  using PlaceFree = DotScore;

  template <class F>
  void visit(F&&) {}
  void validate(const Geometry&, const char*) const {}
  [[nodiscard]] Real scalar(int, Index) const { return Real(0); }
  void chain_scalars(Index, const double*, DotScore&) const {}

  template <class S>
  [[nodiscard]] S score(const PairOf<DotScore, S>& pair, const ScalarsOf<DotScore, S>&) const {
    return pair.logit;
  }
  template <class S>
  void score_vjp(const PairOf<DotScore, S>&, const ScalarsOf<DotScore, S>&, S g,
                 PairOf<DotScore, S>& d, ScalarsOf<DotScore, S>&) const {
    d.logit = g;
  }
};

}  // namespace HEED_ABI
}  // namespace heed
