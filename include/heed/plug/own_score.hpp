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
// the words of core/scalar.hpp (math::exp, math::select ...), and branches on none of its values. `pair` has
// the fields of Pair (plug/score.hpp): dot, logit, query[], key[], query_index, key_index.
//
// Beside the formula a struct may have
//
//   using Features = SquaredNorms;     what pair.query[] and pair.key[] hold; or InverseNorms, or your own
//                                      with the members of NoSideValues
//   score_vjp(pair, p, g, d, dp)       the derivative by hand (plug/score.hpp); see check/op_check.hpp
//   PlaceFree, NormedDots = the struct itself      promises of what the formula does not read: decoding with
//                                      grouped heads is faster, giant rows have finite cosines (plug/promises.hpp)
//   other members in `parameters`      numbers that are no Param are options: not learnt and not in p, but
//                                      validated, and kept where the op is converted to another scalar
//
// A member that `parameters` does not name is not learnt, and has its default value where the op is converted, as
// by check_op(). There are no tables: buckets of distances are a Param each with math::select, whose backward cost
// grows with their number, or a bias mask, which has a gradient.
//
// Positions count from 0 in query and key alike: a formula that reads them and decodes with a cache needs
// the position of the first query as an option.
//
// Cost    without score_vjp dual numbers over vectors differentiate the formula; what it does not read, or
//         what a parameter does not reach, costs nothing (autodiff/lane_dual.hpp).
// Errors  std::invalid_argument where a parameter has not one value or one per head, or is out of range.

#include <heed/autodiff/lane_dual.hpp>
#include <heed/core/interval.hpp>
#include <heed/plug/attention.hpp>
#include <heed/plug/derivative.hpp>
#include <heed/simd/row_norm.hpp>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

// Where a parameter or option may lie; never NaN or infinite. Parameters that are learnt come back into it after
// each step of an optimiser (core/interval.hpp).
enum class Range { finite, not_negative, positive };

[[nodiscard]] inline Interval interval_of(Range range) {
  if (range == Range::positive) return positive_numbers();
  if (range == Range::finite) return {};
  Interval interval = positive_numbers();
  interval.rule = "it must not be negative";
  interval.with_low = true;
  return interval;
}

template <class Owner, class Member>
struct Named {
  using Type = Member;
  const char* name;
  Member Owner::*member;
  Range range;
};
template <class Owner, class Member>
[[nodiscard]] constexpr Named<Owner, Member> named(const char* name, Member Owner::*member,
                                                   Range range = Range::finite) {
  return {name, member, range};
}

// One number f of each query and key row, the same for both: pair.query[0] and pair.key[0]. `Feature` has
// of(row) and vjp(row, f, df, add), which adds df * df/drow.
template <class Feature>
struct BothRows {
  static constexpr bool plain = false;
  static constexpr int query_features = 1, key_features = 1;
  static constexpr bool has_projection = false, has_table = false;
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = Feature::template of<S>(row);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = Feature::template of<S>(row);
  }
  template <class Row, class S, class Add>
  void query_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    Feature::vjp(row, f[0], df[0], add);
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    Feature::vjp(row, f[0], df[0], add);
  }
};

// |x|^2; overflows where squares do.
struct SquaredNorm {
  template <class S, class Row>
  [[nodiscard]] static S of(const Row& row) {
    const auto x = [&row](Index c) { return row.x(c); };
    return math::dot_product(row.dim(), x, x);
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S&, const S& df, const Add& add) {
    const S twice = df + df;
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, twice * row.x(c));
  }
};
using SquaredNorms = BothRows<SquaredNorm>;

// 1/(|x| + 1e-8), any finite row; a row of zeros has gradient 0.
struct InverseNorm {
  static constexpr double eps = 1e-8;
  template <class S, class Row>
  [[nodiscard]] static S of(const Row& row) {
    return math::constant<S>(1) / (norm<S>(row) + math::constant<S>(eps));
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S& f, const S& df, const Add& add) {
    const S along = over_norm(S(-(df * f * f)), norm<S>(row));
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, along * row.x(c));
  }

 private:
  template <class S, class Row>
  [[nodiscard]] static S norm(const Row& row) {
    return row_norm<S>(row.dim(), [&row](Index c) { return row.x(c); });
  }
};
using InverseNorms = BothRows<InverseNorm>;

// cos(q, k), of a pair with InverseNorms.
template <class S>
[[nodiscard, gnu::always_inline]] inline S cosine(const Pair<S, 1, 1>& pair) {
  return pair.dot * pair.query[0] * pair.key[0];
}
// |q - k|^2, of a pair with SquaredNorms. Where q = k, rounding may take it below 0, and its square root has no
// finite derivative: under a root, take math::maximum with a small number.
template <class S>
[[nodiscard, gnu::always_inline]] inline S squared_distance(const Pair<S, 1, 1>& pair) {
  return pair.query[0] + pair.key[0] - (pair.dot + pair.dot);
}
// |i - j|
template <class S, int Q, int K>
[[nodiscard, gnu::always_inline]] inline S distance(const Pair<S, Q, K>& pair) {
  return math::absolute(S(pair.query_index - pair.key_index));
}

