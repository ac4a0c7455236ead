// SPDX-License-Identifier: Apache-2.0
#pragma once

// Clipped softmax: stretched below 0 and cut there, so that a head can give a key no weight at all.
//
//   w_j = max(0, (1 + reach_h) p_j - reach_h)       p = softmax(s)
//   H_j = (1 + reach_h) G_j where w_j > 0, else 0       G = dL/dw
//   ds_j = p_j (H_j - sum_k p_k H_k)       dreach_h = sum over w_j > 0 of (p_j - 1) G_j
//
// Source  Y. Bondarenko, M. Nagel, T. Blankevoort, Quantizable Transformers: Removing Outliers by Helping Attention Heads Do
//         Nothing (2023). There the reach is a constant and the top may be stretched, too; here it is learnt per head.

#include "kit.hpp"

namespace zoo::clipped_softmax {

template <class T>
struct Clipped : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> reach = T(0.03);
  static constexpr auto parameters =
      std::tuple{heed::named("reach", &Clipped::reach, heed::Range::not_negative)};
  using PlaceFree = Clipped;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      const Shares<T> p = softmax_of(block, v);
      weigh_keys(block, v, [&](P s) { return weight(block, p.of(s)); });
    }
  }
  void vjp(const heed::RowBlock<T>& block, Clipped& grad) const {
    const P zero = T(0), stretch = T(1) + reach.head(block.head);
    for (int v = 0; v < block.vectors; ++v) {
      const Shares<T> p = softmax_of(block, v);
      const auto kept = [&](P s, P g) { return zero_where(weight(block, p.of(s)) == zero, g); };
      const auto sums = sum_over_pulls(
          block, v, [&](P s, P g) { return heed::PackPair<T>(p.of(s) * kept(s, g), kept(s, g)); });
      pull_keys(block, v, [&](P s, P g) {
        return heed::PackPair<T>(weight(block, p.of(s)),
                                 p.of(s) * stretch * (kept(s, g) - sums.first));
      });
      grad.reach.head(block.head) +=
          T(heed::sum_valid_lanes(sums.first - sums.second, v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    std::vector<S> weights = heed::long_hand_softmax(row.scores[0]);
    const S zero = heed::math::constant<S>(0), r = reach.head(row.head);
    for (S& w : weights) w = heed::math::maximum(zero, S(w + r * w - r));
    return weights;
  }

 private:
  P weight(const heed::RowBlock<T>& block, P p) const {
    const P r = reach.head(block.head);
    return max(P(T(0)), p + r * p - r);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Clipped<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:clipped-softmax", "learnt reach", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const double reach = op.normaliser.reach.head(row.head);
  Numbers weights = softmax(logits(row));
  for (double& w : weights) w = std::max(0.0, (1 + reach) * w - reach);
  return mixed(row, weights);
}

}  // namespace zoo::clipped_softmax
