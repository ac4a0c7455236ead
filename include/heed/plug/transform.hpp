// SPDX-License-Identifier: Apache-2.0
#pragma once

// Row transforms change a query or key row before products, features, projections and tables are computed from it.
//
//   template <class T>
//   struct Turned {                                     // a formula of one's own (plug/own_score.hpp)
//     using Transform = heed::Rotation<T>;
//     template <class S>
//     S score(const auto& pair, const auto&) const { return pair.logit; }   // of rotated rows
//   };
//
// Each row is transformed once per call, and a KvCache keeps the transformed rows of its keys where the transform allows it.
// A transform inherits PlainTransform and has
//
//   parameters                                as for a score (plug/parameters.hpp); they come behind the score's
//   transform(side, head, x)                  overwrites the row x in place
//   transform_vjp(side, head, x, d, sum, grad)     turns d, the gradient of the transformed row, into that of x,
//                                             the row before. Adds to grad, the gradients of the parameters; sum(s)
//                                             adds up a number s per row. May write to x
//   differs_by_head() const            true   true if keys of a key-value head depend on the query head that reads them
//   PlaceFree, KeptFeatures                   promises (plug/promises.hpp): that it reads no position or head; that
//                                             transformed keys depend only on the key's row, its position, learnt
//                                             parameters, and the numbers that `std::vector<double> feature_numbers()
//                                             const` gives, if it has that
//
// x and d are rows of W queries or keys, a number S (x.Scalar) of each at a time: x(c), c < x.dim(), x.set(c, s), and
// x.index(), the positions: j of key j, Inputs::first_query + i of query i. A transform keeps the width of a row. For
// jvp() S is a dual number, and T, the type of the parameters, is S: transform() is a formula of S,
// as score() is. For hvp() transform_vjp() is a formula of S, too, and sum(s) returns an S.
//
//   Rotation     pairs of columns turn by position times frequency, the frequencies' base learnt (RoPE)
//   RmsNorm      rows are divided by the root of their mean square; a learnt gain per column (QK-norm)
//   Diagonal     columns of keys are multiplied by a learnt gain: the metric q^T diag(gain) k
//   Then<A, B>   B of A
//
// Cost    4 len dim numbers read and written per call beside attention's len^2 dim, and the transform's own arithmetic.
// Memory  len_kv dim_qk numbers per key-value head, per query head where differs_by_head().

#include <heed/core/scalar.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/plug/promises.hpp>
#include <heed/plug/tile.hpp>
#include <heed/simd/functions.hpp>

#include <cmath>
#include <tuple>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

enum class RowSide { query, key };

// Vector v of rows in lanes, to be transformed in place.
template <class Real, class Tile = LaneTile<Real>>
struct LaneRowInPlace {
  using Scalar = typename Tile::P;
  Tile tile;
  decltype(tile.constant()) before;  // the rows that restore() brings back
  int vector = 0;
  Pack<Real> position = Real(0);

  [[nodiscard]] Index dim() const { return tile.rows; }
  [[nodiscard]] Scalar operator()(Index c) const { return tile.load(c, vector); }
  void set(Index c, const Scalar& x) const { tile.store(c, vector, x); }
  [[nodiscard]] Scalar index() const { return Scalar(position); }
  void restore() const {
    for (Index c = 0; c < dim(); ++c) set(c, before.load(c, vector));
  }
};

struct NoTransform {};

struct PlainTransform {
  [[nodiscard]] bool differs_by_head() const { return true; }
  void check(const Geometry&, const char*) const {}
  void keep_jointly() {}
};

namespace detail {

// The gain of column c in a table (1 or heads, columns); 1 for an empty one.
template <class S, class Real>
[[nodiscard]] S gain_at(const Param<Real>& gains, Index head, Index c) {
  if (!gains.given()) return math::constant<S>(1);
  return S(gains[(gains.extent(0) == 1 ? 0 : head) * gains.extent(1) + c]);
}
template <class Real>
[[nodiscard]] Real& gain_to(Param<Real>& gains, Index head, Index c) {
  return gains[(gains.extent(0) == 1 ? 0 : head) * gains.extent(1) + c];
}
template <class Real>
void check_gains(const Param<Real>& gains, const Geometry& g, const char* where, const char* name) {
  if (gains.given()) require_rows_per_head(gains, g.heads, where, name);
}

// The numbers, beside rows, positions and parameters, on which transformed keys depend.
template <class Transform>
[[nodiscard]] std::vector<double> feature_numbers_of(const Transform& transform) {
  if constexpr (requires { transform.feature_numbers(); })
    return transform.feature_numbers();
  else
    return {};
}

}  // namespace detail