namespace detail {

template <class Formula>
struct FeaturesOf {
  using Type = NoSideValues;
};
template <class Formula>
requires requires { typename Formula::Features; }
struct FeaturesOf<Formula> {
  using Type = typename Formula::Features;
};

template <class Formula>
[[nodiscard]] constexpr auto parameters_of() {
  if constexpr (requires { Formula::parameters; })
    return Formula::parameters;
  else
    return std::tuple<>{};
}

// Has the formula a member called score_vjp, whatever its signature? If so, the name is ambiguous here.
struct AnyScoreVjp {
  int score_vjp;
};
template <class Formula>
struct BothScoreVjps : Formula, AnyScoreVjp {};
template <class Formula>
inline constexpr bool names_score_vjp = !requires {
  &BothScoreVjps<Formula>::score_vjp;
};

template <class Member>
inline constexpr bool is_param = false;
template <class Real>
inline constexpr bool is_param<Param<Real>> = true;

}  // namespace detail

// A formula as a score that the engine runs.
template <template <class> class Formula, class Real>
struct OwnScore : Formula<Real>, detail::FeaturesOf<Formula<Real>>::Type {
  template <class U>
  using rebind = OwnScore<Formula, U>;
  using PlaceFree = std::conditional_t<place_free<Formula<Real>>, OwnScore, void>;
  using NormedDots = std::conditional_t<normed_dots<Formula<Real>>, OwnScore, void>;

  // f("name", Param<Real>&), in the order of `parameters`.
  template <class F>
  void visit(F&& f) {
    each([&](const auto& named) {
      if constexpr (detail::is_param<typename std::remove_cvref_t<decltype(named)>::Type>)
        f(named.name, this->*named.member);
    });
  }
  // f("name", Param<Real>&, Interval), likewise.
  template <class F>
  void visit_ranges(F&& f) {
    each([&](const auto& named) {
      if constexpr (detail::is_param<typename std::remove_cvref_t<decltype(named)>::Type>)
        f(named.name, this->*named.member, interval_of(named.range));
    });
  }
  void validate(const Geometry& g, const char* where) const {
    static_assert(
        !detail::names_score_vjp<Formula<Real>> || HasScoreVjp<OwnScore, Real>,
        "score_vjp must be callable as score_vjp(pair, p, g, d, dp); see heed/plug/score.hpp");
    require_ranges(*this, g.heads, where);
    each([&](const auto& named) {
      const auto& member = this->*named.member;
      if constexpr (!detail::is_param<std::remove_cvref_t<decltype(member)>>)
        require_within(double(member), interval_of(named.range), where, named.name);
    });
  }
  // The options of the same formula over another scalar.
  template <class U>
  void take_options(const OwnScore<Formula, U>& from) {
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      (take_option(std::get<i>(kNames), from, std::get<i>(OwnScore<Formula, U>::kNames)), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<decltype(kNames)>>{});
  }

  [[nodiscard]] Real scalar(int i, Index h) const {
    Real value{};
    const_cast<OwnScore*>(this)->visit([&](const char*, const Param<Real>& param) {
      if (i-- == 0) value = param.head(h);
    });
    return value;
  }
  void chain_scalars(Index h, const double* dp, OwnScore& grad) const {
    grad.visit([&](const char*, Param<Real>& param) { param.head(h) += Real(*dp++); });
  }

  static constexpr auto kNames = detail::parameters_of<Formula<Real>>();
  static constexpr int scalars = std::apply(
      [](const auto&... named) {
        return (0 + ... +
                int(detail::is_param<typename std::remove_cvref_t<decltype(named)>::Type>));
      },
      kNames);

  template <class S>
  [[nodiscard, gnu::always_inline]] S score(const PairOf<OwnScore, S>& pair,
                                            const ScalarsOf<OwnScore, S>& p) const {
    const Formula<Real>& formula = *this;
    if constexpr (requires { formula.template score<S>(pair, p); })
      return formula.template score<S>(pair, p);
    else
      return formula.score(pair, p);
  }

 private:
  template <class F>
  static void each(F&& f) {
    std::apply([&](const auto&... named) { (f(named), ...); }, kNames);
  }
  template <class To, class From, class FromName>
  void take_option(const To& to, const From& from, const FromName& from_name) {
    if constexpr (!detail::is_param<typename To::Type>) this->*to.member = from.*from_name.member;
  }
};

// Attention with a score of your own.
template <template <class> class Formula, class Real>
using OwnAttention = Attention<Real, OwnScore<Formula, Real>, Softmax<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
