// SPDX-License-Identifier: Apache-2.0
#pragma once

// A score of your own: its formula, and the names of what it learns.
//
//   template <class T>
//   struct Recency {
//     heed::Param<T> slope = T(0.5);                       // one value, or one per head
//     static constexpr auto parameters = std::tuple{heed::named("slope", &Recency::slope)};
//
//     template <class S>
//     S score(const auto& pair, const auto& p) const {     // p: the parameters of the head, in order
//       return pair.logit - p[0] * heed::distance(pair);
//     }
//   };
//   heed::OwnAttention<Recency, float> op;                 // forward(), backward(), every mask, every check
//   op.score.slope = {0.1F, 0.2F};
//
// S is a vector of pairs in the engine and other scalars elsewhere, so the formula uses + - * /, numbers and
// the words below, and branches on none of its values: no `if`, no `? :`, no std::exp. `pair` has
// the fields of Pair (plug/score.hpp): dot, logit, query[], key[], query_index, key_index.
//
//   heed::math::                       core/scalar.hpp and core/functions.hpp say how exact each is
//     exp, expm1, log, log1p, sqrt, pow, sin, cos, tanh, erf, sigmoid, softplus
//     absolute, maximum, minimum
//     select(a < b, x, y)              x where a < b, y elsewhere; the other leaves no trace, not even a NaN
//     constant<S>(0.5)                 a number as an S, where an S is asked for
//
//   On packs exp and expm1 are infinite above 87.33 (float) and 708.39 (double); exp and softplus are 0 below minus that.
//   sigmoid, softplus and tanh never overflow; pow, products and sums do where their result is no finite number. A pair whose
//   score is +infinity or NaN makes its row NaN (engine/door.hpp), so a formula bounds the argument
//   of exp, by minimum(x, 80) for example. The side that select leaves out does no harm.
//
// Beside the formula a struct may have
//
//   using Features = SquaredNorms;     what pair.query[] and pair.key[] hold; or InverseNorms, LogVisible, or your own
//                                      that inherits NothingDerived: numbers of a row, its position, and how many
//                                      keys a query sees, and the parameters p where its functions take them
//                                      (plug/feature_calls.hpp), computed once per row. A KvCache keeps the numbers of
//                                      its keys, if the struct has no data members
//   using Transform = Rotation<T>;     changes query and key rows before everything else; or RmsNorm<T>, or your own
//                                      (plug/transform.hpp)
//                                      TokenInputs, CumulativeInputs: numbers of tokens that the call brings with it
//                                      (plug/token_inputs.hpp)
//   positions, bucket()                pair.position is an entry of a learnt table (plug/score.hpp): buckets of
//                                      distances as in T5, or of pairs of positions as in Swin
//   relative_rows                      pointer to a Param (1 or heads, 2 clip + 1, dim_qk) that `parameters` names as a
//                                      tensor: pair.table is q . row of i - j, clipped to [-clip, clip]
//                                      (engine/relative_rows.hpp: its cost)
//   column(q, k, w)                    pair.dot is the sum over the columns of this formula, in place of q . k: distances, kernels
//                                      and decays of channels (plug/columns.hpp)
//   score_vjp(pair, p, g, d, dp)       the derivative by hand (plug/score.hpp); see check/op_check.hpp
//   PlaceFree, NormedDots = the struct itself      promises of what the formula does not read: decoding with
//                                      grouped heads is faster, giant rows have finite cosines (plug/promises.hpp)
//   other entries of `parameters`      options and the like (plug/parameters.hpp): not learnt and not in p, but
//                                      validated, and kept where the op is converted to another scalar
//   check(geometry, where), keep_jointly()      see plug/parameters.hpp
//
// Positions: key j has position j, query i has Inputs::first_query + i, 0 + i unless the call says otherwise.
// KvCache::inputs() and the layers set it for the queries of a cache; a formula need not know.
//
// Cost    without score_vjp dual numbers over vectors differentiate the formula; fields that it does not read, and terms
//         that do not depend on a parameter, cost nothing (autodiff/lane_dual.hpp).
// Errors  std::invalid_argument where a parameter has not one value or one per head, or is out of range, and where score()
//         reads an entry of p, pair.query or pair.key that does not exist: each call runs it once on doubles to find out.

#include <heed/autodiff/lane_dual.hpp>
#include <heed/plug/attention.hpp>
#include <heed/plug/columns.hpp>
#include <heed/plug/derivative.hpp>
#include <heed/plug/feature_calls.hpp>
#include <heed/plug/features.hpp>
#include <heed/plug/formula_probe.hpp>
#include <heed/plug/token_inputs.hpp>
#include <heed/plug/transform.hpp>
#include <heed/simd/functions.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

