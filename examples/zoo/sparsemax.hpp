// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sparsemax: the weights are the point of the simplex that lies nearest to the scores; many are 0.
//
//   w_j = max(0, s_j - top - t), t such that sum_j w_j = 1; top the largest score
//   ds_j = G_j - mean of G over the keys with w > 0, for these; else 0       G = dL/dw
//
// Newton's steps find t from below: the sum is convex in t, so that they never pass it. A lane stops where a step moves
// nothing, whatever the lanes beside it do.
//
// Source  A. Martins, R. Astudillo, From Softmax to Sparsemax (2016), which sort.

#include "kit.hpp"

namespace zoo::sparsemax {

template <class T>
struct Sparsemax : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Sparsemax;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P t = threshold(block, v);
      for (Index j = 0; j < block.keys(); ++j) {
        const P u = above(block, j, v, t);
        block.scores[0].store(j, v, u);
      }
    }
  }
  void vjp(const heed::RowBlock<T>& block, Sparsemax&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P t = threshold(block, v), zero = T(0);
      const auto sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P slope = slope_of(above(block, j, v, t)), g = block.dweights.load(j, v);
        return heed::PackPair<T>(slope, zero_where(slope == zero, slope * g));
      });
      const P mean = zero_where(sums.first == zero, sums.second / sums.first);
      for (Index j = 0; j < block.keys(); ++j) {
        const P u = above(block, j, v, t), slope = slope_of(u), g = block.dweights.load(j, v);
        block.weights.store(j, v, u);
        block.dscores[0].store(j, v, zero_where(slope == zero, slope * (g - mean)));
      }
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const auto c = [](double x) { return heed::math::constant<S>(x); };
    const auto value = [](const S& s) { return double(heed::math::value_of(s)); };
    std::vector<S> kept = row.scores[0];  // with a weight above 0
    S t = c(0);
    for (std::size_t before = 0; before != kept.size();) {
      before = kept.size();
      t = c(-1);
      for (const S& s : kept) t += s;
      t = t / c(double(before));
      std::erase_if(kept, [&](const S& s) { return value(s) <= value(t); });
    }
    for (S& s : row.scores[0]) s = heed::math::maximum(c(0), S(s - t));
    return row.scores[0];
  }

 private:
  static P slope_of(P u) { return select(u > P(T(0)), P(T(1)), P(T(0))); }

  static P above(const heed::RowBlock<T>& block, Index j, int v, P t) {
    return max(P(T(0)), block.scores[0].load(j, v) - heed::row_top(block, 0, v) - t);
  }
  static P threshold(const heed::RowBlock<T>& block, int v) {
    P t = T(-1);
    for (int step = 0; step < 60; ++step) {
      const auto sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P u = above(block, j, v, t);
        return heed::PackPair<T>(slope_of(u), u);
      });
      const P next = t + (sums.second - T(1)) / sums.first;
      const auto moves = next > t;  // not where a row sees no key
      if (!heed::any_lane(moves)) break;
      t = select(moves, next, t);
    }
    return t;
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Sparsemax<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sparsemax", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers scores = logits(row);
  double low = -1e3, high = 1e3;  // the threshold lies between
  for (int step = 0; step < 100; ++step) {
    const double middle = (low + high) / 2;
    double sum = 0;
    for (const double s : scores) sum += std::max(0.0, s - middle);
    (sum >= 1 ? low : high) = middle;
  }
  for (double& s : scores) s = std::max(0.0, s - low);
  return mixed(row, scores);
}

}  // namespace zoo::sparsemax
