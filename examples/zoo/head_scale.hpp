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

  void forward(const heed::ReadoutPanel<T>& panel) const { scale(panel); }
  void vjp(const heed::ReadoutPanel<T>& panel, HeadScale& grad) const {
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
    grad.factor.head(panel.head) += T(heed::sum_valid_lanes(panel.delta, panel.valid_lanes));
    scale(panel);
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    const heed::Geometry& g = all.geometry;
    for (Index n = 0; n < Index(all.out.size()); ++n)
      all.out[std::size_t(n)] =
          factor.head(n / (g.len_q * g.dim_v) % g.heads) * all.out[std::size_t(n)];
  }

 private:
  void scale(const heed::ReadoutPanel<T>& panel) const {
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v)
        panel.tile.store(c, v, panel.tile.load(c, v) * factor.head(panel.head));
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
