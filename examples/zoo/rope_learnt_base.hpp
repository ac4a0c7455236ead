// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rotary position embedding whose base is learnt, one for all heads or one each: columns m and m + d/2 of a query or key at position i
// turn by the angle i e^(-2 m b_h / d), b_h the log of the base.
//
//   score_ij = s (R_i q_i).(R_j k_j)
//
// Source  J. Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding (2021), equation 34, where the base is
//         10,000. Here it starts there, and is differentiated.

#include "kit.hpp"

#include <heed/plug/transform.hpp>

namespace zoo::rope_learnt_base {

template <class T>
struct Score {
  using Transform = heed::Rotation<T>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:rope-learnt-base", "base from 10,000", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto turned = [&](Numbers x, std::ptrdiff_t position) {
    const std::size_t half = x.size() / 2;
    for (std::size_t m = 0; m < half; ++m) {
      const double base = std::exp(op.score.log_base.head(row.head));
      const double angle = double(position) / std::pow(base, double(2 * m) / double(x.size()));
      const double a = x[m], b = x[half + m];
      x[m] = a * std::cos(angle) - b * std::sin(angle);
      x[half + m] = a * std::sin(angle) + b * std::cos(angle);
    }
    return x;
  };
  const Numbers query = turned(row.query, row.position);
  return mixed(row, softmax(scores_by(row, [&](std::size_t j) {
                 return row.scale * dot(query, turned(row.keys[j], row.positions[j]));
               })));
}

}  // namespace zoo::rope_learnt_base
