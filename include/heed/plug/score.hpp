// SPDX-License-Identifier: Apache-2.0
#pragma once

// Plug point 1, the score: what does a query-key pair score?
//
// A score is a struct of parameters and options. It inherits PlainScore, or ScoreWith<SquaredNorms> and the like
// (plug/own_score.hpp), and overrides the members that differ. This is the whole list; S is the current scalar: a SIMD pack
// in the engine; double, std::complex<double>, a dual number or a tape variable in tests.
//
//   parameters                             names its parameters and options (plug/parameters.hpp); those with one
//                                          value, or one per head, arrive as p[0], p[1], ... Signatures take p as
//                                          `auto`: how many there are is known once the struct is complete
//   score(pair, p) -> S                    the number that is normalised. The only member without a default
//   score_vjp(pair, p, g, d, dp)           d.<field> = g * dscore/dfield for every field of `d`, which
//                                          arrives zeroed; dp[i] += g * dscore/dp[i]. Without it dual numbers
//                                          differentiate score()
//   plain                        false     score(pair) == pair.logit: the engine skips the pass
//   query_features, key_features     0     derived values per row, read as pair.query[f] and pair.key[f]
//   query_features_of(row, f)              fills f[0..query_features) from a row (see LaneRow)
//   query_features_vjp(row, f, df, add)    adds df . df/drow through add.add_x(c, value) and so on
//   key_features_of, key_features_vjp      likewise for key rows. Both may read the head's parameters, too:
//                                          plug/feature_calls.hpp
//   counts_visible               false     row.visible() of query rows is the number of keys that the query sees; a bias
//                                          of -infinity hides its key. O(keys) per query under a boolean mask, documents
//                                          or a bias
//   has_transform                false     rows are transformed before all else (plug/transform.hpp); the score is its own
//                                          transform
//   query_inputs, key_inputs         0     numbers of tokens that features read (plug/token_inputs.hpp)
//   has_projection               false     pair.projected is (q P).(k P) where projection() is given
//   projection() -> const Param&           (dim, rank), fixed; empty for none
//   has_table                    false     pair.table is q . table_row(category of the key)
//   table_clip() -> Index                  beside has_table: row n of the table belongs to distance n - clip, farther
//                                          distances read the first and the last row, and pair.table is q . row of i - j; keys
//                                          have no category. One score map
//   table_size(), prepare_table(h, dim, out), table_vjp(h, dim, dtable, grad)
//                                          the table of head h, (table_size, dim) row-major; key
//                                          feature 0 is the table row of the key (its category)
//   has_positions                false     pair.position is an entry of a learnt table, (1 or heads, buckets):
//   positions                              pointer to that member, a Param which `parameters` names as a tensor
//   bucket(distance) -> Index              the entry of pairs at distance i - j; or, where more than that counts,
//   bucket(i, j) -> Index                  of pair (i, j), which costs a look-up per pair and, once per call, memory for
//                                          len_q len_kv 32-bit numbers
//   numbers_per_column               0     column(), weights_per_column and column_weights: pair.dot is a sum of a formula of
//                                          each column (plug/columns.hpp)
//   with_form(score, f)                    static: calls f(form) once, where `form` computes the same as the score
//                                          with the options at hand, in a loop without branches (PlainForm)
//   measure_names, measure(pair, p)        numbers that reports show of a pair, one per name
//   check(geometry, where)                 throws std::invalid_argument with one clear sentence
//   keep_jointly()                         see plug/parameters.hpp
//   using PlaceFree, NormedDots, KeptFeatures      promises (plug/promises.hpp)
//   feature_numbers() -> vector<double>    with KeptFeatures: the options that key features depend on
//
// Positions: key j has position j, query i has Inputs::first_query + i (engine/call.hpp).
//
// Laws (test "every score obeys its laws"): pure; finite for finite input; reads nothing but its
// arguments; score_vjp agrees with the derivative of score.

#include <heed/core/geometry.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/plug/promises.hpp>
#include <heed/plug/tile.hpp>

#include <algorithm>
#include <array>

