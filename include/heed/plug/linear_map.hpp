// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnt linear map of a readout's rows, y = x W, one W per head, and its derivatives. A readout
// whose member `weight` is a Param of shape (heads, columns of x, columns of y) uses it so:
//
//   Index work_rows(const Geometry& g, bool backward) const {
//     return LinearMap<Real>::work_rows(g.dim_v, backward);     columns of y
//   }
//   const LinearMap<Real> map(weight, panel);
//   const LaneTile<Real> y = map.product(panel.tile);           forward: y = x W
//   map.vjp(panel.saved, dy, panel.tile, grad.weight);          vjp: dx += dy W^T, dW += sum over the rows of x^T dy
//   map_column(x, weight, head, c)                              reference: column c of y for one row
//
// product() and vjp() keep y and dy in the first rows of panel.work. Several maps of a readout may use the same rows one
// after another. Results that must last need rows of their own behind those that work_rows() counts; apply() writes there.
//
// Accuracy sums over the columns of x in their order, each term one fused multiply-add
// Cost     columns of x times columns of y multiplications a row; vjp twice that

#include <heed/plug/readout.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {

// The gradient of rows over one panel, in the layouts of both products that read it.
template <class Real>
struct TurnedGradient {
  LaneTile<Real> lanes;  // [columns][lanes]
  const Real* rows;      // one row per lane, `stride` numbers apart
  Index stride;
};

template <class Real>
class LinearMap {
 public:
  // Both arguments must outlive the map. It uses W of the panel's head.
  LinearMap(const Param<Real>& weight, const ReadoutPanel<Real>& panel)
      : weight_(weight), panel_(panel) {}

  // Number of scratch lane rows of product(); with `backward`, those of turned() and vjp() included.
  [[nodiscard]] static Index work_rows(Index columns, bool backward) {
    return columns + (backward ? whole_vectors<Real>(columns) : 0);
  }

  // y = x W, or y += x W with Store::add. `y` must not be the memory of `x`.
  void apply(const LaneTile<const Real>& x, const LaneTile<Real>& y,
             Store store = Store::overwrite) const {
    panel_gemm(store, columns(), x.rows, panel_.vectors,
               Broadcast<Real>{of_head(weight_, x), 1, columns()}, x.data, x.lanes, y.data,
               y.lanes);
  }
  // x W, in the first rows of panel.work.
  [[nodiscard]] LaneTile<Real> product(const LaneTile<const Real>& x) const {
    const LaneTile<Real> y = panel_.work.part(0, columns());
    apply(x, y);
    return y;
  }

  // dy, and a copy of it with one row per lane, in the rows of panel.work behind the first dy.rows.
  [[nodiscard]] static TurnedGradient<Real> turned(const ReadoutPanel<Real>& panel,
                                                   const LaneTile<Real>& dy) {
    Real* rows = panel.work.row(dy.rows);
    const Index stride = whole_vectors<Real>(dy.rows);
    std::fill(rows, rows + panel.valid_lanes * stride, Real(0));
    unpack_lanes(dy.data, dy.lanes, panel.valid_lanes, dy.rows, rows, stride);
    return {dy, rows, stride};
  }
  // dx += dy W^T,  dW += sum over the valid lanes of x^T dy. Several maps with the same dy need only one turned().
  void vjp(const LaneTile<const Real>& x, const TurnedGradient<Real>& dy, const LaneTile<Real>& dx,
           Param<Real>& dweight) const {
    panel_gemm(Store::add, x.rows, columns(), panel_.vectors,
               Broadcast<Real>{of_head(weight_, x), columns(), 1}, dy.lanes.data, dy.lanes.lanes,
               dx.data, dx.lanes);
    gemm_add(x.rows, panel_.valid_lanes, columns(), Broadcast<Real>{x.data, x.lanes, 1}, dy.rows,
             dy.stride, of_head(dweight, x), columns());
  }
  void vjp(const LaneTile<const Real>& x, const LaneTile<Real>& dy, const LaneTile<Real>& dx,
           Param<Real>& dweight) const {
    vjp(x, turned(panel_, dy), dx, dweight);
  }

 private:
  [[nodiscard]] Index columns() const { return weight_.extent(2); }
  // W of the panel's head, in `weight_` or in its gradient.
  [[nodiscard]] auto* of_head(auto& weight, const LaneTile<const Real>& x) const {
    return weight.data() + panel_.head * x.rows * columns();
  }

  const Param<Real>& weight_;
  const ReadoutPanel<Real>& panel_;
};

// Reference: (x W)_c of one row x and W of head h.
template <class S>
[[nodiscard]] S map_column(const S* x, const Param<S>& weight, Index h, Index c) {
  const Index rows = weight.extent(1), columns = weight.extent(2);
  const S* column = weight.data() + h * rows * columns + c;
  return math::dot_product(
      rows, [=](Index r) { return x[r]; }, [=](Index r) { return column[r * columns]; });
}

}  // namespace HEED_ABI
}  // namespace heed