// Columns (m, m + dim / 2) turn by the angle  phi = i e^(-2 m log_base / dim)  at position i; a
// last column without a partner is not changed.
//   a' = a cos phi - b sin phi                 b' = a sin phi + b cos phi
//   da = da' cos phi + db' sin phi             db = db' cos phi - da' sin phi
//   dlog_base = -sum (a' db' - b' da') phi 2 m / dim
//
// Accuracy  in float an angle has a relative error of 2^-22, so that its cosine is good up to positions of some thousands.
// Source    Su et al. 2021, "RoFormer", equation 34, where the base is 10,000.
template <class Real>
struct Rotation : PlainTransform {
  Param<Real> log_base = Real(9.210340371976184);  // log 10,000; one value or one per head
  static constexpr auto parameters = std::tuple{named("log_base", &Rotation::log_base)};
  using KeptFeatures = Rotation;
  [[nodiscard]] bool differs_by_head() const { return log_base.size() > 1; }

  template <class Row>
  void transform(RowSide, Index head, const Row& x) const {
    using S = typename Row::Scalar;
    const Index pairs = x.dim() / 2;
    for (Index m = 0; m < pairs; ++m) {
      const S phi = angle(head, x, m), cosine = math::cos(phi), sine = math::sin(phi);
      const S a = x(m), b = x(m + pairs);
      x.set(m, a * cosine - b * sine);
      x.set(m + pairs, a * sine + b * cosine);
    }
  }
  template <class Row, class Sum>
  void transform_vjp(RowSide, Index head, const Row& x, const Row& d, const Sum& sum,
                     Rotation& grad) const {
    using S = typename Row::Scalar;
    const Index pairs = x.dim() / 2;
    S dlog = math::constant<S>(0);
    for (Index m = 0; m < pairs; ++m) {
      const S phi = angle(head, x, m), cosine = math::cos(phi), sine = math::sin(phi);
      const S a = x(m) * cosine - x(m + pairs) * sine, b = x(m) * sine + x(m + pairs) * cosine;
      const S da = d(m), db = d(m + pairs);
      dlog -= (a * db - b * da) * phi * math::constant<S>(power(x.dim(), m));
      d.set(m, da * cosine + db * sine);
      d.set(m + pairs, db * cosine - da * sine);
    }
    grad.log_base.head(head) += sum(dlog);
  }

 private:
  [[nodiscard]] static double power(Index dim, Index m) { return 2.0 * double(m) / double(dim); }
  template <class Row>
  [[nodiscard]] typename Row::Scalar angle(Index head, const Row& x, Index m) const {
    using S = typename Row::Scalar;
    return x.index() * math::exp(S(S(log_base.head(head)) * math::constant<S>(-power(x.dim(), m))));
  }
};