namespace heed {
inline namespace HEED_ABI {

// Sums over the columns of a score that has column() (plug/columns.hpp).
template <class Score, class Real>
class ColumnsOf;

// The fields of one pair. Also the type of the gradient of a pair.
template <class S, int QueryFeatures, int KeyFeatures>
struct Pair {
  S dot{};        // q . k, or the sum over the columns of a score that has column()
  S logit{};      // scale * q . k, soft-capped if the mask says so
  S projected{};  // (q P) . (k P)
  S table{};      // entry of the query's table at the key's category
  S position{};   // entry of the table of positions
  std::array<S, std::size_t(QueryFeatures)> query{};
  std::array<S, std::size_t(KeyFeatures)> key{};
  S query_index{}, key_index{};  // positions of query and key; they carry no gradient
};

template <class Score, class S>
using PairOf = Pair<S, Score::query_features, Score::key_features>;
template <class Score, class S>
using ScalarsOf = std::array<S, std::size_t(scalars_of<Score>)>;

// True if a score's bucket() reads the distance i - j alone.
template <class Score>
inline constexpr bool buckets_by_distance = requires(const Score& score) {
  score.bucket(Index(0));
};
// Index of the first entry of head h in a table of positions.
template <class Real>
[[nodiscard]] Index position_row(const Param<Real>& table, Index h) {
  return table.extent(0) == 1 ? 0 : h * table.extent(1);
}
// Throws std::invalid_argument, its sentence starting with `where`, unless the table has rows for these heads.
template <class Score>
void require_positions(const Score& score, const Geometry& g, const char* where) {
  const auto& table = score.*Score::positions;
  const char* name = "the table of positions";
  for_each_entry<Score>([&]<class Entry>(const Entry& entry) {
    if constexpr (requires { entry.member == Score::positions; })
      if (entry.member == Score::positions) name = entry.name;
  });
  require(table.shape().size() == 2, where, ": ", name, " has shape ",
          detail::extents_text(table.shape()), ", a table of positions has 2 extents");
  require_rows_per_head(table, g.heads, where, name);
}
// True if the distance of a pair selects its row of the table, and not a category of its key.
template <class Score>
inline constexpr bool table_by_distance = requires(const Score& score) {
  score.table_clip();
};
// The row that the distance of a pair selects.
template <class Score>
[[nodiscard]] Index table_row(const Score& score, Index i, Index j) {
  const Index clip = score.table_clip();
  return std::clamp(i - j, -clip, clip) + clip;
}

// The entry of pair (i, j) in the table of positions. Throws std::invalid_argument if the table has no such entry.
template <class Score>
[[nodiscard]] Index bucket_of(const Score& score, Index i, Index j) {
  const Index count = (score.*Score::positions).extent(1);
  const auto check = [count](Index bucket, const auto&... of) {
    require(bucket >= 0 && bucket < count, "heed: bucket() of the score gives ", bucket, " for ",
            of..., ", it must lie in [0, ", count, "): the table of positions has ", count,
            " entries per head");
    return bucket;
  };
  if constexpr (buckets_by_distance<Score>)
    return check(score.bucket(i - j), "the distance ", i - j);
  else
    return check(score.bucket(i, j), "pair (", i, ", ", j, ")");
}

// Base of features: no derived values of rows.
struct NothingDerived {
  static constexpr int query_features = 0, key_features = 0;
  static constexpr bool counts_visible = false;
  template <class Row, class S>
  void query_features_of(const Row&, S*) const {}
  template <class Row, class S, class Add>
  void query_features_vjp(const Row&, const S*, const S*, const Add&) const {}
  template <class Row, class S>
  void key_features_of(const Row&, S*) const {}
  template <class Row, class S, class Add>
  void key_features_vjp(const Row&, const S*, const S*, const Add&) const {}
};

// A form of a score: score() and, if the score has one, score_vjp(), for one choice of its options. A score is a
// form of itself. A form with gathers_sums sums the gradients of its query features and of p over
// the keys by itself, where fewer numbers per pair suffice:
//
//   lane_sums                              numbers that it adds up per query
//   key_gradients                          leading key features that have a gradient; the others have none
//   score_vjp(pair, p, g, d, sums)         adds to sums[0..lane_sums); of `d` sets dot, logit and key
//   finish(sums, query, p, dquery, dp)     gradients of the query's features and of p, from the sums
struct PlainForm {
  static constexpr bool gathers_sums = false;
};

// The defaults of a score with the given derived values.
template <class Features>
struct ScoreWith : PlainForm, Features {
  static constexpr bool plain = false, has_projection = false, has_table = false;
  static constexpr bool has_positions = false, has_transform = false;
  static constexpr int numbers_per_column = 0, weights_per_column = 0;
  static constexpr std::array<const char*, 0> measure_names{};

  template <class Score, class F>
  static void with_form(const Score& score, F&& f) {
    f(score);
  }
  template <class P, class Scalars>
  [[nodiscard]] std::array<double, 0> measure(const P&, const Scalars&) const {
    return {};
  }
  void check(const Geometry&, const char*) const {}
  void keep_jointly() {}
};
using PlainScore = ScoreWith<NothingDerived>;

// score(i, j) = scale * q_i . k_j
template <class Real>
struct DotScore : PlainScore {
  static constexpr bool plain = true;
  using PlaceFree = DotScore;

  template <class S>
  [[nodiscard]] S score(const PairOf<DotScore, S>& pair, const auto&) const {
    return pair.logit;
  }
  template <class S>
  void score_vjp(const PairOf<DotScore, S>&, const auto&, S g, PairOf<DotScore, S>& d,
                 auto&) const {
    d.logit = g;
  }
};

}  // namespace HEED_ABI
}  // namespace heed
