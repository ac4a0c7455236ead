// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lane tiles of a set of query or key rows and of what a score derives of them: rows are columns of the tensor, lanes are tokens.

#include <heed/plug/tile.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/scratch.hpp>

namespace heed {
inline namespace HEED_ABI {

// The rows themselves, projected rows, products with the rows of a table, and numbers of their tokens; or their gradients.
template <class Real>
struct SideTiles {
  LaneTile<Real> x, projected, table, input;

  // Vector v of the rows, whose first has position `first`; queries see so many keys.
  [[nodiscard]] LaneRow<Real> row(int v, Index first, Pack<Real> visible = Real(0)) const {
    return {x.constant(),
            projected.constant(),
            table.constant(),
            v,
            Pack<Real>::iota() + Real(first + v * kLanes<Real>),
            visible,
            input.constant()};
  }
  [[nodiscard]] LaneRowGrad<Real> grad(int v) const { return {x, projected, table, v, input}; }

  [[nodiscard]] static SideTiles take(Scratch<Real>& scratch, Index width, Index rank,
                                      Index table_rows, Index inputs, Index lanes) {
    return {{scratch.take(width * lanes), width, lanes},
            {scratch.take(rank * lanes), rank, lanes},
            {scratch.take(table_rows * lanes), table_rows, lanes},
            {scratch.take(inputs * lanes), inputs, lanes}};
  }

  // In tiles that hold gradients, before features are chained: the lanes whose row no pair has read, so that nothing flows
  // back. The row may hold anything, and 0 times a NaN in it must not become its gradient.
  [[nodiscard]] auto idle_lanes(const Pack<Real>* dfeatures, int count, int v) const {
    const Pack<Real> zero = Real(0);
    auto idle = zero == zero;
    for (int i = 0; i < count; ++i) idle = idle & (dfeatures[i] == zero);
    for (const auto& tile : {projected, table})
      for (Index r = 0; r < tile.rows; ++r) idle = idle & (tile.load(r, v) == zero);
    return idle;
  }
  // Afterwards: no gradient for them.
  template <class Lanes>
  void clear_lanes(Lanes idle, int v) const {
    for (const auto& tile : {x, projected, table, input})
      for (Index r = 0; r < tile.rows; ++r) tile.store(r, v, zero_where(idle, tile.load(r, v)));
  }

  // The transformed rows in place of x, which are rows of head h from position `first` on.
  template <class Score>
  void transform(const Score& score, RowSide side, Index h, Index first, int vectors) const {
    for (int v = 0; v < vectors; ++v) score.transform(side, h, in_place(x, {}, v, first));
  }
  // Gradients the other way: d, of the transformed rows, becomes that of the rows `x`, of which the first `count` exist,
  // and those of the parameters are added to `grad`. Lanes of d that are 0 add nothing, whatever their row holds. `work`
  // has room for the rows.
  template <class Score>
  static void transform_vjp(const Score& score, RowSide side, Index h, Index first, Index count,
                            const LaneTile<Real>& x, const LaneTile<Real>& work,
                            const LaneTile<Real>& d, Score& grad) {
    for (int v = 0; v * kLanes<Real> < count; ++v) {
      const Pack<Real> zero = Real(0);
      auto idle = zero == zero;
      for (Index c = 0; c < d.rows; ++c) idle = idle & (d.load(c, v) == zero);
      const auto sum = [&](Pack<Real> terms) {
        return Real(sum_valid_lanes(zero_where(idle, terms), v, count));
      };
      const auto rows = in_place(work, x.constant(), v, first);
      rows.restore();
      score.transform_vjp(side, h, rows, in_place(d, {}, v, first), sum, grad);
      for (Index c = 0; c < d.rows; ++c) d.store(c, v, zero_where(idle, d.load(c, v)));
    }
  }
  [[nodiscard]] static LaneRowInPlace<Real> in_place(const LaneTile<Real>& rows,
                                                     const LaneTile<const Real>& before, int v,
                                                     Index first) {
    return {rows, before, v, Pack<Real>::iota() + Real(first + v * kLanes<Real>)};
  }

  // projected = P^T x and table = W x. projection: P, (width, rank); matrix: W, (table rows, width).
  void derive(const Real* projection, const Real* matrix, int vectors) const {
    const Index width = x.rows;
    if (projected.rows > 0)
      panel_gemm<Store::overwrite>(projected.rows, width, vectors,
                                   Broadcast<Real>{projection, 1, projected.rows}, x.data, x.lanes,
                                   projected.data, projected.lanes);
    if (table.rows > 0)
      panel_gemm<Store::overwrite>(table.rows, width, vectors, Broadcast<Real>{matrix, width, 1},
                                   x.data, x.lanes, table.data, table.lanes);
  }
  // dx += P dprojected + W^T dtable; these tiles hold the gradients.
  void chain(const Real* projection, const Real* matrix, int vectors) const {
    const Index width = x.rows;
    if (projected.rows > 0)
      panel_gemm<Store::add>(width, projected.rows, vectors,
                             Broadcast<Real>{projection, projected.rows, 1}, projected.data,
                             projected.lanes, x.data, x.lanes);
    if (table.rows > 0)
      panel_gemm<Store::add>(width, table.rows, vectors, Broadcast<Real>{matrix, 1, width},
                             table.data, table.lanes, x.data, x.lanes);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
