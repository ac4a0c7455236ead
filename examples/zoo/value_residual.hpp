// SPDX-License-Identifier: Apache-2.0
#pragma once

// Value residual: a token's value of the first layer is added to the output of later layers.
//
//   out_i = keep_h mixed_i + first_h e_i       e_i, the op's extra input: the first layer's value of token i
//   dmixed = keep_h X       de = first_h X       dkeep_h = sum X o mixed       dfirst_h = sum X o e       X = dL/dout
//
// Source  Z. Zhou et al., Value Residual Learning (2024), mix before the softmax weighs: V' = lambda1 V + lambda2 V_1, both
//         from 0.5. That is plain attention on values that the caller has mixed, and no op. Further inputs of an op belong
//         to its queries: here the residual is added to the head's mixed values, as in T. Nguyen et al., Mitigating
//         Over-smoothing in Transformers via Regularized Nonlocal Functionals (NeuTRENO, 2023), which adds e_i - v_i.
//         heed's models, whose layers know nothing of each other, project e from the layer's own input.

#include "kit.hpp"

namespace zoo::value_residual {

template <class T>
struct Residual : heed::PlainReadout {
  static constexpr bool saves_mixed = true, uses_extra = true;
  heed::Param<T> keep = T(1), first = T(0.5);
  static constexpr auto parameters =
      std::tuple{heed::named("keep", &Residual::keep), heed::named("first", &Residual::first)};
  using PlaceFree = Residual;
  static const char* extra_name() { return "first values"; }
  Index extra_dim(const heed::Geometry& g) const { return g.dim_v; }

  void forward(const heed::ReadoutPanel<T>& panel) const {
    for_each_cell(panel, panel.tile, [&](Index c, int v) {
      return panel.tile.load(c, v) * keep.head(panel.head) +
             panel.extra.load(c, v) * first.head(panel.head);
    });
  }
  void vjp(const heed::ReadoutPanel<T>& panel, Residual& grad) const {
    add_dot(panel, panel.extra, grad.first);
    add_dot(panel, panel.saved, grad.keep);
    scale_rows(panel, first.head(panel.head), panel.dextra);
    scale_rows(panel, keep.head(panel.head), panel.tile);
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    for_each_out(all, [&](Index h, Index row, Index c, S& out) {
      out =
          keep.head(h) * out + first.head(h) * all.extra[std::size_t(row * all.geometry.dim_v + c)];
    });
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, Residual<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:value-residual", "behind the softmax", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers out = mixed(row, softmax(logits(row)));
  for (std::size_t c = 0; c < out.size(); ++c)
    out[c] =
        op.readout.keep.head(row.head) * out[c] + op.readout.first.head(row.head) * row.extra[c];
  return out;
}

}  // namespace zoo::value_residual
