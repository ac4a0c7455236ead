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
struct Taylor : heed::StreamedRows<T> {
  using typename heed::StreamedRows<T>::P, typename heed::StreamedRows<T>::State;
  using PlaceFree = Taylor;

  P weight(const State&, P s) const {
    return of_seen<T>(s, T(0.5) * ((T(1) + s) * (T(1) + s) + T(1)));
  }
  P finish(const State& state) const { return inverse_or_zero(state.sum); }
  P dscore(const State& state, P s, P, P pull, P r) const {
    return of_seen<T>(s, (T(1) + s) * finish(state) * (pull - r));
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S one = heed::math::constant<S>(1), half = heed::math::constant<S>(0.5);
    S sum = heed::math::constant<S>(0);
    for (S& s : row.scores[0]) s = one + s + half * s * s, sum += s;
    for (S& s : row.scores[0]) s = s / sum;
    return row.scores[0];
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
