// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cog attention: weights have the signs of their scores.
//
//   w_j = sign(s_j) p_j       p = softmax(|s|)
//   ds_j = w_j (sign(s_j) G_j - r)       r = sum_k w_k G_k       G = dL/dw
//
// Source  A. Lv et al., More Expressive Attention with Negative Weights (2024).

#include "kit.hpp"

namespace zoo::cog {

template <class T>
struct Signed : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Signed;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) weigh_keys(block, v, weight_of(block, v));
  }
  void vjp(const heed::RowBlock<T>& block, Signed&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const auto weight = weight_of(block, v);
      const P r = sum_over_pulls(block, v, [&](P s, P g) { return weight(s) * g; });
      pull_keys(block, v, [&](P s, P g) {
        return heed::PackPair<T>(weight(s), weight(s) * (with_sign(s, g) - r));
      });
    }
  }
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    std::vector<S> sizes;
    for (const S& s : row.scores[0]) sizes.push_back(heed::math::absolute(s));
    std::vector<S> weights = heed::long_hand_softmax(sizes);
    for (std::size_t j = 0; j < weights.size(); ++j)
      if (heed::math::value_of(row.scores[0][j]) < 0) weights[j] = -weights[j];
    return weights;
  }

 private:
  static P with_sign(P s, P x) { return select(s < P(T(0)), -x, x); }
  // The function from a score of row v to its weight.
  static auto weight_of(const heed::RowBlock<T>& block, int v) {
    report_no_lse(block, v);
    const auto p = shares_of(block, v, [](P s) { return heed::math::absolute(s); });
    return [p](P s) { return with_sign(s, p.of(heed::math::absolute(s))); };
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
