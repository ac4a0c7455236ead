// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax with the exponential's second Taylor polynomial in place of the exponential; it is never below 1/2.
//
//   w_j = f(s_j) / sum_k f(s_k)       f(s) = 1 + s + s^2 / 2
//   ds_j = (1 + s_j) / sum_k f(s_k) (G_j - r)       r = sum_k w_k G_k       G = dL/dw
//
// Source  A. de Brebisson, P. Vincent, An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family (2015),
//         for the function; S. Arora et al., Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff
//         (2024), for its use in attention, where it is computed in linear time.

#include "kit.hpp"

namespace zoo::taylor {

template <class T>
struct Taylor : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Taylor;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P factor = factor_of(block, v);
      for (Index j = 0; j < block.keys(); ++j)
        block.scores[0].store(j, v, f(block.scores[0].load(j, v)) * factor);
    }
  }
  void vjp(const heed::RowBlock<T>& block, Taylor&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P factor = factor_of(block, v), zero = T(0);
      const P r = heed::sum_over_keys<T>(block.keys(), [&](Index j) {
        const P w = f(block.scores[0].load(j, v)) * factor;
        return zero_where(w == zero, w * block.dweights.load(j, v));
      });
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = block.scores[0].load(j, v), g = block.dweights.load(j, v);
        block.weights.store(j, v, f(s) * factor);
        block.dscores[0].store(j, v, zero_where(heed::is_hidden(s), (T(1) + s) * factor * (g - r)));
      }
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S one = heed::math::constant<S>(1), half = heed::math::constant<S>(0.5);
    S sum = heed::math::constant<S>(0);
    for (S& s : row.scores[0]) s = one + s + half * s * s, sum += s;
    for (S& s : row.scores[0]) s = s / sum;
    return row.scores[0];
  }

 private:
  static P f(P s) {
    return zero_where(heed::is_hidden(s), T(0.5) * ((T(1) + s) * (T(1) + s) + T(1)));
  }
  static P factor_of(const heed::RowBlock<T>& block, int v) {
    return inverse_or_zero(heed::sum_over_keys<T>(
        block.keys(), [&](Index j) { return f(block.scores[0].load(j, v)); }));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Taylor<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:taylor", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers weights = logits(row);
  for (double& s : weights) s = 1 + s + s * s / 2;
  const double sum = sum_of(weights);
  for (double& w : weights) w /= sum;
  return mixed(row, weights);
}

}  // namespace zoo::taylor
