// SPDX-License-Identifier: Apache-2.0
#pragma once

// Clipped softmax: stretched below 0 and cut there, so that a head can give a key no weight at all.
//
//   w_j = max(0, (1 + reach_h) p_j - reach_h)       p = softmax(s)
//
// Source  Y. Bondarenko, M. Nagel, T. Blankevoort, Quantizable Transformers: Removing Outliers by Helping Attention Heads Do
//         Nothing (2023). There the reach is a constant and the top may be stretched, too; here it is learnt per head.

#include "kit.hpp"

#include <heed/plug/row_formula.hpp>

namespace zoo::clipped_softmax {

template <class T>
struct Clipped : heed::PlainRows {
  heed::Param<T> reach = T(0.03);
  static constexpr auto parameters =
      std::tuple{heed::named("reach", &Clipped::reach, heed::Range::not_negative)};
  using PlaceFree = Clipped;

  auto forward(const auto& row) const {
    const auto r = row.learnt(reach);
    return heed::math::maximum((1 + r) * row.softmax(row.score()) - r, 0);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Clipped<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:clipped-softmax", "learnt reach", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const double reach = op.normaliser.reach.head(row.head);
  Numbers weights = softmax(logits(row));
  for (double& w : weights) w = std::max(0.0, (1 + reach) * w - reach);
  return mixed(row, weights);
}

}  // namespace zoo::clipped_softmax
