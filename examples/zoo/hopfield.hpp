// SPDX-License-Identifier: Apache-2.0
#pragma once

// One step of a modern Hopfield network: the stored patterns are the keys, and how sharply one is retrieved is learnt per
// head.
//
//   score_ij = beta_h q_i.k_j
//
// Source  H. Ramsauer et al., Hopfield Networks is All You Need (2020), equation 3 and its layer. There beta is a constant
//         and the step may be repeated; here beta is learnt and starts at 1, and there is one step.

#include "kit.hpp"

namespace zoo::hopfield {

template <class T>
struct Score {
  heed::Param<T> beta = T(1);
  static constexpr auto parameters =
      std::tuple{heed::named("beta", &Score::beta, heed::Range::positive)};
  using PlaceFree = Score;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.dot;
  }
};

template <class T>
using Op = heed::OwnAttention<Score, T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:hopfield", "one step, learnt beta", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  for (double& s : scores) s *= op.score.beta.head(row.head) / row.scale;
  return mixed(row, softmax(scores));
}

}  // namespace zoo::hopfield
