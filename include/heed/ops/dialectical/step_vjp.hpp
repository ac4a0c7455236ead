// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dialectical attention backward, on lanes. Halting decisions are constants. For a row that step t
// moved, with dz = dL/dz_{t+1}, h = silu(a), s = sigmoid(a):
//
//   z_{t+1} = z_t + g tension h     dg = tension (dz . h)     dtension += g (dz . h)
//   a = fixed + Sz z_t              da = dz g tension s (1 + a (1 - s))     dfixed += da
//   g = sigmoid(z_t . gate + bg)    dl = dg g (1 - g)
//   dz_t = dz + Sz^T da + dl gate   dSz += da z_t^T     dgate += dl z_t     dbg += dl
//
// Then, with e = u / n, n = max(|u|, floor); the term cos e is left out where the floor holds:
//
//   fixed = Su [u+|u-] + bs     d[u+|u-] = Su^T dfixed    dSu = dfixed [u+|u-]^T    dbs = dfixed
//   tension = sigmoid(-cos)     dcos = -dtension tension (1 - tension)
//   cos = e+ . e-               du+ += dcos (e- - cos e+) / n+    du- += dcos (e+ - cos e-) / n-
//   u+ = Vp m,  u- = Vn m       dm = Vp^T du+ + Vn^T du-    dVp = du+ m^T    dVn = du- m^T

#include <heed/ops/dialectical/step.hpp>
#include <heed/plug/normaliser.hpp>
#include <heed/simd/transpose.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// What is added up for the parameters over one panel.
template <class Real>
class WeightGradients {
 public:
  WeightGradients(const LaneTile<Real>& natural, Index valid_lanes)
      : natural_(natural.data), row_(natural.rows), valid_lanes_(valid_lanes) {}

  // The right factor of the products to come, [d][lanes].
  void take_input(const LaneTile<const Real>& x) {
    dim_ = x.rows;
    unpack_lanes(x.data, x.lanes, valid_lanes_, x.rows, natural_, row_);
  }
  // to[r][c] += sum over lanes of dout[r] x[c]
  void add(const LaneTile<Real>& dout, Real* to, Index to_row) const {
    gemm_add(dout.rows, valid_lanes_, dim_, Broadcast<Real>{dout.data, dout.lanes, 1}, natural_,
             row_, to, to_row);
  }
  [[nodiscard]] Real sum(const Real* lanes) const {
    return Real(sum_valid_lanes(lanes, valid_lanes_));
  }

 private:
  Real* natural_;
  Index row_, dim_ = 0, valid_lanes_;
};

// Lanes of vector v of one step: da into lanes.step, dl into trace.dlogit.
template <class Real>
inline void step_vjp_lanes(const DialecticalLanes<Real>& lanes, const DialecticalTrace<Real>& trace,
                           Index t, const LaneTile<Real>& dz, int v) {
  using P = Pack<Real>;
  const Index d = dz.rows, at = v * kLanes<Real>;
  const P gate = trace.gate.load(t, v), tension = P::load(lanes.tension + at), zero = Real(0);
  const auto moved = trace.moved.load(t, v) > zero;
  const P strength = gate * tension;
  P dz_h = zero;
  for (Index c = 0; c < d; ++c) {
    const P a = trace.argument.load(t * d + c, v), s = logistic(a), g = dz.load(c, v);
    dz_h += g * (a * s);
    const P da = select(moved, g * strength * (s * (Real(1) + a * (Real(1) - s))), zero);
    lanes.step.store(c, v, da);
    trace.dfixed.add(c, v, da);
  }
  dz_h = select(moved, dz_h, zero);
  (P::load(trace.dtension + at) + dz_h * gate).store(trace.dtension + at);
  (dz_h * tension * gate * (Real(1) - gate)).store(trace.dlogit + at);
}

// Step t of dz: gradient of z after the step in, of z before it out.
template <class Real>
void dialectical_step_vjp(const DialecticalParams<Real>& w, const DialecticalLanes<Real>& lanes,
                          const DialecticalTrace<Real>& trace, Index t, const LaneTile<Real>& dz,
                          int vectors) {
  const Index d = dz.rows, row = dz.lanes;
  for (int v = 0; v < vectors; ++v) step_vjp_lanes(lanes, trace, t, dz, v);
  panel_gemm<Store::add>(d, d, vectors, Broadcast<Real>{w.synth.data() + 2 * d, 1, 3 * d},
                         lanes.step.data, row, dz.data, row);
  panel_gemm<Store::add>(d, 1, vectors, Broadcast<Real>{w.gate.data(), 1, d}, trace.dlogit, row,
                         dz.data, row);
}

