// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnt factor for each head.
//
//   out = factor_h mixed
//
// Source  S. Shleifer, J. Weston, M. Ott, NormFormer: Improved Transformer Pretraining with Extra Normalization (2021), for
//         this part of it.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>

namespace zoo::head_scale {

template <class T>
struct HeadScale : heed::FormulaReadout {
  heed::Param<T> factor = T(1);
  static constexpr auto parameters = std::tuple{heed::named("factor", &HeadScale::factor)};
  using PlaceFree = HeadScale;
  auto forward(const auto& row) const { return row.learnt(factor) * row.mixed(); }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, HeadScale<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:head-scale", "", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers out = mixed(row, softmax(logits(row)));
  for (double& x : out) x *= op.readout.factor.head(row.head);
  return out;
}

}  // namespace zoo::head_scale
