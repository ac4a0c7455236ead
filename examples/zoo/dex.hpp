// SPDX-License-Identifier: Apache-2.0
#pragma once

// DEX, which gives plain attention what differential attention has: a learnt linear map of the output is taken away from it.
//
//   out = m - lambda_h m W_h       m mixed values, W_h (dim_v, dim_v)
//   dm = g - lambda_h g W_h^T      dW_h = -lambda_h m^T g       dlambda_h = -sum g o (m W_h)       g = dout
//
// Source  C. Kong et al., Understanding Differential Transformer Unchains Pretrained Self-Attentions (2025). There lambda
//         grows along a schedule and only some heads have a map; here lambda is learnt in every head.

#include "kit.hpp"

namespace zoo::dex {

template <class T>
struct Dex : heed::PlainReadout {
  static constexpr bool saves_mixed = true;
  heed::Param<T> lambda = T(0.1), weight;
  std::vector<Index> shape(const heed::Geometry& g) const { return {g.heads, g.dim_v, g.dim_v}; }
  static constexpr auto parameters = std::tuple{heed::named("lambda", &Dex::lambda),
                                                heed::tensor("weight", &Dex::weight, &Dex::shape)};
  [[nodiscard]] Index work_rows(const heed::Geometry& g, bool backward) const {
    return g.dim_v + (backward ? heed::whole_vectors<T>(g.dim_v) : 0);
  }

  void forward(const heed::ReadoutPanel<T>& panel) const {
    const heed::LaneTile<T> moved = mapped(panel, panel.tile.constant());
    add_scaled(panel, -lambda.head(panel.head), moved.constant(), panel.tile);
  }
  void vjp(const heed::ReadoutPanel<T>& panel, Dex& grad) const {
    const Index d = panel.tile.rows, stride = heed::whole_vectors<T>(d);
    const heed::LaneTile<T> work = mapped(panel, panel.saved);
    heed::lane_dot<T>(panel.tile, work, panel.vectors, panel.delta);
    grad.lambda.head(panel.head) -= T(heed::sum_valid_lanes(panel.delta, panel.valid_lanes));
    scale_rows(panel, -lambda.head(panel.head), work);
    T* rows = panel.work.row(d);
    std::fill(rows, rows + panel.valid_lanes * stride, T(0));
    heed::unpack_lanes(work.data, work.lanes, panel.valid_lanes, d, rows, stride);
    map(panel).vjp(panel.saved, {work, rows, stride, panel.vectors, panel.valid_lanes}, panel.tile,
                   grad.weight);
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    const Index d = all.geometry.dim_v;
    const std::vector<S> m = all.out;
    for_each_out(all, [&](Index h, Index row, Index c, S& out) {
      for (Index r = 0; r < d; ++r)
        out = out - lambda.head(h) * m[std::size_t(row * d + r)] * weight[(h * d + r) * d + c];
    });
  }

 private:
  heed::detail::LaneProjection<T> map(const heed::ReadoutPanel<T>& panel) const {
    return {weight, panel.head};
  }
  // m W
  heed::LaneTile<T> mapped(const heed::ReadoutPanel<T>& panel,
                           const heed::LaneTile<const T>& m) const {
    const heed::LaneTile<T> to = panel.work.part(0, panel.tile.rows);
    map(panel).template apply<heed::Store::overwrite>(m, panel.vectors, to);
    return to;
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
