// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hyperbolic attention: scores fall with the distance of query and key on a hyperboloid.
//
//   score_ij = -beta_h d_ij       d = arcosh(x), x = sqrt(1 + |q|^2) sqrt(1 + |k|^2) - q.k       arcosh(x) = log(x + sqrt(x^2 - 1))
//
// Where x^2 - 1 < 1e-6 the distance is that of 1e-6: its derivative has no bound at 0.
//
// Source  C. Gulcehre et al., Hyperbolic Attention Networks (2018), section 3. There pseudo-polar coordinates lift rows to
//         the hyperboloid and values are averaged on it; here a row is lifted by its own coordinates, and values are
//         averaged as usual.

#include "kit.hpp"

namespace zoo::hyperbolic {

template <class T>
struct Score {
  heed::Param<T> beta = T(1);
  static constexpr auto parameters =
      std::tuple{heed::named("beta", &Score::beta, heed::Range::positive)};
  using Features = heed::SquaredNorms;
  using PlaceFree = Score;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    const S times = heed::math::sqrt(S((1.0 + pair.query[0]) * (1.0 + pair.key[0])));
    const S x = times - pair.dot;
    const S y = heed::math::sqrt(heed::math::maximum(S(x * x - 1.0), S(1e-6)));
    return -p[0] * heed::math::log(S(x + y));
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:hyperbolic", "learnt beta", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  return mixed(row, softmax(scores_by(row, [&](std::size_t j) {
                 const Numbers& key = row.keys[j];
                 const double x = std::hypot(1, std::sqrt(dot(row.query, row.query))) *
                                      std::hypot(1, std::sqrt(dot(key, key))) -
                                  dot(row.query, key);
                 return -op.score.beta.head(row.head) * std::acosh(x);
               })));
}

}  // namespace zoo::hyperbolic
