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

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      const Shares<T> p = softmax_of(block, v);
      const P share = share_of(block, v);
      weigh_keys(block, v, [&](P s) { return weight(block, p.of(s), share); });
    }
  }
  void vjp(const heed::RowBlock<T>& block, Centred& grad) const {
    const Index h = block.head;
    for (int v = 0; v < block.vectors; ++v) {
      const Shares<T> p = softmax_of(block, v);
      const P share = share_of(block, v), b = sharp.head(h);
      const auto [r, all] =
          sum_over_pulls(block, v, [&](P s, P g) { return heed::PackPair<T>(p.of(s) * g, g); });
      pull_keys(block, v, [&, r = r](P s, P g) {
        return heed::PackPair<T>(weight(block, p.of(s), share), b * p.of(s) * (g - r));
      });
      grad.sharp.head(h) += T(heed::sum_valid_lanes(r, v, block.valid_lanes));
      grad.centre.head(h) -= T(heed::sum_valid_lanes(all * share, v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S share = centre.head(row.head) / heed::math::constant<S>(double(row.scores[0].size()));
    std::vector<S> weights = heed::long_hand_softmax(row.scores[0]);
    for (S& w : weights) w = sharp.head(row.head) * w - share;
    return weights;
  }

 private:
  // 1 / n
  static P share_of(const heed::RowBlock<T>& block, int v) {
    return inverse_or_zero(sum_over_scores(block, v, [](P) { return P(T(1)); }));
  }
  P weight(const heed::RowBlock<T>& block, P p, P share) const {
    return sharp.head(block.head) * p - centre.head(block.head) * share;
  }
};

template <class T>
struct OwnValue : heed::PlainReadout {
  static constexpr bool saves_mixed = true, uses_own_rows = true;
  heed::Param<T> own = T(1);
  static constexpr auto parameters = std::tuple{heed::named("own", &OwnValue::own)};

  void forward(const heed::ReadoutPanel<T>& panel) const {
    for_each_cell(panel, panel.tile, [&](Index c, int v) {
      return panel.tile.load(c, v) + panel.own_value.load(c, v) * own.head(panel.head);
    });
  }
  void vjp(const heed::ReadoutPanel<T>& panel, OwnValue& grad) const {
    add_dot(panel, panel.own_value, grad.own);
    for (Index c = 0; c < panel.tile.rows; ++c)
      for (int v = 0; v < panel.vectors; ++v)
        panel.down_value.add(c, v, panel.tile.load(c, v) * own.head(panel.head));
    heed::lane_dot<T>(panel.tile, panel.saved, panel.vectors, panel.delta);
  }
  template <class S>
  void reference(heed::ReadoutContext<S>& all) const {
    const heed::Geometry& g = all.geometry;
    for_each_out(all, [&](Index h, Index row, Index c, S& out) {
      const Index b = row / (g.heads * g.len_q), i = row % g.len_q;
      out = out + own.head(h) * all.value_row(b, g.kv_head(h), i)[c];
    });
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
