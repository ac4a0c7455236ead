// SPDX-License-Identifier: Apache-2.0
#pragma once

// Own scores whose rows are turned before the product.

#include <heed/plug/own_score.hpp>
#include <heed/plug/transform.hpp>

#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

namespace heed_test {

// The formula is that of plain attention.
template <class T>
struct Turned {
  using Transform = heed::Rotation<T>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

// QK-norm, then rotation, under a learnt temperature.
template <class T>
struct NormedTurned {
  using Transform = heed::Then<heed::RmsNorm<T>, heed::Rotation<T>>;
  heed::Param<T> heat = T(0.7);
  static constexpr auto parameters = std::tuple{heed::named("heat", &NormedTurned::heat)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * p[0];
  }
};

// An own transform: x_c + bend_h x_c^3 log(1 + i), of keys alone; with features of the transformed rows.
template <class T>
struct Bend : heed::PlainTransform {
  heed::Param<T> bend = T(0.1);
  static constexpr auto parameters = std::tuple{heed::named("bend", &Bend::bend)};

  template <class Row>
  void transform(heed::RowSide side, heed::Index head, const Row& x) const {
    using S = typename Row::Scalar;
    if (side == heed::RowSide::query) return;
    for (heed::Index c = 0; c < x.dim(); ++c) {
      const S cube = x(c) * x(c) * x(c);
      x.set(c, x(c) + S(bend.head(head)) * cube * heed::math::log1p(x.index()));
    }
  }
  template <class Row, class Sum>
  void transform_vjp(heed::RowSide side, heed::Index head, const Row& x, const Row& d,
                     const Sum& sum, Bend& grad) const {
    using S = typename Row::Scalar;
    if (side == heed::RowSide::query) return;
    const S place = heed::math::log1p(x.index());
    for (heed::Index c = 0; c < x.dim(); ++c) {
      grad.bend.head(head) += sum(S(d(c) * x(c) * x(c) * x(c) * place));
      d.set(c, d(c) + d(c) * S(3) * S(bend.head(head)) * x(c) * x(c) * place);
    }
  }
};
template <class T>
struct Bent {
  using Transform = Bend<T>;
  using Features = heed::SquaredNorms;
  heed::Param<T> width = T(0.2);
  static constexpr auto parameters = std::tuple{heed::named("width", &Bent::width)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return heed::math::tanh(S(p[0] * heed::squared_distance(pair))) + pair.logit;
  }
};

// Squared distances under a learnt metric.
template <class T>
struct Metric {
  using Transform = heed::Diagonal<T>;
  using Features = heed::SquaredNorms;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return S(-0.2) * heed::squared_distance(pair);
  }
};

// Relative rows of queries that turn.
template <class T>
struct TurnedShaw {
  using Transform = heed::Rotation<T>;
  heed::Param<T> rows = heed::Param<T>(std::vector<heed::Index>{1, 7, 6});
  std::vector<heed::Index> shape(const heed::Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters =
      std::tuple{heed::tensor("rows", &TurnedShaw::rows, &TurnedShaw::shape)};
  static constexpr auto relative_rows = &TurnedShaw::rows;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + S(0.3) * pair.table;
  }
};

// Sets parameters to ordinary values, of one head or of each.
template <class Op>
[[nodiscard]] Op filled(const heed::Geometry& g, bool per_head) {
  using T = typename Op::Scalar;
  Op op;
  const heed::Index heads = per_head ? g.heads : 1;
  const auto fill = [](heed::Param<T>& param, std::vector<heed::Index> shape, double middle,
                       double at) {
    param = heed::Param<T>(std::move(shape));
    for (heed::Index n = 0; n < param.size(); ++n)
      param[n] = T(middle * (1 + 0.3 * std::sin(at + 3 * double(n))));
  };
  if constexpr (requires { op.score.log_base; }) fill(op.score.log_base, {heads}, 4, 0);
  if constexpr (requires { op.score.bend; }) fill(op.score.bend, {heads}, 0.1, 4);
  if constexpr (requires { op.score.query_gain; })
    fill(op.score.query_gain, {heads, g.dim_qk}, 1, 1);
  if constexpr (requires { op.score.key_gain; }) fill(op.score.key_gain, {heads, g.dim_qk}, 1, 2);
  if constexpr (requires { op.score.gain; }) fill(op.score.gain, {heads, g.dim_qk}, 1, 3);
  if constexpr (requires { op.score.rows; }) fill(op.score.rows, {heads, 7, g.dim_qk}, 0.5, 5);
  return op;
}

}  // namespace heed_test
