// SPDX-License-Identifier: Apache-2.0
#pragma once

// Squared ReLU attention: the squares of the positive scores, divided by the number of keys.
//
//   w_j = max(s_j, 0)^2 / n       n: keys that the row sees
//   ds_j = 2 max(s_j, 0) G_j / n       G = dL/dw
//
// Source  W. Hua et al., Transformer Quality in Linear Time (2022), whose gated unit has these weights over a single head.

#include "kit.hpp"

namespace zoo::squared_relu {

template <class T>
struct SquaredRelu : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = SquaredRelu;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P share = share_of(block, v);
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = max(P(T(0)), block.scores[0].load(j, v));
        block.scores[0].store(j, v, s * s * share);
      }
    }
  }
  void vjp(const heed::RowBlock<T>& block, SquaredRelu&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P share = share_of(block, v);
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = max(P(T(0)), block.scores[0].load(j, v)), g = block.dweights.load(j, v);
        block.weights.store(j, v, s * s * share);
        block.dscores[0].store(j, v, zero_where(s == P(T(0)), T(2) * s * share * g));
      }
    }
  }
  template <class S>
  std::vector<S> reference(std::vector<std::vector<S>> rows, Index, const S&) const {
    const S n = heed::math::constant<S>(double(rows[0].size())), zero = heed::math::constant<S>(0);
    for (S& s : rows[0]) s = heed::math::maximum(zero, s) * heed::math::maximum(zero, s) / n;
    return rows[0];
  }

 private:
  static P share_of(const heed::RowBlock<T>& block, int v) {
    return inverse_or_zero(heed::count_visible(heed::column_of(block.scores[0], v), block.keys()));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, SquaredRelu<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:squared-relu", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers weights = logits(row);
  for (double& w : weights) w = w > 0 ? w * w / double(row.keys.size()) : 0;
  return mixed(row, weights);
}

}  // namespace zoo::squared_relu
