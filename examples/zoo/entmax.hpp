// SPDX-License-Identifier: Apache-2.0
#pragma once

// What sparsemax and entmax 1.5 have in common: weights are powers of what scores have above a threshold, and sum to 1.
//
//   w_j = u_j^n       u_j = max(0, (s_j - top) / n - t), t such that sum_j w_j = 1; top the largest score
//   ds_j = slope_j (G_j - sum_k slope_k G_k / sum_k slope_k)       slope_j = u_j^(n-1), 0 where u_j is; G = dL/dw
//
// Newton's steps find t from below: the sum is convex in t, so that they never pass it. A lane stops where a step moves
// nothing, whatever the lanes beside it do.
//
// Source  B. Peters, V. Niculae, A. Martins, Sparse Sequence-to-Sequence Models (2019), with alpha = 1 + 1 / n.

#include "kit.hpp"

namespace zoo {

template <class T, int n>
struct EntmaxRows : heed::PlainRows {
  static_assert(n == 1 || n == 2);
  using P = heed::Pack<T>;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      const Row row = row_of(block, v);
      weigh_keys(block, v, [&](P s) { return weight(row.above(s)); });
    }
  }
  void vjp(const heed::RowBlock<T>& block, EntmaxRows&) const {
    const P zero = T(0);
    for (int v = 0; v < block.vectors; ++v) {
      const Row row = row_of(block, v);
      const auto sums = sum_over_pulls(block, v, [&](P s, P g) {
        const P slope = slope_of(row.above(s));
        return heed::PackPair<T>(slope, zero_where(slope == zero, slope * g));
      });
      const P mean = zero_where(sums.first == zero, sums.second / sums.first);
      pull_keys(block, v, [&](P s, P g) {
        const P u = row.above(s), slope = slope_of(u);
        return heed::PackPair<T>(weight(u), zero_where(slope == zero, slope * (g - mean)));
      });
    }
  }

 private:
  struct Row {
    P top, t;
    P above(P s) const { return max(P(T(0)), (s - top) * T(1.0 / n) - t); }
  };
  static P weight(P u) { return n == 1 ? u : u * u; }
  static P slope_of(P u) { return n == 1 ? select(u > P(T(0)), P(T(1)), P(T(0))) : u; }

  static Row row_of(const heed::RowBlock<T>& block, int v) {
    Row row{heed::row_top(block, 0, v), T(-1)};
    for (int step = 0; step < 60; ++step) {
      const auto sums = sum_over_scores(block, v, [&](P s) {
        const P u = row.above(s);
        return heed::PackPair<T>(slope_of(u), weight(u));
      });
      const P next = row.t + (sums.second - T(1)) / (sums.first * T(n));
      const auto moves = next > row.t;  // not where a row sees no key
      if (!heed::any_lane(moves)) break;
      row.t = select(moves, next, row.t);
    }
    return row;
  }
};

}  // namespace zoo
