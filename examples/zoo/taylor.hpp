// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax with the exponential's second Taylor polynomial in place of the exponential; it is never below 1/2.
//
//   w_j = f(s_j) / sum_k f(s_k)       f(s) = 1 + s + s^2 / 2 = ((1 + s)^2 + 1) / 2
//
// Source  A. de Brebisson, P. Vincent, An Exploration of Softmax Alternatives Belonging to the Spherical Loss Family (2015),
//         for the function; S. Arora et al., Simple Linear Attention Language Models Balance the Recall-Throughput Tradeoff
//         (2024), for its use in attention, where it is computed in linear time.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::taylor {

template <class T>
struct Taylor : heed::PlainRows {
  using PlaceFree = Taylor;

  auto forward(const auto& row) const {
    const auto t = 1 + row.score();
    const auto f = 0.5 * (t * t + 1);
    return f * (1 / row.sum(f));
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
