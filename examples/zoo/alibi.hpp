// SPDX-License-Identifier: Apache-2.0
#pragma once

// ALiBi with learnt slopes: scores fall linearly with the distance of query and key.
//
//   score_ij = s q_i.k_j - slope_h |i - j|       slope_h starts at 2^(-8 (h+1) / heads)
//
// Source  O. Press, N. Smith, M. Lewis, Train Short, Test Long: Attention with Linear Biases Enables Input Length
//         Extrapolation (2021). There the slopes are fixed; heed::alibi() is a mask that does so.

#include "kit.hpp"

namespace zoo::alibi {

template <class T>
struct Score {
  heed::Param<T> slope = T(0.5);
  static constexpr auto parameters =
      std::tuple{heed::named("slope", &Score::slope, heed::Range::positive)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * heed::distance(pair);
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.score.slope = heed::Param<T>(std::vector<Index>{g.heads});
  for (Index h = 0; h < g.heads; ++h)
    op.score.slope[h] = T(std::exp2(-8.0 * double(h + 1) / double(g.heads)));
  return {"zoo:alibi", "learnt slopes", g, op};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  for (std::size_t j = 0; j < scores.size(); ++j)
    scores[j] -= op.score.slope.head(row.head) * std::abs(double(row.position - row.positions[j]));
  return mixed(row, softmax(scores));
}

}  // namespace zoo::alibi
