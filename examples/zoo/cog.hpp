// SPDX-License-Identifier: Apache-2.0
#pragma once

// Cog attention: weights have the signs of their scores.
//
//   w_j = sign(s_j) p_j       p = softmax(|s|)
//   ds_j = p_j (G_j - sign(s_j) r)       r = sum_k w_k G_k       G = dL/dw
//
// Source  A. Lv et al., More Expressive Attention with Negative Weights (2024).

#include "kit.hpp"

namespace zoo::cog {

template <class T>
struct Signed : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Signed;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      const auto [top, factor] = row_of(block, v);
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = block.scores[0].load(j, v);
        block.scores[0].store(j, v, with_sign(s, share(s, top) * factor));
      }
    }
  }
  void vjp(const heed::RowBlock<T>& block, Signed&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const auto [top, factor] = row_of(block, v);
      const P r = heed::sum_over_keys<T>(block.keys(), [&, top = top, factor = factor](Index j) {
        const P s = block.scores[0].load(j, v), w = with_sign(s, share(s, top) * factor);
        return zero_where(heed::is_hidden(s), w * block.dweights.load(j, v));
      });
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = block.scores[0].load(j, v), p = share(s, top) * factor;
        const P ds = p * (block.dweights.load(j, v) - with_sign(s, r));
        block.weights.store(j, v, with_sign(s, p));
        block.dscores[0].store(j, v, zero_where(heed::is_hidden(s), ds));
      }
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
  struct Row {
    P top, factor;
  };
  static P with_sign(P s, P x) { return select(s < P(T(0)), -x, x); }
  static P share(P s, P top) {
    return zero_where(heed::is_hidden(s), heed::math::exp(P(heed::math::absolute(s) - top)));
  }
  // The largest size of a score, and 1 / sum of the exponentials about it.
  static Row row_of(const heed::RowBlock<T>& block, int v) {
    report_no_lse(block, v);
    P top = T(0);
    for (Index j = 0; j < block.keys(); ++j) {
      const P s = block.scores[0].load(j, v);
      top = max(top, zero_where(heed::is_hidden(s), heed::math::absolute(s)));
    }
    return {top, inverse_or_zero(heed::sum_over_keys<T>(block.keys(), [&](Index j) {
              return share(block.scores[0].load(j, v), top);
            }))};
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
