// SPDX-License-Identifier: Apache-2.0
#pragma once

// ReLU attention: the positive scores, divided by the number of keys.
//
//   w_j = max(s_j, 0) / n       n: keys that the row sees
//   ds_j = G_j / n where s_j > 0, else 0       G = dL/dw
//
// Source  M. Wortsman et al., Replacing Softmax with ReLU in Vision Transformers (2023). Here n counts the visible keys.

#include "kit.hpp"

namespace zoo::relu {

template <class T>
struct Relu : CountedRows<T> {
  using typename CountedRows<T>::P, typename CountedRows<T>::State;
  using PlaceFree = Relu;

  P weight(const State&, P score) const { return heed::math::maximum(P(T(0)), score); }
  P dscore(const State& state, P score, P, P pull, P) const {
    return select(score > P(T(0)), this->finish(state) * pull, P(T(0)));
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S n = heed::math::constant<S>(double(row.scores[0].size())),
            zero = heed::math::constant<S>(0);
    for (S& s : row.scores[0]) s = heed::math::maximum(zero, s) / n;
    return row.scores[0];
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
