// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sigmoid attention: each key gets its weight without regard to the others.
//
//   w_j = sigmoid(x_j)     x_j = s_j + bias_h - log n     n: keys that the row sees
//   ds_j = w_j (1 - w_j) G_j       dbias = sum_j ds_j     G = dL/dw
//
// Source  J. Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention (2024): the bias is minus the
//         logarithm of the length. Here n counts what the mask shows, and a number per head is learnt on top.

#include "kit.hpp"

namespace zoo::sigmoid {

template <class T>
struct Sigmoid : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> bias = T(0);
  static constexpr auto parameters = std::tuple{heed::named("bias", &Sigmoid::bias)};
  using PlaceFree = Sigmoid;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P shift = shift_of(block, v);
      for (Index j = 0; j < block.keys(); ++j)
        block.scores[0].store(j, v, weight(block.scores[0].load(j, v), shift));
    }
  }
  void vjp(const heed::RowBlock<T>& block, Sigmoid& grad) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P shift = shift_of(block, v);
      const P sum = heed::sum_over_keys<T>(block.keys(), [&](Index j) {
        const P s = block.scores[0].load(j, v), w = weight(s, shift), rest = weight(-s, -shift);
        const P ds = zero_where(heed::is_hidden(s), w * rest * block.dweights.load(j, v));
        block.weights.store(j, v, w);
        block.dscores[0].store(j, v, ds);
        return ds;
      });
      grad.bias.head(block.head) += T(heed::sum_valid_lanes(sum, v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S shift =
        bias.head(row.head) - heed::math::constant<S>(std::log(double(row.scores[0].size())));
    for (S& s : row.scores[0]) s = heed::math::sigmoid(S(s + shift));
    return row.scores[0];
  }

 private:
  P shift_of(const heed::RowBlock<T>& block, int v) const {
    const P n = heed::count_visible(heed::column_of(block.scores[0], v), block.keys());
    return P(bias.head(block.head)) - heed::math::log(n);
  }
  static P weight(P s, P shift) {
    return zero_where(heed::is_hidden(s), heed::math::sigmoid(P(s + shift)));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Sigmoid<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sigmoid", "bias - log n", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers weights = logits(row);
  const double n = double(weights.size());
  for (double& s : weights) s = 1 / (1 + n * std::exp(-s - op.normaliser.bias.head(row.head)));
  return mixed(row, weights);
}

}  // namespace zoo::sigmoid
