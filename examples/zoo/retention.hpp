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
struct Fading : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Fading;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P factor = T(1) / max(P(T(1)), heed::math::absolute(sum(block, v)));
      for (Index j = 0; j < block.keys(); ++j) block.scores[0].store(j, v, x(block, j, v) * factor);
    }
  }
  void vjp(const heed::RowBlock<T>& block, Fading&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P total = sum(block, v), size = heed::math::absolute(total), zero = T(0);
      const P factor = T(1) / max(P(T(1)), size);
      const P r = heed::sum_over_keys<T>(block.keys(), [&](Index j) {
        const P w = x(block, j, v) * factor;
        return zero_where(w == zero, w * block.dweights.load(j, v));
      });
      const P shift = zero_where(size <= P(T(1)), select(total < zero, -r, r));
      for (Index j = 0; j < block.keys(); ++j) {
        const P w = x(block, j, v) * factor, dx = (block.dweights.load(j, v) - shift) * factor;
        const auto hidden = heed::is_hidden(block.scores[0].load(j, v));
        block.weights.store(j, v, w);
        block.dscores[0].store(j, v, zero_where(hidden, dx));
      }
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    S sum = heed::math::constant<S>(0);
    for (const S& s : row.scores[0]) sum += s;
    const S size = heed::math::maximum(heed::math::constant<S>(1), heed::math::absolute(sum));
    for (S& s : row.scores[0]) s = s / size;
    return row.scores[0];
  }

 private:
  static P x(const heed::RowBlock<T>& block, Index j, int v) {
    const P s = block.scores[0].load(j, v);
    return zero_where(heed::is_hidden(s), s);
  }
  static P sum(const heed::RowBlock<T>& block, int v) {
    return heed::sum_over_keys<T>(block.keys(), [&](Index j) { return x(block, j, v); });
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