template <class Formula>
struct FeaturesOf {
  using Type = NothingDerived;
};
template <class Formula>
requires requires { typename Formula::Features; }
struct FeaturesOf<Formula> {
  using Type = typename Formula::Features;
};

template <class Formula>
struct TransformOf {
  using Type = NoTransform;
};
template <class Formula>
requires requires { typename Formula::Transform; }
struct TransformOf<Formula> {
  using Type = typename Formula::Transform;
};

// The entries of a part's list; none for a part without one.
template <class Part>
[[nodiscard]] constexpr auto entries_of() {
  if constexpr (requires { Part::parameters; })
    return Part::parameters;
  else
    return std::tuple{};
}

template <class Real>
void check_relative_rows(const Param<Real>& rows, const Geometry& g, const char* where) {
  const std::vector<Index>& shape = rows.shape();
  require(shape.size() == 3 && (shape[0] == 1 || shape[0] == g.heads) && shape[1] % 2 == 1 &&
              shape[2] == g.dim_qk,
          where, ": relative rows have shape ", extents_text(shape), ", it must be (1 or ", g.heads,
          ",2 clip + 1,", g.dim_qk, ")");
}

// Compiles score() of a formula, and does not run it.
template <class S, class Formula, class Pair, class Scalars>
[[nodiscard]] auto probe_formula(const Formula& formula, const Pair& pair, const Scalars& p) {
  if constexpr (requires { formula.template score<S>(pair, p); }) {
    return formula.template score<S>(pair, p);
  } else {
    static_assert(
        requires { formula.score(pair, p); },
        "heed: a formula needs `template <class S> S score(const auto& pair, const auto& p) const` "
        "(plug/own_score.hpp)");
    return formula.score(pair, p);
  }
}

// Ones that throw where a formula reads more of them than there are; they know why there are so few.
template <std::size_t count>
struct CountedNumbers : std::array<double, count> {
  const char *where, *name, *because;

  CountedNumbers(const char* in, const char* of, const char* why)
      : where(in), name(of), because(why) {
    this->fill(1.0);
  }
  double operator[](std::size_t at) const {
    require(at < count, where, ": the formula reads ", name, "[", Index(at), "], ", because, " ",
            count, " (plug/own_score.hpp)");
    return 1.0;
  }
};
template <class Score>
struct CountedPair : PairOf<Score, double> {
  CountedNumbers<std::size_t(Score::query_features)> query;
  CountedNumbers<std::size_t(Score::key_features)> key;

  explicit CountedPair(const char* where)
      : PairOf<Score, double>{.dot = 0.5,
                              .logit = 0.5,
                              .projected = 0.5,
                              .table = 0.5,
                              .position = 0.5,
                              .query_index = 2,
                              .key_index = 1},
        query(where, "pair.query", "its Features give each query row so many numbers:"),
        key(where, "pair.key", "its Features give each key row so many numbers:") {}
};

}  // namespace detail

