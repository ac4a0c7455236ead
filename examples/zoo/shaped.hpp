// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shaped attention: beside its weights a query keeps its own value, and the mean of all values is taken away.
//
//   out_i = own_h v_i + sum_j (sharp_h p_j - centre_h / n) v_j       p = softmax(s), n: keys that the row sees
//   down_h = sum X o v_i      dv_i += own_h X_i       X = dL/dout
//
// With its starting values, all 1, and queries of 0 each token reads itself alone. Needs as many keys as queries.
//
// Source  L. Noci et al., The Shaped Transformer (2023); B. He, T. Hofmann, Simplifying Transformer Blocks (2023), for the
//         three learnt numbers per head.

#include "kit.hpp"

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
struct OwnValue : heed::PlainReadout {
  static constexpr bool saves_mixed = true, uses_own_rows = true;
  heed::Param<T> own = T(1);
  static constexpr auto parameters = std::tuple{heed::named("own", &OwnValue::own)};

  void forward(const heed::ReadoutPanel<T>& panel) const {
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v)
        panel.tile.add(c, v, panel.own_value.load(c, v) * own.head(panel.head));
  }
  void vjp(const heed::ReadoutPanel<T>& panel, OwnValue& grad) const {
    heed::lane_dot<T>(panel.tile, panel.own_value, panel.vectors, panel.delta);
    grad.own.head(panel.head) += T(heed::sum_valid_lanes(panel.delta, panel.valid_lanes));
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v)
        panel.down_value.add(c, v, panel.tile.load(c, v) * own.head(panel.head));
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    const heed::Geometry& g = all.geometry;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i)
          for (Index c = 0; c < g.dim_v; ++c) {
            S& out = all.out_row(b, h, i)[c];
            out = out + own.head(h) * all.value_row(b, g.kv_head(h), i)[c];
          }
  }
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
