// SPDX-License-Identifier: Apache-2.0
#pragma once

// Squared ReLU attention: the squares of the positive scores, divided by the number of keys.
//
//   w_j = max(s_j, 0)^2 / n       n: keys that the row sees
//   ds_j = 2 max(s_j, 0) G_j / n       G = dL/dw
//
// Source  W. Hua et al., Transformer Quality in Linear Time (2022), whose gated unit has these weights in a single head.

#include "kit.hpp"

namespace zoo::squared_relu {

template <class T>
struct SquaredRelu : CountedRows<T> {
  using typename CountedRows<T>::P, typename CountedRows<T>::State;
  using PlaceFree = SquaredRelu;

  P weight(const State&, P score) const {
    const P positive = heed::math::maximum(P(T(0)), score);
    return positive * positive;
  }
  P dscore(const State& state, P score, P, P pull, P) const {
    return T(2) * heed::math::maximum(P(T(0)), score) * this->finish(state) * pull;
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S n = heed::math::constant<S>(double(row.scores[0].size())),
            zero = heed::math::constant<S>(0);
    for (S& s : row.scores[0]) s = heed::math::maximum(zero, s) * heed::math::maximum(zero, s) / n;
    return row.scores[0];
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
