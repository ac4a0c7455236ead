// SPDX-License-Identifier: Apache-2.0
#pragma once

// Retention: scores that fade with the distance are weights by themselves, without a softmax.
//
//   w_j = x_j / D       x_j = s q_i.k_j exp(-exp(decay_h) |i - j|)       D = max(1, |sum_k x_k|)
//
// exp(decay_h) starts at -log(1 - 2^(-5-h)).
//
// Source  Y. Sun et al., Retentive Network: A Successor to Transformer for Large Language Models (2023), in its parallel form.
//         There the decay is fixed, rows of decays are scaled, queries and keys are rotated, and a norm and a gate follow.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::retention {

template <class T>
struct Score {
  heed::Param<T> decay = T(-3.5);
  static constexpr auto parameters = std::tuple{heed::named("decay", &Score::decay)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * heed::math::exp(S(-heed::math::exp(S(p[0])) * heed::distance(pair)));
  }
};

template <class T>
struct Fading : heed::PlainRows {
  using PlaceFree = Fading;

  auto forward(const auto& row) const {
    const auto x = row.score();
    return x * (1 / heed::math::maximum(heed::math::absolute(row.sum(x)), 1));
  }
};

template <class T>
using Op = Attention<T, heed::OwnScore<Score, T>, Fading<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.score.decay = heed::Param<T>(std::vector<Index>{g.heads});
  for (Index h = 0; h < g.heads; ++h)
    op.score.decay[h] = T(std::log(-std::log1p(-std::exp2(-5.0 - double(h)))));
  return {"zoo:retention", "learnt decay", g, op, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers weights = logits(row);
  for (std::size_t j = 0; j < weights.size(); ++j)
    weights[j] *= std::exp(-std::exp(op.score.decay.head(row.head)) *
                           std::abs(double(row.position - row.positions[j])));
  const double size = std::max(1.0, std::abs(sum_of(weights)));
  for (double& w : weights) w /= size;
  return mixed(row, weights);
}

}  // namespace zoo::retention
