// SPDX-License-Identifier: Apache-2.0
#pragma once

// Gaussian kernel attention with a learnt precision per head: the softmax of squared distances.
//
//   score_ij = -precision_h |q_i - k_j|^2 / 2
//
// Source  Y. Chen et al., Skyformer (2021), for the kernel, whose weights are not divided by their sum there; H. Kim,
//         G. Papamakarios, A. Mnih, The Lipschitz Constant of Self-Attention (2021), for the softmax of distances. Here
//         the precision is learnt, and query and key have projections of their own.

#include "kit.hpp"

namespace zoo::gaussian {

template <class T>
struct Score {
  heed::Param<T> precision = T(0.25);
  static constexpr auto parameters =
      std::tuple{heed::named("precision", &Score::precision, heed::Range::not_negative)};
  using Features = heed::SquaredNorms;
  using PlaceFree = Score;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return S(-0.5) * p[0] * heed::squared_distance(pair);
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:gaussian", "learnt precision", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  return mixed(row, softmax(scores_by(row, [&](std::size_t j) {
                 double squares = 0;
                 for (std::size_t c = 0; c < row.query.size(); ++c)
                   squares += std::pow(row.query[c] - row.keys[j][c], 2);
                 return -op.score.precision.head(row.head) / 2 * squares;
               })));
}

}  // namespace zoo::gaussian