// Adds the part of the step that lanes.step and trace.dlogit hold, made from rows z.
template <class Real>
void add_step_weights(const DialecticalLanes<Real>& lanes, const DialecticalTrace<Real>& trace,
                      const LaneTile<const Real>& z, WeightGradients<Real>& sums,
                      DialecticalParams<Real>& grad) {
  const Index d = z.rows;
  sums.take_input(z);
  sums.add(lanes.step, grad.synth.data() + 2 * d, 3 * d);
  sums.add({trace.dlogit, 1, z.lanes}, grad.gate.data(), d);
  grad.gate_bias[0] += sums.sum(trace.dlogit);
}

// du += dcos (other - cos own) / n, with other and own of unit length.
template <class Real>
inline void cosine_vjp(const LaneTile<Real>& own, const LaneTile<Real>& other, Pack<Real> dcos,
                       Pack<Real> cosine, const LaneTile<Real>& du, int v) {
  using P = Pack<Real>;
  const P floor = Real(kDialecticalEps), norm = lane_norm(own, v);
  const P inverse = Real(1) / max(floor, norm), inverse_other = inverse_length(other, v);
  const P pull = select(norm < floor, P(Real(0)), cosine) * inverse;
  const P factor = dcos * inverse;
  for (Index c = 0; c < own.rows; ++c)
    du.add(c, v, factor * (other.load(c, v) * inverse_other - pull * own.load(c, v)));
}

// Gradients of u+ and u- from trace.dfixed and trace.dtension.
template <class Real>
void summaries_vjp(const DialecticalParams<Real>& w, const DialecticalLanes<Real>& lanes,
                   const DialecticalTrace<Real>& trace, const LaneTile<Real>& dsummary,
                   int vectors) {
  using P = Pack<Real>;
  const Index d = lanes.step.rows, row = lanes.step.lanes;
  panel_gemm<Store::overwrite>(2 * d, d, vectors, Broadcast<Real>{w.synth.data(), 1, 3 * d},
                               trace.dfixed.data, row, dsummary.data, row);
  const LaneTile<Real> positive = lanes.positive(), negative = lanes.negative();
  for (int v = 0; v < vectors; ++v) {
    const Index at = v * kLanes<Real>;
    const P tension = P::load(lanes.tension + at), dtension = P::load(trace.dtension + at);
    const P dcos = -dtension * tension * (Real(1) - tension);
    const P inverse_pos = inverse_length(positive, v), inverse_neg = inverse_length(negative, v);
    P cosine = Real(0);
    for (Index c = 0; c < d; ++c)
      cosine += (positive.load(c, v) * inverse_pos) * (negative.load(c, v) * inverse_neg);
    cosine_vjp(positive, negative, dcos, cosine, dsummary.part(0, d), v);
    cosine_vjp(negative, positive, dcos, cosine, dsummary.part(d, d), v);
  }
}

// Adds the gradients of the parameters that make the summaries from the mixed rows.
template <class Real>
void add_summary_weights(const DialecticalLanes<Real>& lanes, const DialecticalTrace<Real>& trace,
                         const LaneTile<const Real>& mixed, const LaneTile<Real>& dsummary,
                         WeightGradients<Real>& sums, DialecticalParams<Real>& grad) {
  const Index d = mixed.rows;
  sums.take_input(lanes.positive().constant());
  sums.add(trace.dfixed, grad.synth.data(), 3 * d);
  sums.take_input(lanes.negative().constant());
  sums.add(trace.dfixed, grad.synth.data() + d, 3 * d);
  for (Index c = 0; c < d; ++c) grad.synth_bias[c] += sums.sum(trace.dfixed.row(c));
  sums.take_input(mixed);
  sums.add(dsummary.part(0, d), grad.v_pos.data(), d);
  sums.add(dsummary.part(d, d), grad.v_neg.data(), d);
}

// dm = Vp^T du+ + Vn^T du-
template <class Real>
void mixed_vjp(const DialecticalParams<Real>& w, const LaneTile<Real>& dsummary, int vectors,
               const LaneTile<Real>& dmixed) {
  const Index d = dmixed.rows, row = dmixed.lanes;
  panel_gemm<Store::overwrite>(d, d, vectors, Broadcast<Real>{w.v_pos.data(), 1, d}, dsummary.data,
                               row, dmixed.data, row);
  panel_gemm<Store::add>(d, d, vectors, Broadcast<Real>{w.v_neg.data(), 1, d}, dsummary.row(d), row,
                         dmixed.data, row);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
