// SPDX-License-Identifier: Apache-2.0
#pragma once

// The parts that all intent gates share (formulas: ops/intent_gate.hpp): the gate's arithmetic on
// lanes, the grain and the bias.

#include <heed/plug/linear_map.hpp>
#include <heed/simd/exp.hpp>

#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

enum class GateGrain { elementwise, per_head };

struct IntentGateOptions {
  GateGrain grain = GateGrain::elementwise;
  // Number of columns of I.
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

  // s and 1 - s from one exponential, e = exp(-|x|): 1 / (1 + e) and e / (1 + e).
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

  // dI of the one column that gates the whole row; returns its sum.
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

// The base of every gate: the grain and b0, and the reference of out = s o mixed.
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

  // Reference: out = sigmoid(I + b0) o mixed; logit(b, h, i, c) is I.
  template <class S, class Logit>
  void gate_rows(ReadoutContext<S>& context, const Logit& logit) const {
    const Geometry& g = context.geometry;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index i) {
      S* out = context.out_row(b, h, i);
      for (Index c = 0; c < g.dim_v; ++c) {
        S x = logit(b, h, i, grain == GateGrain::elementwise ? c : 0);
        if (bias.given()) x = x + bias.head(h);
        out[c] = math::sigmoid(x) * out[c];
      }
    });
  }
};

// The base of gates with weights: I is computed into panel.work, and dI replaces it.
template <class Real>
struct WeightedGate : GateReadout<Real> {
  [[nodiscard]] Index work_rows(const Geometry& g, bool backward) const {
    return LinearMap<Real>::work_rows(this->gate_dim(g), backward);
  }

  // Shapes of the weights of query or key rows, and of value rows.
  [[nodiscard]] std::vector<Index> row_shape(const Geometry& g) const {
    return {g.heads, g.dim_qk, this->gate_dim(g)};
  }
  [[nodiscard]] std::vector<Index> value_shape(const Geometry& g) const {
    return {g.heads, g.dim_v, this->gate_dim(g)};
  }

  // dout -> dmixed, delta and db0; dI in place of `logits`.
  [[nodiscard]] TurnedGradient<Real> gate_vjp(const ReadoutPanel<Real>& panel,
                                              const LaneTile<Real>& logits,
                                              GateReadout<Real>& grad) const {
    const double dbias = this->lane_gate(panel.head).vjp(panel, logits.constant(), logits);
    grad.add_bias_gradient(panel.head, dbias);
    return LinearMap<Real>::turned(panel, logits);
  }
};

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
