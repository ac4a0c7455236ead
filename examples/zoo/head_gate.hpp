// SPDX-License-Identifier: Apache-2.0
#pragma once

// A gate for each head and token, from the layer's input: it decides how much of the head's output passes.
//
//   out = g mixed       g = sigmoid(x), x the op's extra input, one number per row
//   dmixed = g dout     dx = (1 - g) sum_c dout_c out_c
//
// Source  Z. Qiu et al., Gated Attention for Large Language Models (2025): the gate of a whole head behind its attention. In
//         heed's models x is projected from the layer's input with a bias.

#include "kit.hpp"

namespace zoo::head_gate {

template <class T>
struct Gate : heed::PlainReadout {
  using P = heed::Pack<T>;
  using PlaceFree = Gate;
  static constexpr bool uses_extra = true, gates = true;
  [[nodiscard]] static const char* extra_name() { return "gate"; }
  [[nodiscard]] Index extra_dim(const heed::Geometry&) const { return 1; }

  void forward(const heed::ReadoutPanel<T>& panel) const {
    for (int v = 0; v < panel.vectors; ++v) {
      const P gate = heed::math::sigmoid(panel.extra.load(0, v));
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, gate * panel.tile.load(c, v));
    }
  }
  void vjp(const heed::ReadoutPanel<T>& panel, Gate&) const {
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);  // saved: out
    for (int v = 0; v < panel.vectors; ++v) {
      const P x = panel.extra.load(0, v), gate = heed::math::sigmoid(x);
      const P delta = P::load(panel.delta + v * heed::kLanes<T>);
      panel.dextra.store(0, v, heed::math::sigmoid(P(-x)) * delta);
      for (Index c = 0; c < panel.tile.rows; ++c)
        panel.tile.store(c, v, gate * panel.tile.load(c, v));
    }
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    for_each_out(all, [&](Index, Index row, Index, S& out) {
      out = heed::math::sigmoid(all.extra[std::size_t(row)]) * out;
    });
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, Gate<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:head-gate", "", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers out = mixed(row, softmax(logits(row)));
  for (double& x : out) x /= 1 + std::exp(-row.extra[0]);
  return out;
}

}  // namespace zoo::head_gate
