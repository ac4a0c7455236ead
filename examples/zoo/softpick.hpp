// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softpick: a softmax that may leave weight over. Scores below 0 get none, but take from the others.
//
//   w_j = max(0, exp(s_j) - 1) / D       D = eps + sum_k |exp(s_k) - 1|
//   ds_j = exp(s_j) / D ([s_j > 0] G_j - sign(s_j) r)       r = sum_k w_k G_k       G = dL/dw
//
// All exponentials are taken about m = max(0, the largest score).
//
// Source  Z. Zuhri, E. Fuadi, A. Aji, Softpick: No Attention Sink, No Massive Activations with Rectified Softmax (2025). Its
//         eps is added behind the shift by m; here before, so that m is in no result.

#include "kit.hpp"

namespace zoo::softpick {

template <class T>
struct Softpick : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Softpick;
  static constexpr double eps = 1e-6;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const Row row(block, v);
      for (Index j = 0; j < block.keys(); ++j)
        block.scores[0].store(j, v, max(P(T(0)), row.exponential(j) - row.one) * row.factor);
    }
  }
  void vjp(const heed::RowBlock<T>& block, Softpick&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const Row row(block, v);
      const P zero = T(0), r = heed::sum_over_keys<T>(block.keys(), [&](Index j) {
                             const P w = max(zero, row.exponential(j) - row.one) * row.factor;
                             return zero_where(w == zero, w * block.dweights.load(j, v));
                           });
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = block.scores[0].load(j, v), e = row.exponential(j);
        const P pull = select(s > zero, block.dweights.load(j, v) - r, zero_where(s == zero, r));
        block.weights.store(j, v, max(zero, e - row.one) * row.factor);
        block.dscores[0].store(j, v, zero_where(heed::is_hidden(s), e * row.factor * pull));
      }
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const S zero = heed::math::constant<S>(0), one = heed::math::constant<S>(1);
    S sum = heed::math::constant<S>(eps);
    for (S& s : row.scores[0]) s = heed::math::exp(s) - one, sum += heed::math::absolute(s);
    for (S& s : row.scores[0]) s = heed::math::maximum(zero, s) / sum;
    return row.scores[0];
  }

 private:
  struct Row {
    heed::TileColumn<T> scores;
    P top, one, factor;  // exp(-top), and exp(-top) / D
    Row(const heed::RowBlock<T>& block, int v)
        : scores(heed::column_of(block.scores[0], v)),
          top(max(P(T(0)), heed::row_top(block, 0, v))),
          one(heed::math::exp(P(-top))) {
      const P sum = heed::sum_over_keys<T>(block.keys(), [&](Index j) {
        return zero_where(heed::is_hidden(scores.load(j)),
                          heed::math::absolute(exponential(j) - one));
      });
      factor = T(1) / (sum + T(eps) * one);
    }
    P exponential(Index j) const { return heed::math::exp(P(scores.load(j) - top)); }
  };
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Softpick<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:softpick", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers weights = logits(row);
  double sum = 1e-6;
  for (double& s : weights) sum += std::abs(s = std::expm1(s));
  for (double& w : weights) w = std::max(0.0, w) / sum;
  return mixed(row, weights);
}

}  // namespace zoo::softpick
