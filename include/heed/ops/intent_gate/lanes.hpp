// SPDX-License-Identifier: Apache-2.0
#pragma once

// What all intent gates share (formulas: ops/intent_gate.hpp): the gate's arithmetic on lanes, products with a gate's
// weights, the grain and the bias.

#include <heed/plug/readout.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

enum class GateGrain { elementwise, per_head };

struct IntentGateOptions {
  GateGrain grain = GateGrain::elementwise;
  // Columns of I.
  [[nodiscard]] Index gate_dim(const Geometry& g) const {
    return grain == GateGrain::elementwise ? g.dim_v : 1;
  }
};

namespace detail {

// The gate's arithmetic on lanes. `logits` are I, one row per column or a single one.
template <class Real>
struct LaneGate {
  using P = Pack<Real>;
  Real bias;  // b0
  struct Sides {
    P open, shut;  // s and 1 - s
  };

  // From one exponential, e = exp(-|x|): 1 / (1 + e) and e / (1 + e).
  [[nodiscard]] static Sides sides(P x) {
    const P e = math::exp(P(-math::absolute(x)));
    const P large = Real(1) / (Real(1) + e), small = e * large;
    const auto negative = x < P(Real(0));
    return {select(negative, small, large), select(negative, large, small)};
  }

  // mixed -> out
  void forward(const ReadoutPanel<Real>& panel, const LaneTile<const Real>& logits) const {
    const bool shared = logits.rows == 1;
    for (int v = 0; v < panel.vectors; ++v) {
      P open = sides(logits.load(0, v) + bias).open;
      for (Index c = 0; c < panel.tile.rows; ++c) {
        if (c > 0 && !shared) open = sides(logits.load(c, v) + bias).open;
        panel.tile.store(c, v, panel.tile.load(c, v) * open);
      }
    }
  }

  // dout -> dmixed, delta and dlogits; returns db0. `dlogits` may be `logits`.
  double vjp(const ReadoutPanel<Real>& panel, const LaneTile<const Real>& logits,
             const LaneTile<Real>& dlogits) const {
    double dbias = 0.0;
    for (int v = 0; v < panel.vectors; ++v) {
      const P sum = logits.rows == 1 ? row_vjp(panel, logits, dlogits, v)
                                     : columns_vjp(panel, logits, dlogits, v);
      dbias += sum_valid_lanes(sum, v, panel.valid_lanes);
    }
    return dbias;
  }

 private:
  // dI of every column; returns their sum.
  [[nodiscard]] P columns_vjp(const ReadoutPanel<Real>& panel, const LaneTile<const Real>& logits,
                              const LaneTile<Real>& dlogits, int v) const {
    P delta = Real(0), sum = Real(0);
    for (Index c = 0; c < panel.tile.rows; ++c) {
      const auto [open, shut] = sides(logits.load(c, v) + bias);
      const P dout = panel.tile.load(c, v), pull = dout * panel.saved.load(c, v);
      const P dlogit = pull * shut;
      delta += pull;
      sum += dlogit;
      dlogits.store(c, v, dlogit);
      panel.tile.store(c, v, dout * open);
    }
    delta.store(panel.delta + v * kLanes<Real>);
    return sum;
  }

  // The same where one column gates the row.
  [[nodiscard]] P row_vjp(const ReadoutPanel<Real>& panel, const LaneTile<const Real>& logits,
                          const LaneTile<Real>& dlogits, int v) const {
    const auto [open, shut] = sides(logits.load(0, v) + bias);
    P delta = Real(0);
    for (Index c = 0; c < panel.tile.rows; ++c) {
      const P dout = panel.tile.load(c, v);
      delta += dout * panel.saved.load(c, v);
      panel.tile.store(c, v, dout * open);
    }
    delta.store(panel.delta + v * kLanes<Real>);
    dlogits.store(0, v, delta * shut);
    return delta * shut;
  }
};

// The gradient of I over one panel, laid out for both products that it takes part in.
template <class Real>
struct LogitGradient {
  LaneTile<Real> lanes;  // [columns][lanes]
  const Real* rows;      // one row per lane, `stride` numbers apart
  Index stride;
  int vectors;
  Index valid_lanes;
};

// y = x W of one head, on lanes, W (heads, x columns, gate columns).
template <class Real>
struct LaneProjection {
  const Param<Real>& weight;
  Index head;

