// SPDX-License-Identifier: Apache-2.0
#pragma once

// Talking heads, in pairs: heads 2n and 2n + 1 mix their scores before the softmax and their weights behind it.
//
//   z_h = in_own_h s_h + in_other_h s_h'       h' the partner of h
//   w_h = out_own_h p_h + out_other_h p_h'     p = softmax(z)
//   dz_h = out_own_h p_h (G - r_h)       dz_h' = out_other_h p_h' (G - r_h')       r_h = sum_k p_hk G_k       G = dL/dw_h
//   ds_h = in_own_h dz_h + in_other_h' dz_h'       ds_h' = in_other_h dz_h + in_own_h' dz_h'
//   dout_own_h = r_h       dout_other_h = r_h'       din_own_h = dz_h.s_h and so on
//
// Source  N. Shazeer et al., Talking-Heads Attention (2020), where all heads mix with all. With two heads that is this.

#include "kit.hpp"

namespace zoo::talking_heads {

template <class T>
struct Talking : heed::PlainRows {
  using P = heed::Pack<T>;
  static constexpr int maps = 2;
  heed::Param<T> in_own = T(1), in_other = T(0), out_own = T(1), out_other = T(0);
  static constexpr auto parameters = std::tuple{
      heed::named("in_own", &Talking::in_own), heed::named("in_other", &Talking::in_other),
      heed::named("out_own", &Talking::out_own), heed::named("out_other", &Talking::out_other)};
  heed::Source source(const heed::Geometry& g, Index h, int map) const {
    return heed::whole_head(g, map == 0 ? h : h ^ 1);
  }
  void check(const heed::Geometry& g, const char* where) const {
    heed::require(g.heads % 2 == 0, where, ": heads is ", g.heads,
                  ", it must be even: heads talk in pairs");
  }
  [[nodiscard]] Index work_tiles(bool) const { return 2; }

  void forward(const heed::RowBlock<T>& block) const {
    const P own = out_own.head(block.head), other = out_other.head(block.head);
    for (int v = 0; v < block.vectors; ++v) {
      const auto p = softmax(block, v, 0), q = softmax(block, v, 1);
      for (Index j = 0; j < block.keys(); ++j)
        block.scores[0].store(j, v, own * p.load(j) + other * q.load(j));
    }
  }
  void vjp(const heed::RowBlock<T>& block, Talking& grad) const {
    const Index h = block.head, partner = h ^ 1;
    const P zero = T(0), own = out_own.head(h), other = out_other.head(h);
    for (int v = 0; v < block.vectors; ++v) {
      const auto p = softmax(block, v, 0), q = softmax(block, v, 1);
      const auto hidden = [&](Index j) { return heed::is_hidden(block.scores[0].load(j, v)); };
      const auto r = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P g = zero_where(hidden(j), block.dweights.load(j, v));
        return heed::PackPair<T>(p.load(j) * g, q.load(j) * g);
      });
      P sums[4] = {zero, zero, zero, zero};
      for (Index j = 0; j < block.keys(); ++j) {
        const P g = zero_where(hidden(j), block.dweights.load(j, v));
        const P dz = own * p.load(j) * (g - r.first), dy = other * q.load(j) * (g - r.second);
        const P a = zero_where(hidden(j), block.scores[0].load(j, v));
        const P b = zero_where(hidden(j), block.scores[1].load(j, v));
        block.weights.store(j, v, own * p.load(j) + other * q.load(j));
        block.dscores[0].store(j, v, dz * in_own.head(h) + dy * in_other.head(partner));
        block.dscores[1].store(j, v, dz * in_other.head(h) + dy * in_own.head(partner));
        sums[0] += dz * a, sums[1] += dz * b, sums[2] += dy * b, sums[3] += dy * a;
      }
      const auto add = [&](T& to, P sum) {
        to += T(heed::sum_valid_lanes(sum, v, block.valid_lanes));
      };
      add(grad.in_own.head(h), sums[0]);
      add(grad.in_other.head(h), sums[1]);
      add(grad.in_own.head(partner), sums[2]);
      add(grad.in_other.head(partner), sums[3]);
      add(grad.out_own.head(h), r.first);
      add(grad.out_other.head(h), r.second);
    }
  }
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    const auto mixed = [&](std::size_t map, Index head) {
      std::vector<S> z;
      for (std::size_t j = 0; j < row.scores[0].size(); ++j)
        z.push_back(in_own.head(head) * row.scores[map][j] +
                    in_other.head(head) * row.scores[1 - map][j]);
      return heed::long_hand_softmax(z);
    };
    std::vector<S> weights = mixed(0, row.head), other = mixed(1, row.head ^ 1);
    for (std::size_t j = 0; j < weights.size(); ++j)
      weights[j] = out_own.head(row.head) * weights[j] + out_other.head(row.head) * other[j];
    return weights;
  }

 private:
  // Of the head itself (map 0) or of its partner (map 1), in a work column.
  heed::TileColumn<T> softmax(const heed::RowBlock<T>& block, int v, std::size_t map) const {
    const Index head = block.head ^ Index(map);
    const auto z = heed::work_column(block, Index(map));
    P top = -heed::kInfinity<T>, sum = T(0);
    for (Index j = 0; j < block.keys(); ++j) {
      const P a = block.scores[map].load(j, v), b = block.scores[1 - map].load(j, v);
      const P x = select(heed::is_hidden(a), a, a * in_own.head(head) + b * in_other.head(head));
      z.store(j, x);
      top = max(top, x);
    }
    top = zero_where(heed::is_hidden(top), top);
    for (Index j = 0; j < block.keys(); ++j) {
      const P x = z.load(j), e = zero_where(heed::is_hidden(x), heed::math::exp(P(x - top)));
      z.store(j, e);
      sum += e;
    }
    for (Index j = 0; j < block.keys(); ++j) z.store(j, z.load(j) * inverse_or_zero(sum));
    (top + heed::math::log(sum)).store(block.lse[map] + v * heed::kLanes<T>);
    return z;
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Talking<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:talking-heads", "heads in pairs", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  const auto& n = op.normaliser;
  const auto weights_of = [&](std::ptrdiff_t h) {
    const Numbers own = logits(row.heads[h]), other = logits(row.heads[h ^ 1]);
    Numbers z;
    for (std::size_t j = 0; j < own.size(); ++j)
      z.push_back(n.in_own.head(h) * own[j] + n.in_other.head(h) * other[j]);
    return softmax(z);
  };
  Numbers weights = weights_of(row.head);
  const Numbers other = weights_of(row.head ^ 1);
  for (std::size_t j = 0; j < weights.size(); ++j)
    weights[j] = n.out_own.head(row.head) * weights[j] + n.out_other.head(row.head) * other[j];
  return mixed(row, weights);
}

}  // namespace zoo::talking_heads
