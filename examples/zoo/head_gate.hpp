// SPDX-License-Identifier: Apache-2.0
#pragma once

// A gate for each head and token, from the layer's input: it decides how much of the head's output passes.
//
//   out = g mixed       g = sigmoid(x), x the op's extra input, one number per row
//
// Source  Z. Qiu et al., Gated Attention for Large Language Models (2025): the gate of a whole head behind its attention. In
//         heed's models x is projected from the layer's input with a bias.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>

namespace zoo::head_gate {

template <class T>
struct Gate : heed::FormulaReadout {
  using PlaceFree = Gate;
  static constexpr bool uses_extra = true, gates = true;
  [[nodiscard]] static const char* extra_name() { return "gate"; }
  [[nodiscard]] Index extra_dim(const heed::Geometry&) const { return 1; }
  auto forward(const auto& row) const { return heed::math::sigmoid(row.extra(0)) * row.mixed(); }
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
