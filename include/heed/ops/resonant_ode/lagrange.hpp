// SPDX-License-Identifier: Apache-2.0
#pragma once

// The resonant flow with a Lagrange multiplier, for one vector of queries (lanes) and all keys of their rows
// (formulas and bounds: ops/resonant_ode.hpp).
//
//   a_(t+1) = a_t + eta (D - a_t) - m_t,   m_t such that sum a_(t+1) = 1,   a_0 = 1/N
//
// over the N visible keys: m_t = eta (mean D - 1/N), hence the closed form a_n = 1/N + w (D - mean D) with
// w = 1 - (1 - eta)^n, and 1 for n = infinity. No exponential is taken: lse is the logarithm of the weights' sum, 0.

#include <heed/ops/resonant_ode/flow.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The factor that n Euler steps of rate eta put on a deviation from the mean.
struct LagrangeGain {
  double w = 1, slope = 0;  // w and dw/deta
  double last_step = 0;     // w_n - w_(n-1)

  [[nodiscard]] static LagrangeGain after(int steps, double eta) {
    const double kappa = 1 - eta;
    const bool cancels = std::abs(eta) < 0.5;  // 1 - kappa^n would lose digits
    const double w = cancels ? -std::expm1(steps * std::log1p(-eta)) : 1 - std::pow(kappa, steps);
    const double previous_power = std::pow(kappa, steps - 1);
    return {w, steps * previous_power, eta * previous_power};
  }
};

// Count, mean and deviations of the visible entries of one row vector.
template <class Real>
struct LagrangeFlow {
  using P = Pack<Real>;
  Index keys;
  TileColumn<Real> drive;
  P top, share, mean;  // largest D, 1/N (0 for no key), mean of D - top

  LagrangeFlow(const RowBlock<Real>& block, int v)
      : keys(block.keys()),
        drive(column_of(block.scores[0], v)),
        top(P::load(block.score_max[0] + v * kLanes<Real>)) {
    share = inverse_or_zero(count_visible(drive, keys));
    mean = Real(0);
    // The second pass adds the rounding error of the first: an error of the mean is an error of every weight.
    for (int pass = 0; pass < 2; ++pass)
      mean += share * sum_over_keys<Real>(keys, [&](Index j) {
                const P d = drive.load(j);
                return zero_where(is_hidden(d), deviation(d));
              });
  }

  // x, but NaN for a row whose drives are not all finite.
  [[nodiscard]] P or_nan(P x) const { return select(mean == mean, x, mean); }
  // D_j - mean D of a visible entry.
  [[nodiscard]] P deviation(P d) const { return (d - top) - mean; }
  [[nodiscard]] P weight(P d, Real w) const {
    return zero_where(is_hidden(d), mul_add(deviation(d), P(w), share));
  }
};

// Turns scores into weights.
template <class Real>
inline void resonant_lagrange_forward(const RowBlock<Real>& block, int v,
                                      const LagrangeGain& gain) {
  using P = Pack<Real>;
  const LagrangeFlow<Real> flow(block, v);
  P largest = Real(0);
  for (Index j = 0; j < flow.keys; ++j) {
    const P d = flow.drive.load(j);
    const P deviation = zero_where(is_hidden(d), flow.deviation(d));
    largest = max(largest, math::absolute(deviation));
    flow.drive.store(j, flow.weight(d, Real(gain.w)));
  }
  const P lse = select(flow.share == P(Real(0)), P(-kInfinity<Real>), flow.or_nan(P(Real(0))));
  report(block, v, lse, flow.or_nan(largest * Real(std::abs(gain.last_step))));
}

// dL/dD = w (X - mean X); returns the lane-wise gradient of eta, dw/deta <D - mean D, X - mean X>.
template <class Real>
[[nodiscard]] inline Pack<Real> resonant_lagrange_vjp(const RowBlock<Real>& block, int v,
                                                      const LagrangeGain& gain) {
  using P = Pack<Real>;
  const LagrangeFlow<Real> flow(block, v);
  const auto dweights = column_of(block.dweights, v), weights = column_of(block.weights, v);
  const auto dscores = column_of(block.dscores[0], v);
  const P mean = flow.share * sum_over_keys<Real>(flow.keys, [&](Index j) {
                   return zero_where(is_hidden(flow.drive.load(j)), dweights.load(j));
                 });
  const P slope = flow.or_nan(Real(gain.w));
  const P dot = sum_over_keys<Real>(flow.keys, [&](Index j) {
    const P d = flow.drive.load(j);
    const P x = zero_where(is_hidden(d), dweights.load(j) - mean);
    weights.store(j, flow.weight(d, Real(gain.w)));  // may share memory with dweights
    dscores.store(j, zero_where(is_hidden(d), x * slope));
    return zero_where(is_hidden(d), x * flow.deviation(d));
  });
  return dot * Real(gain.slope);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
