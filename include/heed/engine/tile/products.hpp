// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products over tiles with hidden pairs. A weight of 0 times a NaN or an infinity would be a NaN in a row
// that may not see it, so non-finite operands are taken out of the product, by a copy with zeros in
// their place, and their visible pairs are added afterwards under the mask. Finite operands, the usual
// case, cost one scan.

#include <heed/plug/tile.hpp>
#include <heed/simd/narrow_product.hpp>
#include <heed/simd/panel_gemm.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {

// Row-major numbers in user or scratch memory.
template <class Real>
struct Rows {
  const Real* data = nullptr;
  Index count = 0, columns = 0, stride = 0;
  [[nodiscard]] const Real* row(Index r) const { return data + r * stride; }
};

template <class Real>
[[nodiscard]] bool all_finite(const Rows<Real>& rows) {
  constexpr Index W = kLanes<Real>, chains = 4;
  const Index whole = rows.columns / W * W;
  Pack<Real> probe[chains] = {};  // x * 0 is 0 for finite x, NaN otherwise
  Real edge = Real(0);
  for (Index r = 0; r < rows.count; ++r) {
    const Real* row = rows.row(r);
    const auto look = [&](Index c, Index chain) {
      probe[chain] += Pack<Real>::load(row + c) * Real(0);
    };
    Index c = 0;
    for (; c + chains * W <= whole; c += chains * W)
      for (Index chain = 0; chain < chains; ++chain) look(c + chain * W, chain);
    for (; c < whole; c += W) look(c, 0);
    for (; c < rows.columns; ++c) edge += row[c] * Real(0);
  }
  return sum_lanes((probe[0] + probe[1]) + (probe[2] + probe[3])) + edge == Real(0);
}

// Dense copy with `stride` numbers per row, zeros for non-finite numbers and behind the last column.
template <class Real>
[[nodiscard]] Rows<Real> finite_copy(const Rows<Real>& rows, Real* memory, Index stride) {
  for (Index r = 0; r < rows.count; ++r) {
    for (Index c = 0; c < rows.columns; ++c) {
      const Real x = rows.row(r)[c];
      memory[r * stride + c] = std::isfinite(x) ? x : Real(0);
    }
    for (Index c = rows.columns; c < stride; ++c) memory[r * stride + c] = Real(0);
  }
  return {memory, rows.count, rows.columns, stride};
}

// out[column][lane] += sum over keys of values[key][column] * weights[key][lane], for the lanes of
// `queries` queries at least.
template <class Real>
void add_lane_product(const Rows<Real>& values, const LaneTile<Real>& weights, int vectors,
                      Index queries, const LaneTile<Real>& out) {
  if (queries <= kNarrowRows<Real>)
    return narrow_mix(values.data, values.stride, values.count, values.columns, weights.data,
                      queries, out.data, out.lanes);
  panel_gemm<Store::add>(values.columns, values.count, vectors,
                         Broadcast<Real>{values.data, 1, values.stride}, weights.data,
                         weights.lanes, out.data, out.lanes);
}

// The same where values[key] may be non-finite and hidden: `scores` holds -infinity where a lane may
// not see the key; `copy` has room for values.count * values.columns numbers.
template <class Real>
void add_lane_product_guarded(const Rows<Real>& values, const LaneTile<Real>& weights,
                              const LaneTile<Real>& scores, int vectors, Index queries,
                              const LaneTile<Real>& out, Real* copy) {
  add_lane_product(finite_copy(values, copy, values.columns), weights, vectors, queries, out);
  for (Index j = 0; j < values.count; ++j)
    for (Index c = 0; c < values.columns; ++c) {
      const Real x = values.row(j)[c];
      if (std::isfinite(x)) continue;
      for (int v = 0; v < vectors; ++v) {
        const auto hidden = scores.load(j, v) == Pack<Real>(-kInfinity<Real>);
        const Pack<Real> sum = out.load(c, v);
        out.store(c, v, select(hidden, sum, sum + weights.load(j, v) * x));
      }
    }
}

// out[key][column] += sum over lanes of weights[key][lane] * rows[lane][column]; rows padded to whole
// vectors.
template <class Real>
void add_row_product(const LaneTile<Real>& weights, const Rows<Real>& rows, Real* out,
                     Index out_stride) {
  gemm_add(weights.rows, rows.count, rows.columns, Broadcast<Real>{weights.data, weights.lanes, 1},
           rows.data, rows.stride, out, out_stride);
}

// The same where rows[lane] may be non-finite: `clean` is its finite copy.
template <class Real>
void add_row_product_guarded(const LaneTile<Real>& weights, const LaneTile<Real>& scores,
                             const Rows<Real>& rows, const Rows<Real>& clean, Real* out,
                             Index out_stride) {
  add_row_product(weights, clean, out, out_stride);
  for (Index i = 0; i < rows.count; ++i)
    for (Index c = 0; c < rows.columns; ++c) {
      const Real x = rows.row(i)[c];
      if (std::isfinite(x)) continue;
      for (Index j = 0; j < weights.rows; ++j)
        if (scores.row(j)[i] != -kInfinity<Real>) out[j * out_stride + c] += weights.row(j)[i] * x;
    }
}

}  // namespace HEED_ABI
}  // namespace heed
