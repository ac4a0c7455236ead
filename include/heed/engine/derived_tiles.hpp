// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lane tiles of a set of query or key rows and of what a score derives of them: rows are columns of the tensor, lanes are tokens.
//
// Lanes: tiles of numbers, LaneTile, or of numbers that move, DualLanes (dual_lanes.hpp).

#include <heed/plug/tile.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/scratch.hpp>

#include <array>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
[[nodiscard]] auto is_zero(const Pack<Real>& x) {
  return x == Pack<Real>(Real(0));
}
// The tile of which results are made: the numbers, or their tangents where they move.
template <class Lanes>
[[nodiscard]] auto last_plane(const Lanes& tile) {
  return tile.plane(Lanes::planes - 1);
}

// The sum over the rows of a vector, of which `idle` ones and those from `count` on do not count.
template <class Real>
[[nodiscard]] Real valid_sum(const Pack<Real>& x, typename Pack<Real>::Mask idle, int v,
                             Index count) {
  return Real(sum_valid_lanes(zero_where(idle, x), v, count));
}
template <class Real, class Scalar>
struct LaneSum {
  typename Pack<Real>::Mask idle;
  int vector;
  Index count;
  [[nodiscard]] auto operator()(const Scalar& x) const { return valid_sum(x, idle, vector, count); }
};

// The rows themselves, projected rows, products with the rows of a table, and numbers of their tokens; or their gradients.
template <class Real, class Lanes = LaneTile<Real>>
struct DerivedTiles {
  Lanes x, projected, table, input;

  // Vector v of the rows, whose first has position `first`. visible: keys that each query sees, [lanes], or null.
  [[nodiscard]] auto row(int v, Index first, const Real* visible) const {
    using P = Pack<Real>;
    return LaneRow<Real, std::remove_cvref_t<decltype(x.constant())>>{
        x.constant(),
        projected.constant(),
        table.constant(),
        v,
        P::iota() + Real(first + v * kLanes<Real>),
        visible ? P::load(visible + v * kLanes<Real>) : P(Real(0)),
        input.constant()};
  }
  [[nodiscard]] LaneRowGrad<Real, Lanes> grad(int v) const {
    return {x, projected, table, v, input};
  }
  [[nodiscard]] static DerivedTiles take(Scratch<Real>& scratch, Index width, Index rank,
                                         Index table_rows, Index inputs, Index lanes) {
    const auto rows = [&](Index n) { return Lanes::take(scratch, n, lanes); };
    return {rows(width), rows(rank), rows(table_rows), rows(inputs)};
  }
  [[nodiscard]] DerivedTiles<Real> plane(int n) const {
    return {x.plane(n), projected.plane(n), table.plane(n), input.plane(n)};
  }
  void fill(Real number) const {
    for (const Lanes& tile : {x, projected, table, input}) tile.fill(number);
  }

  // In tiles that hold gradients, before features are chained: the lanes whose row no pair has read, so that nothing flows
  // back. The row may hold anything, and 0 times a NaN in it must not become its gradient.
  [[nodiscard]] auto idle_lanes(const typename Lanes::P* dfeatures, int count, int v) const {
    auto idle = is_zero(Pack<Real>(Real(0)));
    for (int i = 0; i < count; ++i) idle = idle & is_zero(dfeatures[i]);
    for (const Lanes& tile : {projected, table})
      for (Index r = 0; r < tile.rows; ++r) idle = idle & is_zero(tile.load(r, v));
    return idle;
  }
  // Afterwards: no gradient for them.
  template <class Mask>
  void clear_lanes(Mask idle, int v) const {
    for (const Lanes& tile : {x, projected, table, input})
      for (Index r = 0; r < tile.rows; ++r) tile.store(r, v, zero_where(idle, tile.load(r, v)));
  }

  // The transformed rows in place of `x`, which are rows of head h from position `first` on.
  template <class Score>
  static void transform(const Score& score, RowSide side, Index h, Index first, int vectors,
                        const Lanes& x) {
    for (int v = 0; v < vectors; ++v) score.transform(side, h, in_place(x, {}, v, first));
  }
  // Gradients the other way: d, of the transformed rows, becomes that of the rows `x`, of which the first `count` exist,
  // and those of the parameters are added to `grad`. Lanes of d that are 0 add nothing, whatever their row holds. `work`
  // has room for the rows.
  template <class Score>
  static void transform_vjp(const Score& score, RowSide side, Index h, Index first, Index count,
                            const Lanes& x, const Lanes& work, const Lanes& d, Score& grad) {
    for (int v = 0; v * kLanes<Real> < count; ++v) {
      auto idle = is_zero(Pack<Real>(Real(0)));
      for (Index c = 0; c < d.rows; ++c) idle = idle & is_zero(d.load(c, v));
      const auto rows = in_place(work, x.constant(), v, first);
      rows.restore();
      score.transform_vjp(side, h, rows, in_place(d, {}, v, first),
                          LaneSum<Real, typename Lanes::P>{idle, v, count}, grad);
      for (Index c = 0; c < d.rows; ++c) d.store(c, v, zero_where(idle, d.load(c, v)));
    }
  }

  // A table, and how it moves: (table rows, width) each.
  using Tables = std::array<const Real*, std::size_t(Lanes::planes)>;
  // projected = P^T x,  table = W x;  projected. = P^T x.,  table. = W x. + W. x     in the planes from `first` on.
  // projection: P, (width, rank), which stands still; tables: W and W.
  void derive(const Real* projection, const Tables& tables, int vectors, int first = 0) const {
    const Index width = x.rows;
    for (int n = first; n < Lanes::planes; ++n) {
      multiply(Store::overwrite, {projection, 1, projected.rows}, x.plane(n), projected.plane(n),
               vectors);
      multiply(Store::overwrite, {tables[0], width, 1}, x.plane(n), table.plane(n), vectors);
      if constexpr (Lanes::planes > 1)
        if (n > 0) multiply(Store::add, {tables[1], width, 1}, x.plane(0), table.plane(n), vectors);
    }
  }
  // dx += P dprojected + W^T dtable,  dx. += P dprojected. + W^T dtable. + W.^T dtable; these tiles hold the gradients.
  void chain(const Real* projection, const Tables& tables, int vectors) const {
    const Index width = x.rows;
    for (int n = 0; n < Lanes::planes; ++n) {
      multiply(Store::add, {projection, projected.rows, 1}, projected.plane(n), x.plane(n),
               vectors);
      multiply(Store::add, {tables[0], 1, width}, table.plane(n), x.plane(n), vectors);
      if constexpr (Lanes::planes > 1)
        if (n > 0) multiply(Store::add, {tables[1], 1, width}, table.plane(0), x.plane(n), vectors);
    }
  }

 private:
  [[nodiscard]] static LaneRowInPlace<Real, Lanes> in_place(
      const Lanes& rows, const std::remove_cvref_t<decltype(rows.constant())>& before, int v,
      Index first) {
    return {rows, before, v, Pack<Real>::iota() + Real(first + v * kLanes<Real>)};
  }
  // to = matrix from
  static void multiply(Store store, const Broadcast<Real>& matrix, const LaneTile<Real>& from,
                       const LaneTile<Real>& to, int vectors) {
    if (to.rows > 0 && (store == Store::overwrite || from.rows > 0))
      panel_gemm(store, to.rows, from.rows, vectors, matrix, from.data, from.lanes, to.data,
                 to.lanes);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
