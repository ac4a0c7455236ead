// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shaped attention: beside its weights a query keeps its own value, and the mean of all values is taken away.
//
//   out_i = own_h v_i + sum_j (sharp_h p_j - centre_h / n) v_j       p = softmax(s), n: keys that the row sees
//   ds_j = sharp_h p_j (G_j - r)       r = sum_k p_k G_k       G = dL/d weight, X = dL/dout
//   dsharp_h = sum r      dcentre_h = -sum_j G_j / n      down_h = sum X o v_i      dv_i += own_h X_i
//
// With its starting values, all 1, and queries of 0 each token reads itself alone. Needs as many keys as queries.
//
// Source  L. Noci et al., The Shaped Transformer (2023); B. He, T. Hofmann, Simplifying Transformer Blocks (2023), for the
//         three learnt numbers per head.

#include "kit.hpp"

namespace zoo::shaped {

template <class T>
struct Centred : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> sharp = T(1), centre = T(1);
  static constexpr auto parameters =
      std::tuple{heed::named("sharp", &Centred::sharp), heed::named("centre", &Centred::centre)};
  [[nodiscard]] Index work_tiles(bool) const { return 1; }

  void forward(const heed::RowBlock<T>& block) const { weigh(block, block.scores[0], nullptr); }
  void vjp(const heed::RowBlock<T>& block, Centred& grad) const {
    weigh(block, block.weights, &grad);
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S share = centre.head(row.head) / heed::math::constant<S>(double(row.scores[0].size()));
    std::vector<S> weights = heed::long_hand_softmax(row.scores[0]);
    for (S& w : weights) w = sharp.head(row.head) * w - share;
    return weights;
  }

 private:
  void weigh(const heed::RowBlock<T>& block, const heed::LaneTile<T>& weights,
             Centred* grad) const {
    const heed::LaneTile<T> work = block.work.part(0, block.keys());
    const P b = sharp.head(block.head), c = centre.head(block.head);
    for (int v = 0; v < block.vectors; ++v) {
      const P n = heed::count_visible(heed::column_of(block.scores[0], v), block.keys());
      const P factor = inverse_or_zero(heed::exponentiate_row(block, v, work).sum),
              share = inverse_or_zero(n);
      const auto hidden = [&](Index j) { return heed::is_hidden(block.scores[0].load(j, v)); };
      heed::PackPair<T> sums(T(0));  // of p G and of G
      if (grad)
        sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
          const P g = zero_where(hidden(j), block.dweights.load(j, v));
          return heed::PackPair<T>(work.load(j, v) * factor * g, g);
        });
      for (Index j = 0; j < block.keys(); ++j) {
        const P p = work.load(j, v) * factor, w = zero_where(hidden(j), b * p - c * share);
        if (grad) {
          const P ds = zero_where(hidden(j), b * p * (block.dweights.load(j, v) - sums.first));
          block.dscores[0].store(j, v, ds);
        }
        weights.store(j, v, w);
      }
      if (!grad) continue;
      grad->sharp.head(block.head) += T(heed::sum_valid_lanes(sums.first, v, block.valid_lanes));
      grad->centre.head(block.head) -=
          T(heed::sum_valid_lanes(sums.second * share, v, block.valid_lanes));
    }
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
  return {"zoo:shaped", "own value, mean taken away", g, {}};
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
