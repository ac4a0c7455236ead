// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scalable softmax: scores grow with the logarithm of the number of keys, so that a long row stays as sharp as a short one.
//
//   w = softmax(c s)       c = strength_h log n, n: keys that the row sees
//   dz_j = w_j (G_j - r)       r = sum_k w_k G_k       G = dL/dw
//   ds_j = c dz_j              dstrength = log n sum_j s_j dz_j
//
// Source  K. Nakanishi, Scalable-Softmax Is Superior for Attention (2025). Here n counts what the mask shows.

#include "kit.hpp"

namespace zoo::ssmax {

template <class T>
struct Ssmax : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> strength =
      T(0.43);  // about 1 / log 10: a row of ten keys is as sharp as under a softmax
  static constexpr auto parameters =
      std::tuple{heed::named("strength", &Ssmax::strength, heed::Range::positive)};
  using PlaceFree = Ssmax;
  [[nodiscard]] Index work_tiles(bool) const { return 1; }

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) weigh(block, v, block.scores[0]);
  }
  void vjp(const heed::RowBlock<T>& block, Ssmax& grad) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P log_n = weigh(block, v, block.dscores[0]);
      (void)heed::softmax_row_vjp(block, v);
      const auto scores = heed::work_column(block, 0);
      const P sum = heed::sum_over_keys<T>(block.keys(), [&](Index j) {
        const P dz = block.dscores[0].load(j, v);
        return zero_where(dz == P(T(0)), dz * scores.load(j));
      });
      heed::scale_row(block.dscores[0], v, P(log_n * strength.head(block.head)));
      grad.strength.head(block.head) +=
          T(heed::sum_valid_lanes(zero_where(sum == P(T(0)), sum * log_n), v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(std::vector<std::vector<S>> rows, Index h, const S&) const {
    const S c = strength.head(h) * heed::math::constant<S>(std::log(double(rows[0].size())));
    for (S& s : rows[0]) s = c * s;
    return heed::long_hand_softmax(rows[0]);
  }

 private:
  // Weights of vector v; the scores go to the work column. Returns log n.
  P weigh(const heed::RowBlock<T>& block, int v, const heed::LaneTile<T>& weights) const {
    const auto scores = heed::work_column(block, 0);
    const P log_n =
        heed::math::log(heed::count_visible(heed::column_of(block.scores[0], v), block.keys()));
    const P c = log_n * strength.head(block.head), top = heed::row_top(block, 0, v);
    P sum = T(0);
    for (Index j = 0; j < block.keys(); ++j) {
      const P s = block.scores[0].load(j, v);
      const P e = zero_where(heed::is_hidden(s), heed::math::exp(P((s - top) * c)));
      scores.store(j, s);
      weights.store(j, v, e);
      sum += e;
    }
    heed::scale_row(weights, v, inverse_or_zero(sum));
    select(sum == P(T(0)), P(-heed::kInfinity<T>), top * c + heed::math::log(sum))
        .store(block.lse[0] + v * heed::kLanes<T>);
    return log_n;
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Ssmax<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:ssmax", "strength log n", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  const double n = double(scores.size());
  for (double& s : scores) s *= op.normaliser.strength.head(row.head) * std::log(n);
  return mixed(row, softmax(scores));
}

}  // namespace zoo::ssmax
