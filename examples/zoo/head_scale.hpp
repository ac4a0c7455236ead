// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnt factor for each head.
//
//   out = factor_h mixed       dmixed = factor_h dout       dfactor_h = sum over rows and columns of dout o mixed
//
// Source  S. Shleifer, J. Weston, M. Ott, NormFormer: Improved Transformer Pretraining with Extra Normalization (2021), for
//         this part of it.

#include "kit.hpp"

namespace zoo::head_scale {

template <class T>
struct HeadScale : heed::PlainReadout {
  using P = heed::Pack<T>;
  static constexpr bool saves_mixed = true;
  heed::Param<T> factor = T(1);
  static constexpr auto parameters = std::tuple{heed::named("factor", &HeadScale::factor)};
  using PlaceFree = HeadScale;

  void forward(const heed::ReadoutPanel<T>& panel) const {
    scale_rows(panel, factor.head(panel.head), panel.tile);
  }
  void vjp(const heed::ReadoutPanel<T>& panel, HeadScale& grad) const {
    add_dot(panel, panel.saved, grad.factor);
    scale_rows(panel, factor.head(panel.head), panel.tile);
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    for_each_out(all, [&](Index h, Index, Index, S& out) { out = factor.head(h) * out; });
  }
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
