// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax with a one in its denominator: a head may attend to nothing.
//
//   w_j = exp(s_j) / (1 + sum_k exp(s_k))     ds_j = w_j (G_j - r)     r = sum_k w_k G_k     G = dL/dw
//
// Source  E. Miller, Attention Is Off By One (2023).

#include "kit.hpp"

namespace zoo::softmax_plus_one {

template <class T>
struct PlusOne : heed::PlainRows {
  using PlaceFree = PlusOne;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) weigh(block, v, block.scores[0]);
  }
  void vjp(const heed::RowBlock<T>& block, PlusOne&) const {
    for (int v = 0; v < block.vectors; ++v) {
      weigh(block, v, block.dscores[0]);
      (void)heed::softmax_row_vjp(block, v);
    }
  }
  template <class S>
  std::vector<S> reference(std::vector<std::vector<S>> rows, Index, const S&) const {
    rows[0].push_back(heed::math::constant<S>(0));
    std::vector<S> weights = heed::long_hand_softmax(rows[0]);
    weights.pop_back();
    return weights;
  }

 private:
  static void weigh(const heed::RowBlock<T>& block, int v, const heed::LaneTile<T>& weights) {
    using P = heed::Pack<T>;
    const auto [top, sum] = heed::exponentiate_row(block, v, weights);
    heed::scale_row(weights, v, P(T(1) / (sum + heed::math::exp(P(-top)))));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, PlusOne<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:softmax-plus-one", "", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers weights = logits(row);
  for (double& s : weights) s = std::exp(s);
  const double sum = 1 + sum_of(weights);
  for (double& w : weights) w /= sum;
  return mixed(row, weights);
}

}  // namespace zoo::softmax_plus_one