// y_c = gain_c x_c r      r = (sum_c x_c^2 / dim + eps)^(-1/2)
//   dgain_c = dy_c x_c r          with u_c = dy_c gain_c:  dx_c = r u_c - x_c r^3 (sum_c u_c x_c) / dim
//
// Bounds  rows whose squares neither overflow nor vanish beside eps; a row of zeros stays zero.
// Source  Zhang & Sennrich 2019, "Root Mean Square Layer Normalization"; of queries and keys: Henry et al. 2020.
template <class Real>
struct RmsNorm : PlainTransform {
  Param<Real> query_gain, key_gain;  // (1 or heads, dim_qk), or empty for ones
  double eps = 1e-6;
  [[nodiscard]] std::vector<Index> shape(const Geometry& g) const { return {-1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{tensor_if_given("query_gain", &RmsNorm::query_gain, &RmsNorm::shape),
                 tensor_if_given("key_gain", &RmsNorm::key_gain, &RmsNorm::shape),
                 option("eps", &RmsNorm::eps, Range::positive)};
  using PlaceFree = RmsNorm;
  using KeptFeatures = RmsNorm;
  [[nodiscard]] std::vector<double> feature_numbers() const { return {eps}; }
  [[nodiscard]] bool differs_by_head() const { return key_gain.given() && key_gain.extent(0) > 1; }
  void check(const Geometry& g, const char* where) const {
    detail::check_gains(query_gain, g, where, "query_gain");
    detail::check_gains(key_gain, g, where, "key_gain");
  }

  template <class Row>
  void transform(RowSide side, Index head, const Row& x) const {
    using S = typename Row::Scalar;
    const S r = inverse_root(x);
    for (Index c = 0; c < x.dim(); ++c)
      x.set(c, x(c) * r * detail::gain_at<S>(gains(side), head, c));
  }
  template <class Row, class Sum>
  void transform_vjp(RowSide side, Index head, const Row& x, const Row& d, const Sum& sum,
                     RmsNorm& grad) const {
    using S = typename Row::Scalar;
    const S r = inverse_root(x);
    S along = math::constant<S>(0);
    for (Index c = 0; c < x.dim(); ++c) {
      if (gains(side).given())
        detail::gain_to(side == RowSide::query ? grad.query_gain : grad.key_gain, head, c) +=
            sum(S(d(c) * x(c) * r));
      d.set(c, d(c) * detail::gain_at<S>(gains(side), head, c));
      along += d(c) * x(c);
    }
    const S back = along * r * r * r / math::constant<S>(double(x.dim()));
    for (Index c = 0; c < x.dim(); ++c) d.set(c, r * d(c) - x(c) * back);
  }

 private:
  [[nodiscard]] const Param<Real>& gains(RowSide side) const {
    return side == RowSide::query ? query_gain : key_gain;
  }
  template <class Row>
  [[nodiscard]] typename Row::Scalar inverse_root(const Row& x) const {
    using S = typename Row::Scalar;
    const auto at = [&x](Index c) { return x(c); };
    const S mean = math::dot_product(x.dim(), at, at) / math::constant<S>(double(x.dim()));
    return math::constant<S>(1) / math::sqrt(S(mean + math::constant<S>(eps)));
  }
};

// k'_c = gain_c k_c       dgain_c = sum dk'_c k_c       dk_c = gain_c dk'_c
template <class Real>
struct Diagonal : PlainTransform {
  Param<Real> gain;  // (1 or heads, dim_qk), or empty for ones
  [[nodiscard]] std::vector<Index> shape(const Geometry& g) const { return {-1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{tensor_if_given("gain", &Diagonal::gain, &Diagonal::shape)};
  using PlaceFree = Diagonal;
  using KeptFeatures = Diagonal;
  [[nodiscard]] bool differs_by_head() const { return gain.given() && gain.extent(0) > 1; }
  void check(const Geometry& g, const char* where) const {
    detail::check_gains(gain, g, where, "gain");
  }

  template <class Row>
  void transform(RowSide side, Index head, const Row& x) const {
    using S = typename Row::Scalar;
    for (Index c = 0; side == RowSide::key && c < x.dim(); ++c)
      x.set(c, x(c) * detail::gain_at<S>(gain, head, c));
  }
  template <class Row, class Sum>
  void transform_vjp(RowSide side, Index head, const Row& x, const Row& d, const Sum& sum,
                     Diagonal& grad) const {
    using S = typename Row::Scalar;
    for (Index c = 0; side == RowSide::key && gain.given() && c < x.dim(); ++c) {
      detail::gain_to(grad.gain, head, c) += sum(S(d(c) * x(c)));
      d.set(c, d(c) * detail::gain_at<S>(gain, head, c));
    }
  }
};

// Second of First; two different transforms, neither of which is a Then.
template <class First, class Second>
struct Then : First, Second {
  static constexpr auto parameters = std::tuple_cat(First::parameters, Second::parameters);
  using PlaceFree = std::conditional_t<place_free<First> && place_free<Second>, Then, void>;
  using KeptFeatures =
      std::conditional_t<kept_features<First> && kept_features<Second>, Then, void>;
  [[nodiscard]] bool differs_by_head() const {
    return First::differs_by_head() || Second::differs_by_head();
  }
  [[nodiscard]] std::vector<double> feature_numbers() const {
    std::vector<double> numbers = detail::feature_numbers_of<First>(*this);
    const std::vector<double> others = detail::feature_numbers_of<Second>(*this);
    numbers.insert(numbers.end(), others.begin(), others.end());
    return numbers;
  }
  void check(const Geometry& g, const char* where) const {
    First::check(g, where);
    Second::check(g, where);
  }
  void keep_jointly() {
    First::keep_jointly();
    Second::keep_jointly();
  }
  template <class Row>
  void transform(RowSide side, Index head, const Row& x) const {
    First::transform(side, head, x);
    Second::transform(side, head, x);
  }
  template <class Row, class Sum>
  void transform_vjp(RowSide side, Index head, const Row& x, const Row& d, const Sum& sum,
                     Then& grad) const {
    First::transform(side, head, x);
    Second::transform_vjp(side, head, x, d, sum, grad);
    x.restore();
    First::transform_vjp(side, head, x, d, sum, grad);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
