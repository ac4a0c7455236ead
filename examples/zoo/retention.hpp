// SPDX-License-Identifier: Apache-2.0
#pragma once

// Retention: scores that fade with the distance are weights by themselves, without a softmax.
//
//   w_j = x_j / D       x_j = s q_i.k_j exp(-exp(decay_h) |i - j|)       D = max(1, |sum_k x_k|)
//   dx_j = (G_j - sign(sum_k x_k) r) / D where the sum is above 1 in size, else G_j       r = sum_k w_k G_k       G = dL/dw
//
// exp(decay_h) starts at -log(1 - 2^(-5-h)).
//
// Source  Y. Sun et al., Retentive Network: A Successor to Transformer for Large Language Models (2023), in its parallel form.
//         There the decay is fixed, rows of decays are scaled, queries and keys are rotated, and a norm and a gate follow.

#include "kit.hpp"

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
struct Fading : heed::StreamedRows<T> {
  using typename heed::StreamedRows<T>::P, typename heed::StreamedRows<T>::State;
  using PlaceFree = Fading;

  P weight(const State&, P x) const { return of_seen<T>(x, x); }
  P finish(const State& row) const { return T(1) / max(P(T(1)), heed::math::absolute(row.sum)); }
  P dscore(const State& row, P x, P, P pull, P r) const {
    const P shift = select(row.sum < P(T(-1)), -r, zero_where(row.sum <= P(T(1)), r));
    return of_seen<T>(x, (pull - shift) * finish(row));
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    S sum = heed::math::constant<S>(0);
    for (const S& s : row.scores[0]) sum += s;
    const S size = heed::math::maximum(heed::math::constant<S>(1), heed::math::absolute(sum));
    for (S& s : row.scores[0]) s = s / size;
    return row.scores[0];
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
