// SPDX-License-Identifier: Apache-2.0
#pragma once

// ReLU attention: the positive scores, divided by the number of keys.
//
//   w_j = max(s_j, 0) / n       n: keys that the row sees
//   ds_j = G_j / n where s_j > 0, else 0       G = dL/dw
//
// Source  M. Wortsman et al., Replacing Softmax with ReLU in Vision Transformers (2023). Here n counts what the mask shows.

#include "kit.hpp"

namespace zoo::relu {

template <class T>
struct Relu : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Relu;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P share = share_of(block, v);
      for (Index j = 0; j < block.keys(); ++j)
        block.scores[0].store(j, v, max(P(T(0)), block.scores[0].load(j, v)) * share);
    }
  }
  void vjp(const heed::RowBlock<T>& block, Relu&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P share = share_of(block, v);
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = block.scores[0].load(j, v), g = block.dweights.load(j, v);
        block.weights.store(j, v, max(P(T(0)), s) * share);
        block.dscores[0].store(j, v, zero_where(s <= P(T(0)), g * share));
      }
    }
  }
  template <class S>
  std::vector<S> reference(std::vector<std::vector<S>> rows, Index, const S&) const {
    const S n = heed::math::constant<S>(double(rows[0].size())), zero = heed::math::constant<S>(0);
    for (S& s : rows[0]) s = heed::math::maximum(zero, s) / n;
    return rows[0];
  }

 private:
  static P share_of(const heed::RowBlock<T>& block, int v) {
    return inverse_or_zero(heed::count_visible(heed::column_of(block.scores[0], v), block.keys()));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Relu<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:relu", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers weights = logits(row);
  for (double& w : weights) w = std::max(0.0, w) / double(row.keys.size());
  return mixed(row, weights);
}

}  // namespace zoo::relu
