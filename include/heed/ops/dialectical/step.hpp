// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dialectical attention on lanes, one step of the recursion: formulas (4) to (6) of
// ops/dialectical.hpp, forward and then backward, and the halting of rows. Forward and backward
// call the same compiled dialectical_step(), so that both halt the same rows; hence noinline.

#include <heed/ops/dialectical/summaries.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// 1 / (1 + e^-x), exactly 0 in the far left tail, so that x times it is 0 there too; math::sigmoid is 1e-38 there.
template <class Real>
[[nodiscard]] inline Pack<Real> logistic(Pack<Real> x) {
  return Real(1) / (Real(1) + math::exp(-x));
}

// No row has moved; the first `valid_lanes` are active.
template <class Real>
void begin_recursion(const DialecticalLanes<Real>& lanes, Index valid_lanes) {
  const Index count = lanes.step.lanes;
  for (Index i = 0; i < count; ++i) {
    lanes.active[i] = i < valid_lanes ? Real(1) : Real(0);
    lanes.steps_used[i] = lanes.updates[i] = Real(0);
  }
}

// The memory that one step reads and writes, each [d][lanes].
template <class Real>
struct DialecticalStep {
  LaneTile<const Real> z;
  LaneTile<Real> argument;  // out: a; may be the memory of lanes.step
  LaneTile<Real> next;      // out: z after the step; may be the memory of z
  Real* gate;               // out, [lanes]: g
};

// The lanes of vector v: the step, the halting rule, the move. `argument` holds Sz z, `gate` z . gate.
template <class Real>
inline void move_lanes(const DialecticalParams<Real>& w, const DialecticalOptions& options,
                       const DialecticalLanes<Real>& lanes, const DialecticalStep<Real>& s, int v) {
  using P = Pack<Real>;
  const Index d = s.z.rows, at = v * kLanes<Real>;
  const P gate = logistic(P::load(s.gate + at) + w.gate_bias[0]);
  gate.store(s.gate + at);
  const P strength = gate * P::load(lanes.tension + at);
  for (Index c = 0; c < d; ++c) {
    const P a = s.argument.load(c, v) + lanes.fixed.load(c, v);
    s.argument.store(c, v, a);
    lanes.step.store(c, v, strength * (a * logistic(a)));
  }
  const P length = lane_norm(s.z, v) + Real(kDialecticalEps);
  const auto done = lane_norm(lanes.step, v) / length < P(Real(options.small_step()));
  const P active = P::load(lanes.active + at), zero = Real(0);
  const P moved = options.halting == Halting::batch ? P(Real(1)) : active;
  (P::load(lanes.steps_used + at) + select(done, zero, moved)).store(lanes.steps_used + at);
  (P::load(lanes.updates + at) + moved).store(lanes.updates + at);
  select(done, zero, active).store(lanes.active + at);
  const auto moves = moved > zero;
  for (Index c = 0; c < d; ++c) {
    const P z = s.z.load(c, v);
    s.next.store(c, v, select(moves, z + lanes.step.load(c, v), z));
  }
}
// From dz of z_(t+1): da into lanes.step, dl into trace.dlogit; adds to dfixed and dtension. All
// are 0 for a row that the step did not move.
template <class Real>
inline void move_lanes_vjp(const DialecticalLanes<Real>& lanes, const DialecticalTrace<Real>& trace,
                           Index t, const LaneTile<Real>& dz, int v) {
  using P = Pack<Real>;
  const Index d = dz.rows, at = v * kLanes<Real>;
  const P gate = trace.gate.load(t, v), tension = P::load(lanes.tension + at), zero = Real(0);
  const auto moved = trace.moved.load(t, v) > zero;
  const P strength = gate * tension;
  P dz_h = zero;  // dz . silu(a)
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

template <class Real>
[[gnu::noinline]] void dialectical_step(const DialecticalParams<Real>& w,
                                        const DialecticalOptions& options,
                                        const DialecticalLanes<Real>& lanes,
                                        const DialecticalStep<Real>& s, int vectors) {
  const Index d = s.z.rows, row = s.z.lanes;
  // (5) Sz z_t
  panel_gemm(Store::overwrite, d, d, vectors, Broadcast<Real>{w.synth.data() + 2 * d, 3 * d, 1},
             s.z.data, row, s.argument.data, row);
  // (4) z_t . gate
  panel_gemm(Store::overwrite, 1, d, vectors, Broadcast<Real>{w.gate.data(), d, 1}, s.z.data, row,
             s.gate, row);
  // (4) to (6) of each lane
  for (int v = 0; v < vectors; ++v) move_lanes(w, options, lanes, s, v);
}
// Backward of step t. dz holds the gradient of z after the step, and gets that of `z`, the rows
// before it; adds to the gradients of Sz, gate and bg.
template <class Real>
void dialectical_step_vjp(DialecticalBackward<Real>& pass, Index t, const LaneTile<const Real>& z,
                          const LaneTile<Real>& dz) {
  auto& [w, lanes, trace, vectors, sums, grad] = pass;
  const Index d = dz.rows, row = dz.lanes;
  // (6) to (4) of each lane: da, dl
  for (int v = 0; v < vectors; ++v) move_lanes_vjp(lanes, trace, t, dz, v);
  // (5) dz_t += Sz^T da,  dSz += da z_t^T
  panel_gemm(Store::add, d, d, vectors, Broadcast<Real>{w.synth.data() + 2 * d, 1, 3 * d},
             lanes.step.data, row, dz.data, row);
  sums.take_input(z);
  sums.add(lanes.step, grad.synth.data() + 2 * d, 3 * d);
  // (4) dz_t += dl gate,  dgate += dl z_t,  dbg += dl
  panel_gemm(Store::add, d, 1, vectors, Broadcast<Real>{w.gate.data(), 1, d}, trace.dlogit, row,
             dz.data, row);
  sums.add({trace.dlogit, 1, row}, grad.gate.data(), d);
  grad.gate_bias[0] += sums.sum(trace.dlogit);
}

// True if a row is still active. Stopping when none is changes no bits of per_token results.
template <class Real>
[[nodiscard]] bool any_active(const DialecticalLanes<Real>& lanes, int vectors) {
  Pack<Real> most = Real(0);
  for (int v = 0; v < vectors; ++v)
    most = max(Pack<Real>::load(lanes.active + v * kLanes<Real>), most);
  return any_lane(most > Pack<Real>(Real(0)));
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
