// SPDX-License-Identifier: Apache-2.0
#pragma once

// Elliptical attention: distances of query and key under a metric that counts some columns for more than others.
//
//   score_ij = -precision_h / 2 sum_c m_c (q_ic - k_jc)^2       m_c = 1.5 - c / dim_qk
//
// |q|^2, |k|^2 and q.k under the metric are those of rows times P = diag(sqrt(m)).
//
// Source  S. Nielsen et al., Elliptical Attention (2024). There the metric of a layer is measured, from how its values change
//         between layers; here it is an option, and the precision is learnt.

#include "kit.hpp"

namespace zoo::elliptical {

struct MetricNorm {
  template <class S, class Row>
  static S of(const Row& row) {
    const auto x = [&row](Index c) { return row.projected(c); };
    return heed::math::dot_product(row.rank(), x, x);
  }
  template <class Row, class S, class Add>
  static void vjp(const Row& row, const S&, const S& df, const Add& add) {
    for (Index c = 0; c < row.rank(); ++c) add.add_projected(c, (df + df) * row.projected(c));
  }
};

template <class T>
struct Score : heed::ScoreWith<heed::BothRows<MetricNorm>> {
  static constexpr bool has_projection = true;
  heed::Param<T> precision = T(0.25), metric;  // metric: P (dim_qk, dim_qk)
  static constexpr auto parameters =
      std::tuple{heed::named("precision", &Score::precision, heed::Range::not_negative),
                 heed::fixed("metric", &Score::metric)};
  using PlaceFree = Score;

  const heed::Param<T>& projection() const { return metric; }
  void check(const heed::Geometry& g, const char* where) const {
    heed::require(metric.shape() == std::vector<Index>{g.dim_qk, g.dim_qk}, where, ": metric has ",
                  metric.size(), " values, it must have dim_qk x dim_qk for dim_qk ", g.dim_qk);
  }
  template <class S>
  S score(const heed::PairOf<Score, S>& pair, const auto& p) const {
    return S(-0.5) * p[0] * (pair.query[0] + pair.key[0] - (pair.projected + pair.projected));
  }
};

template <class T>
using Op = Attention<T, Score<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.score.metric = heed::Param<T>(std::vector<Index>{g.dim_qk, g.dim_qk});
  for (Index c = 0; c < g.dim_qk; ++c)
    op.score.metric[c * g.dim_qk + c] = T(std::sqrt(1.5 - double(c) / double(g.dim_qk)));
  return {"zoo:elliptical", "metric from 1.5 to 0.5", g, op};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const double dim = double(row.query.size());
  return mixed(row, softmax(scores_by(row, [&](std::size_t j) {
                 double squares = 0;
                 for (std::size_t c = 0; c < row.query.size(); ++c)
                   squares += (1.5 - double(c) / dim) * std::pow(row.query[c] - row.keys[j][c], 2);
                 return -op.score.precision.head(row.head) / 2 * squares;
               })));
}

}  // namespace zoo::elliptical
