// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cog attention: weights have the signs of their scores.
//
//   w_j = sign(s_j) p_j       p = softmax(|s|)
//
// Source  A. Lv et al., More Expressive Attention with Negative Weights (2024).

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::cog {

template <class T>
struct Signed : heed::PlainRows {
  using PlaceFree = Signed;

  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto p = row.softmax(heed::math::absolute(s));
    return heed::math::select(s < 0, -p, p);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Signed<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:cog", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  const Numbers scores = logits(row);
  Numbers weights = scores;
  for (double& s : weights) s = std::exp(std::abs(s));
  const double sum = sum_of(weights);
  for (std::size_t j = 0; j < weights.size(); ++j) weights[j] *= (scores[j] < 0 ? -1 : 1) / sum;
  return mixed(row, weights);
}

}  // namespace zoo::cog
