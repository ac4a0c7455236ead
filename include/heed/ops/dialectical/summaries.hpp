// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dialectical attention on lanes, the part computed once per row: formulas (1) to (3) of
// ops/dialectical.hpp, forward and then backward. Forward and backward call the same compiled
// dialectical_summaries(), so that both halt the same rows; hence noinline.

#include <heed/ops/dialectical/parts.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/row_norm.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// Smallest |u| in the cosine, and term added to |z| in the halting rule.
inline constexpr double kDialecticalEps = 1e-6;

namespace detail {

// |x| of each lane
template <class Element, class Real = std::remove_const_t<Element>>
[[nodiscard]] inline Pack<Real> lane_norm(const LaneTile<Element>& x, int v) {
  return row_norm<Pack<Real>>(x.rows, [&](Index c) { return x.load(c, v); });
}

// One of the two readings of the lanes of vector v, with its norm.
template <class Real>
struct UnitReading {
  LaneTile<Real> u;
  int v;
  Pack<Real> norm, inverse;  // |u|, 1 / n with n = max(|u|, floor)

  UnitReading(const LaneTile<Real>& reading, int vector)
      : u(reading),
        v(vector),
        norm(lane_norm(reading, vector)),
        inverse(Real(1) / max(Pack<Real>(Real(kDialecticalEps)), norm)) {}

  // e = u / n
  [[nodiscard]] Pack<Real> unit(Index c) const { return u.load(c, v) * inverse; }
};

// cos = e+ . e-
template <class Real>
[[nodiscard]] inline Pack<Real> cosine_of(const UnitReading<Real>& positive,
                                          const UnitReading<Real>& negative) {
  Pack<Real> cosine = Real(0);
  for (Index c = 0; c < positive.u.rows; ++c) cosine += positive.unit(c) * negative.unit(c);
  return cosine;
}
// du += dcos (other e - cos e) / n; the term cos e is left out where |u| is below the smallest norm.
template <class Real>
inline void cosine_vjp(const UnitReading<Real>& own, const UnitReading<Real>& other,
                       Pack<Real> dcos, Pack<Real> cosine, const LaneTile<Real>& du) {
  using P = Pack<Real>;
  const P pull = select(own.norm < P(Real(kDialecticalEps)), P(Real(0)), cosine) * own.inverse;
  const P factor = dcos * own.inverse;
  for (Index c = 0; c < own.u.rows; ++c)
    du.add(c, own.v, factor * (other.unit(c) - pull * own.u.load(c, own.v)));
}

// Computes the summaries from mixed rows m, [d][lanes].
template <class Real>
[[gnu::noinline]] void dialectical_summaries(const DialecticalParams<Real>& w,
                                             const LaneTile<const Real>& mixed, int vectors,
                                             const DialecticalLanes<Real>& lanes) {
  const Index d = mixed.rows, row = mixed.lanes;
  // (1) u+ = Vp m,  u- = Vn m
  panel_gemm(Store::overwrite, d, d, vectors, Broadcast<Real>{w.v_pos.data(), d, 1}, mixed.data,
             row, lanes.positive().data, row);
  panel_gemm(Store::overwrite, d, d, vectors, Broadcast<Real>{w.v_neg.data(), d, 1}, mixed.data,
             row, lanes.negative().data, row);
  // (2) fixed = Su [u+|u-] + bs
  panel_gemm(Store::overwrite, d, 2 * d, vectors, Broadcast<Real>{w.synth.data(), 3 * d, 1},
             lanes.summary.data, row, lanes.fixed.data, row);
  for (Index c = 0; c < d; ++c)
    for (int v = 0; v < vectors; ++v) lanes.fixed.add(c, v, w.synth_bias[c]);
  // (3) tension = sigmoid(-cos)
  for (int v = 0; v < vectors; ++v) {
    const UnitReading<Real> positive(lanes.positive(), v), negative(lanes.negative(), v);
    const Pack<Real> tension = math::sigmoid(-cosine_of(positive, negative));
    tension.store(lanes.tension + v * kLanes<Real>);
  }
}

// Reads dfixed and dtension in the trace; writes dm into `dmixed`, and adds to the gradients of Vp, Vn, Su and bs.
template <class Real>
void dialectical_summaries_vjp(DialecticalBackward<Real>& pass, const LaneTile<const Real>& mixed,
                               const LaneTile<Real>& dmixed) {
  using P = Pack<Real>;
  auto& [w, lanes, trace, vectors, sums, grad] = pass;
  const Index d = mixed.rows, row = mixed.lanes;
  const LaneTile<Real> dsummary = trace.dsummary(d);
  const LaneTile<Real> dpositive = dsummary.part(0, d), dnegative = dsummary.part(d, d);
  // (3) dcos = -dtension tension (1 - tension), after d[u+|u-] = Su^T dfixed of (2)
  panel_gemm(Store::overwrite, 2 * d, d, vectors, Broadcast<Real>{w.synth.data(), 1, 3 * d},
             trace.dfixed.data, row, dsummary.data, row);
  for (int v = 0; v < vectors; ++v) {
    const Index at = v * kLanes<Real>;
    const P tension = P::load(lanes.tension + at), dtension = P::load(trace.dtension + at);
    const P dcos = -dtension * tension * (Real(1) - tension);
    const UnitReading<Real> positive(lanes.positive(), v), negative(lanes.negative(), v);
    const P cosine = cosine_of(positive, negative);
    cosine_vjp(positive, negative, dcos, cosine, dpositive);
    cosine_vjp(negative, positive, dcos, cosine, dnegative);
  }
  // (2) dSu = dfixed [u+|u-]^T,  dbs = dfixed
  sums.take_input(lanes.positive().constant());
  sums.add(trace.dfixed, grad.synth.data(), 3 * d);
  sums.take_input(lanes.negative().constant());
  sums.add(trace.dfixed, grad.synth.data() + d, 3 * d);
  for (Index c = 0; c < d; ++c) grad.synth_bias[c] += sums.sum(trace.dfixed.row(c));
  // (1) dVp = du+ m^T,  dVn = du- m^T,  dm = Vp^T du+ + Vn^T du-
  sums.take_input(mixed);
  sums.add(dpositive, grad.v_pos.data(), d);
  sums.add(dnegative, grad.v_neg.data(), d);
  panel_gemm(Store::overwrite, d, d, vectors, Broadcast<Real>{w.v_pos.data(), 1, d}, dpositive.data,
             row, dmixed.data, row);
  panel_gemm(Store::add, d, d, vectors, Broadcast<Real>{w.v_neg.data(), 1, d}, dnegative.data, row,
             dmixed.data, row);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