// A formula as a score that the engine runs: it adds the formula's derived values, and the defaults of a score.
template <template <class> class Formula, class Real>
struct OwnScore : ScoreWith<typename detail::FeaturesOf<Formula<Real>>::Type>,
                  detail::TransformOf<Formula<Real>>::Type,
                  Formula<Real> {
  using TransformType = typename detail::TransformOf<Formula<Real>>::Type;
  static constexpr bool has_transform = !std::is_same_v<TransformType, NoTransform>;
  static constexpr bool has_relative_rows = requires { Formula<Real>::relative_rows; };
  // The formula's parameters come first, also in p.
  static constexpr auto parameters =
      std::tuple_cat(detail::entries_of<Formula<Real>>(), detail::entries_of<TransformType>());
  template <class U>
  using rebind = OwnScore<Formula, U>;
  using PlaceFree = std::conditional_t<place_free<Formula<Real>> && !has_relative_rows &&
                                           (!has_transform || place_free<TransformType>),
                                       OwnScore, void>;
  using NormedDots =
      std::conditional_t<normed_dots<Formula<Real>> && !has_relative_rows, OwnScore, void>;
  // Features without members depend on the row and on p alone.
  using KeptFeatures =
      std::conditional_t<std::is_empty_v<typename detail::FeaturesOf<Formula<Real>>::Type> &&
                             (!has_transform || kept_features<TransformType>),
                         OwnScore, void>;

  static constexpr int numbers_per_column = detail::numbers_per_column_of<Formula<Real>, Real>();
  static constexpr int weights_per_column = detail::weights_per_column_of<Formula<Real>>();
  static constexpr bool has_positions = requires { Formula<Real>::positions; };
  // Key features read no member of the formula, so only the transform has numbers here.
  [[nodiscard]] std::vector<double> feature_numbers() const requires has_transform {
    return detail::feature_numbers_of<TransformType>(*this);
  }
  static constexpr bool has_table = has_relative_rows;
  [[nodiscard]] Index table_size() const requires has_relative_rows {
    return relative_rows().extent(1);
  }
  [[nodiscard]] Index table_clip() const requires has_relative_rows { return table_size() / 2; }
  void prepare_table(Index h, Index dim, Real* out) const requires has_relative_rows {
    std::copy_n(relative_rows().data() + relative_head(h, dim), table_size() * dim, out);
  }
  static void table_vjp(Index h, Index dim, const double* dtable,
                        OwnScore& grad) requires has_relative_rows {
    Param<Real>& rows = grad.*Formula<Real>::relative_rows;
    Real* to = rows.data() + grad.relative_head(h, dim);
    for (Index n = 0; n < grad.table_size() * dim; ++n) to[n] += Real(dtable[n]);
  }

  // The check of a formula that plug/check.hpp makes before the engine compiles it: mistakes end in one sentence.
  [[nodiscard]] static consteval bool check_formula() {
    using S = detail::Probe<Real>;
    using Result = decltype(detail::probe_formula<S>(
        std::declval<const Formula<Real>&>(), std::declval<const PairOf<OwnScore, S>&>(),
        std::declval<const ScalarsOf<OwnScore, S>&>()));
    static_assert(std::convertible_to<Result, S>,
                  "heed: score() of a formula returns a number of its type S (plug/own_score.hpp)");
    return true;
  }

  void check(const Geometry& g, const char* where) const {
    if constexpr (requires(const Formula<Real>& formula) { formula.check(g, where); })
      Formula<Real>::check(g, where);
    if constexpr (has_transform) TransformType::check(g, where);
    if constexpr (has_relative_rows) detail::check_relative_rows(relative_rows(), g, where);
    if constexpr (numbers_per_column > 0) detail::check_columns(*this, g, where);
    // The engine checks the numbers per token of a score that declares some.
    if constexpr (OwnScore::query_features + OwnScore::key_features > 0 && !reads_inputs<OwnScore>)
      detail::require_declared_inputs<Real>(*this, g.dim_qk, where);
    check_reads(where);
  }
  void keep_jointly() {
    if constexpr (requires(Formula<Real> & formula) { formula.keep_jointly(); })
      Formula<Real>::keep_jointly();
    if constexpr (has_transform) TransformType::keep_jointly();
  }
  template <class S>
  [[nodiscard, gnu::always_inline]] S score(const PairOf<OwnScore, S>& pair, const auto& p) const {
    const Formula<Real>& formula = *this;
    if constexpr (requires { formula.template score<S>(pair, p); })
      return formula.template score<S>(pair, p);
    else
      return formula.score(pair, p);
  }

 private:
  [[nodiscard]] const Param<Real>& relative_rows() const requires has_relative_rows {
    return this->*Formula<Real>::relative_rows;
  }
  [[nodiscard]] Index relative_head(Index h, Index dim) const requires has_relative_rows {
    return relative_rows().extent(0) == 1 ? 0 : h * table_size() * dim;
  }
  // Refuses a formula that reads numbers which do not exist. The engine's arrays do not check this.
  void check_reads(const char* where) const {
    const Formula<Real>& formula = *this;
    const detail::CountedPair<OwnScore> pair(where);
    const detail::CountedNumbers<std::size_t(scalars_of<OwnScore>)> p(
        where, "p", "`parameters` names so many numbers per head, options not counted:");
    if constexpr (requires { formula.template score<double>(pair, p); })
      (void)formula.template score<double>(pair, p);
    else if constexpr (requires { formula.score(pair, p); })
      (void)formula.score(pair, p);
    if constexpr (numbers_per_column > 0) {
      const char* why = "its numbers_per_column is";
      const detail::CountedNumbers<std::size_t(numbers_per_column)> q(where, "q", why),
          k(where, "k", why);
      const detail::CountedNumbers<std::size_t(weights_per_column)> w(where, "w",
                                                                      "its weights_per_column is");
      (void)formula.template column<double>(q, k, w);
    }
  }
};

// Attention with a score of your own.
template <template <class> class Formula, class Real>
using OwnAttention = Attention<Real, OwnScore<Formula, Real>, Softmax<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
