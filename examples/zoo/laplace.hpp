// SPDX-License-Identifier: Apache-2.0
#pragma once

// The softmax of L1 distances, a Laplace kernel with a learnt rate per head: a sum over columns that no dot product gives.
//
//   score_ij = -rate_h sum_c |q_ic - k_jc|
//
// Source  H. Kim et al., Attentive Neural Processes (2019): Laplace attention, whose rate is fixed there.

#include "kit.hpp"

namespace zoo::laplace {

template <class T>
struct Score {
  heed::Param<T> rate = T(0.3);
  static constexpr auto parameters =
      std::tuple{heed::named("rate", &Score::rate, heed::Range::not_negative)};
  using PlaceFree = Score;

  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return heed::math::absolute(S(q[0] - k[0]));
  }
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return -p[0] * pair.dot;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:laplace", "learnt rate", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  return mixed(row, softmax(scores_by(row, [&](std::size_t j) {
                 double sum = 0;
                 for (std::size_t c = 0; c < row.query.size(); ++c)
                   sum += std::abs(row.query[c] - row.keys[j][c]);
                 return -op.score.rate.head(row.head) * sum;
               })));
}

}  // namespace zoo::laplace
