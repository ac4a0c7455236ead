// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softpick: a softmax that may leave weight over. Scores below 0 get none, but take from the others.
//
//   w_j = max(0, exp(s_j) - 1) / D       D = eps + sum_k |exp(s_k) - 1|
//
// All exponentials are computed relative to m = max(0, the largest score).
//
// Source  Z. Zuhri, E. Fuadi, A. Aji, Softpick: No Attention Sink, No Massive Activations with Rectified Softmax (2025).
//         There eps is added after the shift by m; here before it, so that no result depends on m.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::softpick {

template <class T>
struct Softpick : heed::PlainRows {
  using PlaceFree = Softpick;

  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto top = heed::math::maximum(row.largest(s), 0);
    const auto one = heed::math::exp(-top);
    const auto above = heed::math::exp(s - top) - one;
    return heed::math::maximum(above, 0) / (row.sum(heed::math::absolute(above)) + 1e-6 * one);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Softpick<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:softpick", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers weights = logits(row);
  double sum = 1e-6;
  for (double& s : weights) sum += std::abs(s = std::expm1(s));
  for (double& w : weights) w = std::max(0.0, w) / sum;
  return mixed(row, weights);
}

}  // namespace zoo::softpick
