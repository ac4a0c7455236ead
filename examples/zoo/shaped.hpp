// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shaped attention: beside its weights a query keeps its own value, and the mean of all values is subtracted.
//
//   out_i = own_h v_i + sum_j (sharp_h p_j - centre_h / n) v_j       p = softmax(s), n: keys that the row sees
//
// With its starting values, all 1, and queries of 0 each token reads itself alone.
//
// Source  L. Noci et al., The Shaped Transformer (2023); B. He, T. Hofmann, Simplifying Transformer Blocks (2023), for the
//         three learnt numbers per head.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>
#include <heed/plug/row_formula.hpp>

namespace zoo::shaped {

template <class T>
struct Centred : heed::PlainRows {
  heed::Param<T> sharp = T(1), centre = T(1);
  static constexpr auto parameters =
      std::tuple{heed::named("sharp", &Centred::sharp), heed::named("centre", &Centred::centre)};

  auto forward(const auto& row) const {
    return row.learnt(sharp) * row.softmax(row.score()) - row.learnt(centre) / row.visible();
  }
};

template <class T>
struct OwnValue : heed::FormulaReadout {
  static constexpr bool uses_own_rows = true;
  heed::Param<T> own = T(1);
  static constexpr auto parameters = std::tuple{heed::named("own", &OwnValue::own)};
  auto forward(const auto& row) const { return row.mixed() + row.learnt(own) * row.own_value(); }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Centred<T>, OwnValue<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:shaped", "own value, mean taken away", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers weights = softmax(logits(row));
  for (double& w : weights)
    w = op.normaliser.sharp.head(row.head) * w -
        op.normaliser.centre.head(row.head) / double(row.keys.size());
  Numbers out = mixed(row, weights);
  for (std::size_t c = 0; c < out.size(); ++c)
    out[c] += op.readout.own.head(row.head) * row.own_value[c];
  return out;
}

}  // namespace zoo::shaped
