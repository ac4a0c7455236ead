// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sigmoid attention: each key gets its weight without regard to the others.
//
//   w_j = sigmoid(s_j + bias_h - log n)     n: keys that the row sees
//
// Source  J. Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention (2024): the bias is minus the
//         logarithm of the length. Here n counts what the mask shows, and a number per head is learnt on top.

#include "kit.hpp"

namespace zoo::sigmoid {

template <class T>
struct Sigmoid : heed::PlainRows {
  heed::Param<T> bias = T(0);
  static constexpr auto parameters = std::tuple{heed::named("bias", &Sigmoid::bias)};
  using PlaceFree = Sigmoid;

  auto forward(const auto& row) const {
    return heed::math::sigmoid(row.score() + (row.learnt(bias) - heed::math::log(row.visible())));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Sigmoid<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sigmoid", "bias - log n", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers weights = logits(row);
  const double n = double(weights.size());
  for (double& s : weights) s = 1 / (1 + n * std::exp(-s - op.normaliser.bias.head(row.head)));
  return mixed(row, weights);
}

}  // namespace zoo::sigmoid
