// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dialectical attention on lanes, Halting::adaptive: formulas (7) and (8) of ops/dialectical.hpp, forward and then
// backward. Forward and backward call the same compiled ponder_step(), so that they agree on who halts to the last bit;
// hence noinline.

#include <heed/ops/dialectical/step.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Sets the sums to 0 before the first step.
template <class Real>
void begin_pondering(const PonderLanes<Real>& ponder) {
  const Index count = ponder.weight.lanes;
  for (Index i = 0; i < count; ++i) ponder.spent[i] = ponder.steps[i] = ponder.moved[i] = Real(0);
}

// After step n, counted from 1: finds the weights that the rows which it moved give to z_n, in
// ponder.weight, and halts rows. With `last` set all remaining rows halt.
template <class Real>
[[gnu::noinline]] void ponder_step(const DialecticalParams<Real>& w,
                                   const DialecticalOptions& options, Index head,
                                   const DialecticalLanes<Real>& lanes,
                                   const PonderLanes<Real>& ponder, const LaneTile<const Real>& z,
                                   Index n, bool last, int vectors) {
  using P = Pack<Real>;
  const P zero = Real(0), one = Real(1), enough = Real(1 - options.spare_eps);
  // (7) h = sigmoid(halt . z_n + bh)
  panel_gemm(Store::overwrite, 1, z.rows, vectors,
             Broadcast<Real>{w.halt.data() + head * z.rows, z.rows, 1}, z.data, z.lanes,
             ponder.weight.data, ponder.weight.lanes);
  for (int v = 0; v < vectors; ++v) {
    const Index at = v * kLanes<Real>;
    const P h = logistic(ponder.weight.load(0, v) + w.halt_bias[head]);
    const P active = P::load(lanes.active + at), spent = P::load(ponder.spent + at);
    const P total = spent + h, left = one - spent;
    const P going = last ? zero : select(total >= enough, zero, active);
    const auto goes = going > zero, moved = active > zero;
    // p = h, and R = 1 - sum of the earlier h in the step that halts; rho = n + R
    ponder.weight.store(0, v, select(moved, select(goes, h, left), zero));
    const P steps = P::load(ponder.steps + at);
    select(moved, select(goes, zero, Real(n) + left), steps).store(ponder.steps + at);
    select(moved, total, spent).store(ponder.spent + at);
    active.store(ponder.moved + at);
    going.store(lanes.active + at);
  }
}

// (8) out += p_n z_n
template <class Real>
void add_pondered(const PonderLanes<Real>& ponder, const LaneTile<const Real>& z, int vectors,
                  const LaneTile<Real>& out) {
  using P = Pack<Real>;
  for (int v = 0; v < vectors; ++v) {
    const P weight = ponder.weight.load(0, v);
    const auto moved = P::load(ponder.moved + v * kLanes<Real>) > P(Real(0));
    for (Index c = 0; c < z.rows; ++c)
      out.add(c, v, select(moved, weight * z.load(c, v), P(Real(0))));
  }
}
// Backward of step t, counted from 0, which ends with z_n, n = t + 1. Adds to ponder.dz, the
// gradient of z_n, and to the gradients of the halting unit.
template <class Real>
void ponder_step_vjp(DialecticalBackward<Real>& pass, const PonderTrace<Real>& ponder, Index head,
                     Index t, const LaneTile<const Real>& dout, const Real* dsteps) {
  using P = Pack<Real>;
  auto& [w, lanes, trace, vectors, sums, grad] = pass;
  const Index d = dout.rows, row = dout.lanes;
  const LaneTile<const Real> z = trace.z.part(t * d, d).constant();
  const P zero = Real(0);
  for (int v = 0; v < vectors; ++v) {
    const Index at = v * kLanes<Real>;
    const P p = ponder.weight.load(t, v);
    const auto moved = trace.moved.load(t, v) > zero;
    const auto halted = P::load(lanes.updates + at) == P(Real(t + 1));
    // (8) dp = dout . z_n,  dz_n += p_n dout
    P dp = zero;
    for (Index c = 0; c < d; ++c) {
      const P g = dout.load(c, v);
      dp += g * z.load(c, v);
      ponder.dz.add(c, v, select(moved, p * g, zero));
    }
    // (7) dR = dp_N + drho where the row halts; dh_n = dp_n - dR before,  dl = dh h (1 - h)
    const P dlast = select(halted, dp + P::load(dsteps + at), P::load(ponder.dlast + at));
    dlast.store(ponder.dlast + at);
    const P dl = (dp - dlast) * p * (Real(1) - p);
    ponder.dlogit.store(0, v, select(moved, select(halted, zero, dl), zero));
  }
  // (7) dz_n += dl halt,  dhalt += dl z_n,  dbh += dl
  panel_gemm(Store::add, d, 1, vectors, Broadcast<Real>{w.halt.data() + head * d, 1, d},
             ponder.dlogit.data, row, ponder.dz.data, row);
  sums.take_input(z);
  sums.add(ponder.dlogit, grad.halt.data() + head * d, d);
  grad.halt_bias[head] += sums.sum(ponder.dlogit.data);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
