// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dialectical attention forward, on lanes: the summaries and one step of the recursion. Forward,
// survey and backward call the same two compiled functions, so that they agree on who halts to the
// last bit; hence noinline.

#include <heed/ops/dialectical/parts.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/row_norm.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// Floor of |u| in the cosine and summand of |z| in the halting rule.
inline constexpr double kDialecticalEps = 1e-6;

namespace detail {

// |x| of each lane
template <class Element, class Real = std::remove_const_t<Element>>
[[nodiscard]] inline Pack<Real> lane_norm(const LaneTile<Element>& x, int v) {
  return row_norm<Pack<Real>>(x.rows, [&](Index c) { return x.load(c, v); });
}

// 1 / (1 + e^-x), exactly 0 in the far left tail, so that x times it is 0 there too.
template <class Real>
[[nodiscard]] inline Pack<Real> logistic(Pack<Real> x) {
  return Real(1) / (Real(1) + math::exp(-x));
}

// 1 / max(|u|, floor)
template <class Real>
[[nodiscard]] inline Pack<Real> inverse_length(const LaneTile<Real>& u, int v) {
  return Real(1) / max(Pack<Real>(Real(kDialecticalEps)), lane_norm(u, v));
}

// tension = sigmoid(-cos(u+, u-))
template <class Real>
[[nodiscard]] inline Pack<Real> tension_of(const LaneTile<Real>& positive,
                                           const LaneTile<Real>& negative, int v) {
  const Pack<Real> inverse_pos = inverse_length(positive, v);
  const Pack<Real> inverse_neg = inverse_length(negative, v);
  Pack<Real> cosine = Real(0);
  for (Index c = 0; c < positive.rows; ++c)
    cosine += (positive.load(c, v) * inverse_pos) * (negative.load(c, v) * inverse_neg);
  return logistic(-cosine);
}

// u+, u-, tension and [u+|u-] Su^T + bs from mixed rows [d][lanes].
template <class Real>
[[gnu::noinline]] void dialectical_summaries(const DialecticalParams<Real>& w,
                                             const LaneTile<const Real>& mixed, int vectors,
                                             const DialecticalLanes<Real>& lanes) {
  const Index d = mixed.rows, row = mixed.lanes;
  panel_gemm<Store::overwrite>(d, d, vectors, Broadcast<Real>{w.v_pos.data(), d, 1}, mixed.data,
                               row, lanes.positive().data, row);
  panel_gemm<Store::overwrite>(d, d, vectors, Broadcast<Real>{w.v_neg.data(), d, 1}, mixed.data,
                               row, lanes.negative().data, row);
  panel_gemm<Store::overwrite>(d, 2 * d, vectors, Broadcast<Real>{w.synth.data(), 3 * d, 1},
                               lanes.summary.data, row, lanes.fixed.data, row);
  for (Index c = 0; c < d; ++c)
    for (int v = 0; v < vectors; ++v) lanes.fixed.add(c, v, w.synth_bias[c]);
  for (int v = 0; v < vectors; ++v)
    tension_of(lanes.positive(), lanes.negative(), v).store(lanes.tension + v * kLanes<Real>);
}

// Nobody has moved; the first `valid_lanes` are active.
template <class Real>
void begin_recursion(const DialecticalLanes<Real>& lanes, Index valid_lanes) {
  const Index count = lanes.step.lanes;
  for (Index i = 0; i < count; ++i) {
    lanes.active[i] = i < valid_lanes ? Real(1) : Real(0);
    lanes.steps_used[i] = lanes.updates[i] = Real(0);
  }
}

// Where one step reads and writes, each [d][lanes].
template <class Real>
struct DialecticalStep {
  LaneTile<const Real> z;
  LaneTile<Real> argument;  // out: a; may be the memory of lanes.step
  LaneTile<Real> next;      // out: z after the step; may be the memory of z
  Real* gate;               // out, [lanes]: sigmoid(z . g + bg)
};

// The lanes of vector v: the step, the halting rule, the move.
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
  const auto done = lane_norm(lanes.step, v) / length < P(Real(options.halt_eps));
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

template <class Real>
[[gnu::noinline]] void dialectical_step(const DialecticalParams<Real>& w,
                                        const DialecticalOptions& options,
                                        const DialecticalLanes<Real>& lanes,
                                        const DialecticalStep<Real>& s, int vectors) {
  const Index d = s.z.rows, row = s.z.lanes;
  panel_gemm<Store::overwrite>(d, d, vectors, Broadcast<Real>{w.synth.data() + 2 * d, 3 * d, 1},
                               s.z.data, row, s.argument.data, row);
  panel_gemm<Store::overwrite>(1, d, vectors, Broadcast<Real>{w.gate.data(), d, 1}, s.z.data, row,
                               s.gate, row);
  for (int v = 0; v < vectors; ++v) move_lanes(w, options, lanes, s, v);
}

// Is a row still active? Stopping when none is changes no bits of per_token results.
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
