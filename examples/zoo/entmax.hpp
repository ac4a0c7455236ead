// SPDX-License-Identifier: Apache-2.0
#pragma once

// The common part of sparsemax and entmax 1.5: weights are powers of the scores' excess over a threshold, and sum to 1.
//
//   w_j = u_j^n       u_j = max(0, (s_j - top) / n - t), t such that sum_j w_j = 1; top the largest score
//   ds_j = slope_j (G_j - sum_k slope_k G_k / sum_k slope_k)       slope_j = u_j^(n-1), 0 where u_j is; G = dL/dw
//
// Newton's steps find t from below: the sum is convex in t, so that they never pass it. A lane
// stops when a step changes nothing, independently of other lanes.
//
// Source  B. Peters, V. Niculae, A. Martins, Sparse Sequence-to-Sequence Models (2019), with alpha = 1 + 1 / n.

#include "kit.hpp"

#include <heed/plug/row_kit.hpp>

namespace zoo {

template <class T, int n>
struct EntmaxRows : heed::PlainRows {
  static_assert(n == 1 || n == 2);
  using P = heed::Pack<T>;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      const Row row = row_of(block, v);
      report_no_lse(block, v);
      for (Index j = 0; j < block.keys(); ++j)
        block.scores[0].store(j, v, weight(row.above(block, j, v)));
    }
  }
  void vjp(const heed::RowBlock<T>& block, EntmaxRows&) const {
    const P zero = T(0);
    for (int v = 0; v < block.vectors; ++v) {
      const Row row = row_of(block, v);
      const auto sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P slope = slope_of(row.above(block, j, v)), g = block.dweights.load(j, v);
        return heed::PackPair<T>(slope, zero_where(slope == zero, slope * g));
      });
      const P mean = zero_where(sums.first == zero, sums.second / sums.first);
      for (Index j = 0; j < block.keys(); ++j) {
        const P u = row.above(block, j, v), slope = slope_of(u), g = block.dweights.load(j, v);
        block.weights.store(j, v, weight(u));
        block.dscores[0].store(j, v, zero_where(slope == zero, slope * (g - mean)));
      }
    }
  }

 private:
  struct Row {
    P top, t;
    P above(const heed::RowBlock<T>& block, Index j, int v) const {
      return max(P(T(0)), (block.scores[0].load(j, v) - top) * T(1.0 / n) - t);
    }
  };
  // Sets lse to 0, or to -infinity for a row that sees no key.
  static void report_no_lse(const heed::RowBlock<T>& block, int v) {
    const P largest = P::load(block.score_max[0] + v * heed::kLanes<T>);
    select(heed::is_hidden(largest), largest, P(T(0))).store(block.lse[0] + v * heed::kLanes<T>);
  }
  static P weight(P u) { return n == 1 ? u : u * u; }
  static P slope_of(P u) { return n == 1 ? select(u > P(T(0)), P(T(1)), P(T(0))) : u; }

  static Row row_of(const heed::RowBlock<T>& block, int v) {
    Row row{heed::row_top(block, 0, v), T(-1)};
    for (int step = 0; step < 60; ++step) {
      const auto sums = heed::sum_over_keys<T, heed::PackPair<T>>(block.keys(), [&](Index j) {
        const P u = row.above(block, j, v);
        return heed::PackPair<T>(slope_of(u), weight(u));
      });
      const P next = row.t + (sums.second - T(1)) / (sums.first * T(n));
      const auto moves = next > row.t;  // false if a row sees no key
      if (!heed::any_lane(moves)) break;
      row.t = select(moves, next, row.t);
    }
    return row;
  }
};

}  // namespace zoo
