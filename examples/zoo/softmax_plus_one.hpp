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
struct PlusOne : heed::Softmax<T> {
  using Base = heed::Softmax<T>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  using PlaceFree = PlusOne;

  // Starts as if it had seen a key of score 0 whose value is 0.
  State begin(const Queries&) const { return Base::begin_with(P(T(0))); }
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    return softmax_beside(heed::math::constant<S>(0), row);
  }
  template <class S>
  S reference_lse(const heed::LongHandRow<S>& row, std::size_t) const {
    return log_sum_exp_beside(heed::math::constant<S>(0), row);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, PlusOne<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:softmax-plus-one", "", g, {}, {.lse_of_scores = false}};
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
