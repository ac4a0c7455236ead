// SPDX-License-Identifier: Apache-2.0
#pragma once

// Products over tiles with hidden pairs. A weight of 0 times a NaN or an infinity would be a NaN in a row
// that may not see it, so non-finite operands are taken out of the product, by a copy with zeros in
// their place, and their visible pairs are added afterwards under the mask. Finite operands, the usual
// case, cost one scan.

#include <heed/engine/tile/place.hpp>
#include <heed/engine/tile/rows.hpp>
#include <heed/plug/tile.hpp>
#include <heed/simd/few_products.hpp>
#include <heed/simd/panel_gemm.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {

// out[column][lane] += sum over keys of values[key][column] * weights[key][lane], for the lanes of
// `queries` queries at least. store: overwrite, with more than kFewRows queries, where `out` holds nothing yet.
template <class Real>
void add_lane_product(const Rows<Real>& values, const LaneTile<Real>& weights, int vectors,
                      Index queries, const LaneTile<Real>& out, Store store = Store::add) {
  if (queries <= kFewRows<Real>)
    return few_accumulate(values.data, values.stride, values.count, values.columns, weights.data,
                          queries, out.data, out.lanes);
  panel_gemm(store, values.columns, values.count, vectors,
             Broadcast<Real>{values.data, 1, values.stride}, weights.data, weights.lanes, out.data,
             out.lanes);
}

// What numbers of `values` that are not finite add to the lanes that see their key; seen(x): what a product sees of a
// number.
template <class Real, class Seen>
void add_visible_lanes(const Rows<Real>& values, const LaneTile<Real>& weights,
                       const LaneTile<Real>& scores, int vectors, const LaneTile<Real>& out,
                       Seen&& seen) {
  for (Index j = 0; j < values.count; ++j)
    for (Index c = 0; c < values.columns; ++c) {
      const Real x = seen(values.row(j)[c]);
      if (std::isfinite(x)) continue;
      for (int v = 0; v < vectors; ++v) {
        const Pack<Real> sum = out.load(c, v);
        out.store(c, v,
                  select(is_hidden(scores.load(j, v)), sum, sum + seen(weights.load(j, v)) * x));
      }
    }
}

// add_lane_product() where values[key] may be non-finite and hidden: `scores` holds -infinity where a lane may
// not see the key; `copy` has room for values.count * values.columns numbers.
template <class Real>
void add_lane_product_guarded(const Rows<Real>& values, const LaneTile<Real>& weights,
                              const LaneTile<Real>& scores, int vectors, Index queries,
                              const LaneTile<Real>& out, Real* copy) {
  add_lane_product(finite_copy(values, copy, values.columns), weights, vectors, queries, out);
  add_visible_lanes(values, weights, scores, vectors, out, [](auto x) { return x; });
}

// The dot products of a tile's computed pairs: out[key][lane] = rows[key] . lanes, or added to what `out` holds.
template <class Real>
void tile_dots(const TilePlace& at, int vectors, const Rows<Real>& rows,
               const LaneTile<Real>& lanes, const LaneTile<Real>& out,
               Store store = Store::overwrite) {
  for_strips(at, vectors, [&](const Strip& strip) {
    const Rows<Real> own = rows.part(strip.keys.begin, strip.keys.size());
    const LaneTile<Real> of = strip.lanes_of(lanes), to = strip.of(out);
    panel_gemm(store, own.count, own.columns, strip.vectors,
               Broadcast<Real>{own.data, own.stride, 1}, of.data, of.lanes, to.data, to.lanes);
  });
}

// out[key][column] += sum over lanes of weights[key][lane] * rows[lane][column]; rows padded to whole
// vectors.
template <class Real>
void add_row_product(const LaneTile<Real>& weights, const Rows<Real>& rows, Real* out,
                     Index out_stride) {
  gemm_add(weights.rows, rows.count, rows.columns, Broadcast<Real>{weights.data, weights.lanes, 1},
           rows.data, rows.stride, out, out_stride);
}

// What numbers of `rows` that are not finite add to the keys that their lane sees; seen(x): as above.
template <class Real, class Seen>
void add_visible_rows(const LaneTile<Real>& weights, const LaneTile<Real>& scores,
                      const Rows<Real>& rows, Real* out, Index out_stride, Seen&& seen) {
  for (Index i = 0; i < rows.count; ++i)
    for (Index c = 0; c < rows.columns; ++c) {
      const Real x = seen(rows.row(i)[c]);
      if (std::isfinite(x)) continue;
      for (Index j = 0; j < weights.rows; ++j)
        if (scores.row(j)[i] != -kInfinity<Real>)
          out[j * out_stride + c] += seen(weights.row(j)[i]) * x;
    }
}

// add_row_product() where rows[lane] may be non-finite: `clean` is its finite copy.
template <class Real>
void add_row_product_guarded(const LaneTile<Real>& weights, const LaneTile<Real>& scores,
                             const Rows<Real>& rows, const Rows<Real>& clean, Real* out,
                             Index out_stride) {
  add_row_product(weights, clean, out, out_stride);
  add_visible_rows(weights, scores, rows, out, out_stride, [](auto x) { return x; });
}

}  // namespace HEED_ABI
}  // namespace heed