  // y (+)= x W
  template <Store S>
  void apply(const LaneTile<const Real>& x, int vectors, const LaneTile<Real>& y) const {
    panel_gemm<S>(columns(), x.rows, vectors,
                  Broadcast<Real>{weight.data() + offset(x), 1, columns()}, x.data, x.lanes, y.data,
                  y.lanes);
  }
  // dx += dy W^T,  dW += sum over the valid lanes of x^T dy
  void vjp(const LaneTile<const Real>& x, const LogitGradient<Real>& dy, const LaneTile<Real>& dx,
           Param<Real>& dweight) const {
    panel_gemm<Store::add>(x.rows, columns(), dy.vectors,
                           Broadcast<Real>{weight.data() + offset(x), columns(), 1}, dy.lanes.data,
                           dy.lanes.lanes, dx.data, dx.lanes);
    gemm_add(x.rows, dy.valid_lanes, columns(), Broadcast<Real>{x.data, x.lanes, 1}, dy.rows,
             dy.stride, dweight.data() + offset(x), columns());
  }

 private:
  [[nodiscard]] Index columns() const { return weight.extent(2); }
  [[nodiscard]] Index offset(const LaneTile<const Real>& x) const {
    return head * x.rows * columns();
  }
};

// What every gate has: the grain and b0, and out = s o mixed in long hand.
template <class Real>
struct GateReadout : PlainReadout, IntentGateOptions {
  static constexpr bool gates = true;
  Param<Real> bias;  // b0; empty for none

  [[nodiscard]] LaneGate<Real> lane_gate(Index head) const {
    return {bias.given() ? bias.head(head) : Real(0)};
  }
  void add_bias_gradient(Index head, double dbias) {
    if (bias.given()) bias.head(head) += Real(dbias);
  }

  void check(const Geometry&, const char* where) const {
    require(grain == GateGrain::elementwise || grain == GateGrain::per_head, where, ": grain is ",
            int(grain), ", it must be elementwise or per_head");
  }

  // out = sigmoid(I + b0) o mixed in long hand; logit(b, h, i, c) is I.
  template <class S, class Logit>
  void gate_rows(ReadoutContext<S>& context, const Logit& logit) const {
    const Geometry& g = context.geometry;
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i)
          for (Index c = 0; c < g.dim_v; ++c) {
            S x = logit(b, h, i, grain == GateGrain::elementwise ? c : 0);
            if (bias.given()) x = x + bias.head(h);
            S* out = context.out_row(b, h, i);
            out[c] = math::sigmoid(x) * out[c];
          }
  }
};

// What gates with weights share: I is computed into panel.work; backward keeps dI in rows as well.
template <class Real>
struct WeightedGate : GateReadout<Real> {
  [[nodiscard]] Index work_rows(const Geometry& g, bool backward) const {
    const Index columns = this->gate_dim(g);
    return columns + (backward ? whole_vectors<Real>(columns) : 0);
  }

  // Shapes of the weights of query or key rows, and of value rows.
  [[nodiscard]] std::vector<Index> row_shape(const Geometry& g) const {
    return {g.heads, g.dim_qk, this->gate_dim(g)};
  }
  [[nodiscard]] std::vector<Index> value_shape(const Geometry& g) const {
    return {g.heads, g.dim_v, this->gate_dim(g)};
  }

  [[nodiscard]] static LaneProjection<Real> from(const Param<Real>& weight,
                                                 const ReadoutPanel<Real>& panel) {
    return {weight, panel.head};
  }
  // dout -> dmixed, delta and db0; dI in place of `logits`, and with one row per lane behind it.
  [[nodiscard]] LogitGradient<Real> gate_vjp(const ReadoutPanel<Real>& panel,
                                             const LaneTile<Real>& logits,
                                             GateReadout<Real>& grad) const {
    const double dbias = this->lane_gate(panel.head).vjp(panel, logits.constant(), logits);
    grad.add_bias_gradient(panel.head, dbias);
    Real* rows = panel.work.row(logits.rows);
    const Index stride = whole_vectors<Real>(logits.rows);
    std::fill(rows, rows + panel.valid_lanes * stride, Real(0));
    unpack_lanes(logits.data, logits.lanes, panel.valid_lanes, logits.rows, rows, stride);
    return {logits, rows, stride, panel.vectors, panel.valid_lanes};
  }

  // (x W)_c of one row in long hand.
  template <class S>
  [[nodiscard]] static S product(const S* x, const Param<S>& weight, Index h, Index c) {
    const Index rows = weight.extent(1), columns = weight.extent(2);
    const S* column = weight.data() + h * rows * columns + c;
    return math::dot_product(
        rows, [=](Index r) { return x[r]; }, [=](Index r) { return column[r * columns]; });
  }
};

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
