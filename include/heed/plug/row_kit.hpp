// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tools of row normalisers (plug/normaliser.hpp): operations on whole rows of scores, for one
// vector of queries (lanes) and all keys of their rows at a time.
//
//   exponentials  exponentiate_row, scale_row, softmax_row_vjp   weights that are shares of exponentials
//   sums          sum_over_keys, fold_over_keys, count_visible   whose rounding errors do not grow with the row
//   columns       column_of, work_column                         a pack per key, of a tile or of scratch memory
//   lanes         row_top; is_hidden (plug/tile.hpp); zero_where, inverse_or_zero (simd/pack.hpp)
//
// Bounds  a hidden key has weight and derivative exactly 0, whatever the weight's gradient holds there; a lane that
//         sees no key is 0 throughout; a visible NaN makes its own lane NaN and no other.

#include <heed/plug/normaliser.hpp>
#include <heed/simd/log.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {

// The largest visible score of a row, relative to which exponents are taken; 0 where no key is seen.
template <class Real>
[[nodiscard]] inline Pack<Real> row_top(const RowBlock<Real>& block, std::size_t map, int v) {
  const Pack<Real> largest = Pack<Real>::load(block.score_max[map] + v * kLanes<Real>);
  return zero_where(is_hidden(largest), largest);
}

// One vector of a lane tile: a pack per key.
template <class Real>
struct TileColumn {
  Real* data;
  Index stride;
  [[nodiscard]] Pack<Real> load(Index j) const { return Pack<Real>::load(data + j * stride); }
  void store(Index j, Pack<Real> p) const { p.store(data + j * stride); }
};

template <class Real>
[[nodiscard]] inline TileColumn<Real> column_of(const LaneTile<Real>& tile, int v) {
  return {tile.data + v * kLanes<Real>, tile.lanes};
}

// Scratch column `index` of the current vector. All vectors use the same dense memory, so that it
// stays in cache; columns of lane tiles would leave most cache sets unused.
template <class Real>
[[nodiscard]] inline TileColumn<Real> work_column(const RowBlock<Real>& block, Index index) {
  return {block.work.data + index * block.keys() * kLanes<Real>, kLanes<Real>};
}

// Two sums in one pass.
template <class Real>
struct PackPair {
  Pack<Real> first, second;
  PackPair(Real both) : first(both), second(both) {}
  PackPair(Pack<Real> a, Pack<Real> b) : first(a), second(b) {}
  PackPair& operator+=(const PackPair& o) {
    first += o.first;
    second += o.second;
    return *this;
  }
};

// add(part, j) adds key j to a partial sum, which starts again at 0 every `block` keys: with 128,
// the rounding error of 1e5 terms is that of 900. Sum is Pack<Real> or PackPair<Real>.
template <class Real, class Sum = Pack<Real>, Index block = 128, class Add>
[[nodiscard, gnu::always_inline]] inline Sum fold_over_keys(Index keys, Add&& add) {
  Sum total = Real(0);
  for (Index first = 0; first < keys; first += block) {
    const Index end = std::min<Index>(keys, first + block);
    Sum part = Real(0);
    for (Index j = first; j < end; ++j) add(part, j);
    total += part;
  }
  return total;
}

// term(0) + ... + term(keys - 1)
template <class Real, class Sum = Pack<Real>, Index block = 128, class Term>
[[nodiscard]] inline Sum sum_over_keys(Index keys, Term&& term) {
  return fold_over_keys<Real, Sum, block>(
      keys, [&term](Sum & part, Index j) __attribute__((always_inline)) { part += term(j); });
}

// Number of keys that each lane sees.
template <class Real>
[[nodiscard]] inline Pack<Real> count_visible(const TileColumn<Real>& scores, Index keys) {
  return sum_over_keys<Real>(
      keys, [&](Index j) { return zero_where(is_hidden(scores.load(j)), Pack<Real>(Real(1))); });
}

// Writes exp(score - top) of the keys of vector v into `to`; exactly 0 where hidden. Sets lse of map 0.
template <class Real>
struct RowExponentials {
  Pack<Real> top, sum;
};
template <class Real>
[[nodiscard]] inline RowExponentials<Real> exponentiate_row(const RowBlock<Real>& block, int v,
                                                            const LaneTile<Real>& to) {
  RowExponentials<Real> row{row_top(block, 0, v), Real(0)};
  for (Index j = 0; j < block.keys(); ++j) {
    const Pack<Real> score = block.scores[0].load(j, v);
    const Pack<Real> e = zero_where(is_hidden(score), math::exp(Pack<Real>(score - row.top)));
    to.store(j, v, e);
    row.sum += e;
  }
  (row.top + math::log(row.sum)).store(block.lse[0] + v * kLanes<Real>);
  return row;
}

// Multiplies vector v of `row` by a factor; 0 stays 0, even if the factor is NaN.
template <class Real>
inline void scale_row(const LaneTile<Real>& row, int v, Pack<Real> factor) {
  for (Index j = 0; j < row.rows; ++j) {
    const Pack<Real> x = row.load(j, v);
    row.store(j, v, zero_where(x == Pack<Real>(Real(0)), x * factor));
  }
}

// Backward of weights w = exp(score) / sum, where the sum may have further terms: dscores[0], which holds w, becomes w_j
// (G_j - r) with r = sum_k w_k G_k, G = dweights. Sets block.weights and returns r.
template <class Real>
[[nodiscard]] inline Pack<Real> softmax_row_vjp(const RowBlock<Real>& block, int v) {
  const Pack<Real> zero = Real(0);
  const LaneTile<Real>&w = block.dscores[0], &pull = block.weights;
  Pack<Real> r = zero;
  for (Index j = 0; j < block.keys(); ++j) {
    const Pack<Real> weight = w.load(j, v);  // 0 where hidden: G may be NaN there
    const Pack<Real> product = zero_where(weight == zero, weight * block.dweights.load(j, v));
    pull.store(j, v, product);
    r += product;
  }
  for (Index j = 0; j < block.keys(); ++j) {
    const Pack<Real> weight = w.load(j, v), product = pull.load(j, v);
    block.dscores[0].store(j, v, zero_where(weight == zero, product - weight * r));
    block.weights.store(j, v, weight);
  }
  return r;
}

}  // namespace HEED_ABI
}  // namespace heed
