// SPDX-License-Identifier: Apache-2.0
#pragma once

// Value residual: a token's value of the first layer is added to the output of later layers.
//
//   out_i = keep_h mixed_i + first_h e_i       e_i, the op's extra input: the first layer's value of token i
//
// Source  Z. Zhou et al., Value Residual Learning (2024), mix before the softmax weighs: V' = lambda1 V + lambda2 V_1, both
//         from 0.5. That is plain attention on values that the caller has mixed, and no op. Further inputs of an op belong
//         to its queries: here the residual is added to the head's mixed values, as in T. Nguyen et al., Mitigating
//         Over-smoothing in Transformers via Regularized Nonlocal Functionals (NeuTRENO, 2023), which adds e_i - v_i.
//         heed's models, whose layers know nothing of each other, project e from the layer's own input.

#include "kit.hpp"

#include <heed/plug/readout_formula.hpp>

namespace zoo::value_residual {

template <class T>
struct Residual : heed::FormulaReadout {
  static constexpr bool uses_extra = true;
  heed::Param<T> keep = T(1), first = T(0.5);
  static constexpr auto parameters =
      std::tuple{heed::named("keep", &Residual::keep), heed::named("first", &Residual::first)};
  using PlaceFree = Residual;
  static const char* extra_name() { return "first values"; }
  Index extra_dim(const heed::Geometry& g) const { return g.dim_v; }

  auto forward(const auto& row) const {
    return row.learnt(keep) * row.mixed() + row.learnt(first) * row.extra();
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
