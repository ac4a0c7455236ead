// SPDX-License-Identifier: Apache-2.0
#pragma once

// DEX brings the subtraction of differential attention to plain attention: a learnt linear map of
// the output is subtracted from it.
//
//   out = m - lambda_h m W_h       m mixed values, W_h (dim_v, dim_v)
//   dm = g - lambda_h g W_h^T      dW_h = -lambda_h m^T g       dlambda_h = -sum g o (m W_h)       g = dout
//
// Source  C. Kong et al., Understanding Differential Transformer Unchains Pretrained Self-Attentions (2025). There lambda
//         grows along a schedule and only some heads have a map; here lambda is learnt in every head.

#include "kit.hpp"

#include <heed/plug/linear_map.hpp>

namespace zoo::dex {

template <class T>
struct Dex : heed::PlainReadout {
  static constexpr bool saves_mixed = true;
  heed::Param<T> lambda = T(0.1), weight;
  std::vector<Index> shape(const heed::Geometry& g) const { return {g.heads, g.dim_v, g.dim_v}; }
  static constexpr auto parameters = std::tuple{heed::named("lambda", &Dex::lambda),
                                                heed::tensor("weight", &Dex::weight, &Dex::shape)};
  Index work_rows(const heed::Geometry& g, bool backward) const {
    return heed::LinearMap<T>::work_rows(g.dim_v, backward);
  }

  void forward(const heed::ReadoutPanel<T>& panel) const {
    const heed::LinearMap<T> map(weight, panel);
    add_scaled(panel, -lambda.head(panel.head), map.product(panel.tile), panel.tile);
  }
  void vjp(const heed::ReadoutPanel<T>& panel, Dex& grad) const {
    const heed::LinearMap<T> map(weight, panel);
    const heed::LaneTile<T> work = map.product(panel.saved);
    add_dot(panel, work, grad.lambda, -1);
    scale_rows(panel, -lambda.head(panel.head), work);
    map.vjp(panel.saved, work, panel.tile, grad.weight);
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    const std::vector<S> m = all.out;
    for_each_out(all, [&](Index h, Index row, Index c, S& out) {
      const S* of_row = m.data() + row * all.geometry.dim_v;
      out = out - lambda.head(h) * heed::map_column(of_row, weight, h, c);
    });
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, heed::Softmax<T>, Dex<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  Op<T> op;
  op.readout.weight = heed::Param<T>(std::vector<Index>{g.heads, g.dim_v, g.dim_v});
  return {"zoo:dex", "linear map per head", g, op};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const Numbers m = mixed(row, softmax(logits(row)));
  const auto d = std::ptrdiff_t(m.size());
  Numbers out = m;
  for (std::ptrdiff_t c = 0; c < d; ++c)
    for (std::ptrdiff_t r = 0; r < d; ++r)
      out[std::size_t(c)] -= op.readout.lambda.head(row.head) * m[std::size_t(r)] *
                             op.readout.weight[(row.head * d + r) * d + c];
  return out;
}

}  // namespace zoo::dex
