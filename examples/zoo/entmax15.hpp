// SPDX-License-Identifier: Apache-2.0
#pragma once

// Entmax with alpha 1.5: between softmax and sparsemax; keys far below the best get weight 0.
//
//   w_j = u_j^2       u_j = max(0, (s_j - top) / 2 - t), t such that sum_j w_j = 1; top the largest score
//   ds_j = u_j (G_j - sum_k u_k G_k / sum_k u_k)       G = dL/dw
//
// Newton's steps find t from below: the sum is convex in t, so that they never pass it. A lane stops where a step moves
// nothing, whatever the lanes beside it do.
//
// Source  B. Peters, V. Niculae, A. Martins, Sparse Sequence-to-Sequence Models (2019), which sort or bisect.

#include "kit.hpp"

namespace zoo::entmax15 {

template <class T>
struct Entmax15 : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = Entmax15;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const P t = threshold(block, v);
      for (Index j = 0; j < block.keys(); ++j) {
        const P u = above(block, j, v, t);
        block.scores[0].store(j, v, u * u);
      }
    }
  }
  void vjp(const heed::RowBlock<T>& block, Entmax15&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P t = threshold(block, v), zero = T(0);
      const auto sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P slope = slope_of(above(block, j, v, t)), g = block.dweights.load(j, v);
        return heed::PackPair<T>(slope, zero_where(slope == zero, slope * g));
      });
      const P mean = zero_where(sums.first == zero, sums.second / sums.first);
      for (Index j = 0; j < block.keys(); ++j) {
        const P u = above(block, j, v, t), slope = slope_of(u), g = block.dweights.load(j, v);
        block.weights.store(j, v, u * u);
        block.dscores[0].store(j, v, zero_where(slope == zero, slope * (g - mean)));
      }
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    const auto c = [](double x) { return heed::math::constant<S>(x); };
    double top = -heed::kInfinity<double>;
    for (const S& s : row.scores[0]) top = std::max(top, double(heed::math::value_of(s)));
    S t = c(-1);
    const auto above = [&](const S& s) {
      return heed::math::maximum(c(0), S(c(0.5) * (s - c(top)) - t));
    };
    for (int step = 0; step < 25; ++step) {
      S sum = c(0), squares = c(-1);
      for (const S& s : row.scores[0]) sum += above(s), squares += above(s) * above(s);
      t = t + squares / (sum + sum);
    }
    for (S& s : row.scores[0]) s = above(s) * above(s);
    return row.scores[0];
  }

 private:
  static P slope_of(P u) { return u; }

  static P above(const heed::RowBlock<T>& block, Index j, int v, P t) {
    const P x = T(0.5) * (block.scores[0].load(j, v) - heed::row_top(block, 0, v)) - t;
    return max(P(T(0)), x);
  }
  static P threshold(const heed::RowBlock<T>& block, int v) {
    P t = T(-1);
    for (int step = 0; step < 60; ++step) {
      const auto sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P u = above(block, j, v, t);
        return heed::PackPair<T>(u, u * u);
      });
      const P next = t + (sums.second - T(1)) / (sums.first + sums.first);
      const auto moves = next > t;  // not where a row sees no key
      if (!heed::any_lane(moves)) break;
      t = select(moves, next, t);
    }
    return t;
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Entmax15<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:entmax15", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers scores = logits(row);
  double low = -1e3, high = 1e3;  // the threshold lies between
  const auto weight = [&](double s) { return std::pow(std::max(0.0, s / 2 - low), 2); };
  for (int step = 0; step < 100; ++step) {
    const double kept = low, middle = (low + high) / 2;
    low = middle;
    double sum = 0;
    for (const double s : scores) sum += weight(s);
    if (sum >= 1) continue;
    low = kept;
    high = middle;
  }
  for (double& s : scores) s = weight(s);
  return mixed(row, scores);
}

}  // namespace zoo::entmax15
