// SPDX-License-Identifier: Apache-2.0
#pragma once

// Resonant attention as a differential equation: the weights of a row flow towards keys that lie close to its query, da/dt
// = eta (D - a) with sum a = 1, for some Euler steps or until they no longer change. Distance counts beside the dot
// product, and the rate of the flow decides how much of the row's previous weights a step keeps.
//
// The drive, without the row constant -rho |q_i|^2 of S_ij = scale q_i.k_j - rho |q_i - k_j|^2, which cancels in
// every softmax and in D - mean D: one product q.k, one number per key, no tensor of len_q x len_kv x dim.
//
//   D_ij = logit_ij + rho (2 q_i.k_j - |k_j|^2)
//   dlogit = G      d(q.k) = 2 rho G      d|k|^2 = -rho G      drho = sum_ij G_ij (2 q_i.k_j - |k_j|^2)
//
// with G = dL/dD, whose rows sum to 0 for every flow, so that the constant that was left out has no gradient either.
//
// The flow, from a_0 = 1/N over the N visible keys, in four modes. kappa = 1 - eta, X = dL/da:
//
//   steps, n times a <- softmax(a + eta (D - a))
//     a_1 = softmax(eta D)
//     a_(t+1) = softmax(kappa a_t + eta D)         g_t = a_t o kappa (g_(t+1) - <a_t, g_(t+1)>)
//     a = a_n                                      g_n = a_n o (X - <a_n, X>)
//                                                  G = eta sum_t g_t
//                                                  deta = <sum_t g_t, D> - sum_(t>=2) <g_t, a_(t-1)>
//   equilibrium, the fixed point of that step
//     a = softmax(kappa a + eta D)                 h = b o (X - sum(b X) / sum(b)),   b = a / (1 - kappa a)
//                                                  G = eta h
//                                                  deta = sum_j (D_j - a_j) h_j
//   lagrange, n times a <- a + eta (D - a) - multiplier
//     a = 1/N + w (D - mean D)                     G = w (X - mean X)
//     w = 1 - kappa^n                              deta = n kappa^(n-1) <D - mean D, X - mean X>
//   lagrange_equilibrium, the fixed point of that
//     a = 1/N + D - mean D                         G = X - mean X,   deta = 0
//
// Symbols   rho vigilance, eta resonance rate; both one number, or one per head
// Shapes    any: kv_heads may divide heads, len_q and len_kv are free
// Ranges    rho is any finite number, 0 to 1 is useful, as are eta 0.1 to 1 and 3 to 5 steps; eta = 1 is softmax(D) after
//           any number of steps, and rho = 0 with eta = 1 is plain attention. A learnt eta stays between 0 and 3
//           (equilibrium), 0 and 2 (lagrange_equilibrium) by keep_in_range() (core/interval.hpp) after a step.
// Bounds    A softmax step multiplies the distance of two rows by at most contraction() = |kappa| / 2: below 1 the
//           fixed point is unique and the steps tend to it. A flow of n steps is defined and differentiable for every
//           finite eta. Weights of the Lagrange flow sum to 1, but may be negative.
//           Hidden keys weigh exactly 0 and have gradient 0, whatever X holds there; a row that sees no key has
//           weights 0, lse -infinity, residual 0, gradient 0; a visible NaN makes its own row NaN.
// Reports   residual: max_j |a_n - a_(n-1)|; at equilibrium, the change of a by one more step. lse: log-sum-exp of the last
//           softmax argument, kappa a_(n-1) + eta D, for the D given; for n = 1 of eta D alone (a_0 is constant in a row
//           and cancels). A row constant c that D lacks is missing in it as eta c.
// Accuracy  D carries rounding of size rho |q_i|^2 and rho |k_j|^2: where both are far larger than
//           |q_i - k_j|^2, take longer scalars or centre the rows. The equilibrium's logits end within `tolerance`.
//           errors of out, gradients on hard inputs (README.md beside this file):
//           accuracy of ode              float 3e-4, 2e-3; double 6e-13, 2e-12
//           accuracy of ode-equilibrium  float 3e-4, 2e-3; double 6e-13, 6e-12
// Mixed     (Precision::mixed; dot = 0.0078 and S as in check/mixed_bounds.hpp) |q_i|^2 and |k_j|^2 are those of float
//           rows, so that the rounding of q.k does not cancel in the distance: D is off by at most
//           delta = dot max_j S_ij (1 + 2 rho/|scale|). The steps and their equilibrium have
//           e = |eta| delta / (1 - |kappa|/2), for |kappa| < 2, since a step multiplies an error of the weights by
//           |kappa|/2 at most; weights of the Lagrange flows are off by at most 2 |w| delta each. Near points suffer most:
//           for random rows of width 64 with a cosine of 0.99, |q - k|^2 is 1.28 in the mean and off by 0.065 (root mean
//           square), 0.33 at most in 20,000 pairs; with a cosine of 0.6 it is 51, off by 0.05 and 0.24.
// Source    "Adaptive Resonance as Differential Equations for Attention" (GPT2-ART notes), sections
//           3.1 to 4, and its listing ResonantDifferentialAttention. Differs in: hidden keys weigh
//           exactly 0; equilibrium is the fixed point of the listing's loop, lagrange_equilibrium
//           that of section 3.3, where the note has one "normalized(S)" for both.
// Cost      one product q.k, one a.v, n exponentials per pair; backward as many again. Equilibrium: at eta = 1/2 at
//           most 9 exponentials (float) or 19 (double), at any eta 16 and 34. Lagrange: none.

#include <heed/ops/resonant_ode/equilibrium.hpp>
#include <heed/ops/resonant_ode/lagrange.hpp>
#include <heed/ops/resonant_ode/reference.hpp>
#include <heed/ops/resonant_ode/steps.hpp>
#include <heed/plug/attention.hpp>
#include <heed/plug/features.hpp>

#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The drive D; key feature 0 is |k|^2.
template <class Real>
struct ResonantScore : ScoreWith<SquaredKeyNorms> {
  using PlaceFree = ResonantScore;
  using KeptFeatures = ResonantScore;

  Param<Real> rho = Real(0.2);  // scalar or per head
  static constexpr auto parameters = std::tuple{named("rho", &ResonantScore::rho)};

  template <class S>
  [[nodiscard]] S score(const PairOf<ResonantScore, S>& pair, const auto& p) const {
    return pair.logit + p[0] * closeness(pair);
  }
  template <class S>
  void score_vjp(const PairOf<ResonantScore, S>& pair, const auto& p, S g,
                 PairOf<ResonantScore, S>& d, auto& dp) const {
    const S scaled = p[0] * g;
    d.logit = g;
    d.dot = scaled + scaled;
    d.key[0] = -scaled;
    dp[0] += g * closeness(pair);
  }

 private:
  // |q|^2 - |q - k|^2
  template <class S>
  [[nodiscard]] static S closeness(const PairOf<ResonantScore, S>& pair) {
    return pair.dot + pair.dot - pair.key[0];
  }
};

enum class FlowMode { steps, equilibrium, lagrange, lagrange_equilibrium };

struct ResonantFlowOptions {
  FlowMode mode = FlowMode::steps;
  int steps = 5;         // >= 1; modes steps and lagrange
  double tolerance = 0;  // >= 0, of the logits at equilibrium; 0: rounding of the scalar type
};

// The flow turns the drives of a row into its weights a.
template <class Real>
struct ResonantFlow : PlainRows, ResonantFlowOptions {
  static constexpr int diagnostics = 1;
  using PlaceFree = ResonantFlow;

  Param<Real> eta = Real(0.5);  // scalar or per head

  // The range of eta.
  [[nodiscard]] Interval rates() const {
    if (mode == FlowMode::equilibrium)
      return {0, 3, "it must lie between 0 and 3 for the equilibrium to be unique and reached"};
    if (mode == FlowMode::lagrange_equilibrium)
      return {0, 2, "it must lie between 0 and 2 for the Lagrange flow to settle"};
    return {};
  }

  static constexpr auto parameters = std::tuple{
      named("eta", &ResonantFlow::eta, &ResonantFlow::rates), option("mode", &ResonantFlow::mode),
      option("steps", &ResonantFlow::steps, at_least(1, "it must be at least 1")),
      option("tolerance", &ResonantFlow::tolerance,
             at_least(0, "it must be at least 0 and finite"))};

  [[nodiscard]] static const char* diagnostic_name(int) { return "residual"; }
  void check(const Geometry&, const char* where) const {
    require(softmax_flow() || multiplier(), where, ": mode is ", int(mode),
            ", it must be one of FlowMode's four (0 to 3)");
  }

  // |1 - eta| / 2 in the head where it is largest.
  [[nodiscard]] double contraction() const {
    double largest = 0;
    for (Index h = 0; h < eta.size(); ++h) largest = std::max(largest, contraction_of(eta[h]));
    return largest;
  }

  // Number of scratch tiles, of which a vector uses its own part; backward keeps every step.
  [[nodiscard]] Index work_tiles(bool backward) const {
    if (mode == FlowMode::steps) return backward ? Index(steps) + 1 : 1;
    if (mode == FlowMode::equilibrium) return backward ? 3 : 2;
    return 0;
  }

  void forward(const RowBlock<Real>& block) const {
    const Real rate = eta.head(block.head);
    for (int v = 0; v < block.vectors; ++v) {
      if (mode == FlowMode::steps)
        detail::resonant_steps_forward(block, v, rate, distinct_steps(rate));
      else if (mode == FlowMode::equilibrium)
        detail::resonant_equilibrium_forward(block, v, rate, logit_tolerance());
      else
        detail::resonant_lagrange_forward(block, v, gain(rate));
    }
  }

  // Each mode sets G and the weights, and returns deta of the lanes.
  void vjp(const RowBlock<Real>& block, ResonantFlow& grad) const {
    const Real rate = eta.head(block.head);
    double deta = 0;
    for (int v = 0; v < block.vectors; ++v) {
      Pack<Real> lanes;
      if (mode == FlowMode::steps)
        lanes = detail::ResonantStepsVjp<Real>(block, v, rate, distinct_steps(rate)).run();
      else if (mode == FlowMode::equilibrium)
        lanes = detail::resonant_equilibrium_vjp(block, v, rate, logit_tolerance());
      else
        lanes = detail::resonant_lagrange_vjp(block, v, gain(rate));
      deta += sum_valid_lanes(lanes, v, block.valid_lanes);
    }
    grad.eta.head(block.head) += Real(deta);
  }

  // Reference: the weights of one row, from its visible drives. The fixed point takes as many steps
  // as the contraction requires; with the multiplier it has a closed form.
  template <class S>
  [[nodiscard]] std::vector<S> reference(const LongHandRow<S>& row) const {
    if (mode == FlowMode::lagrange_equilibrium)
      return detail::long_hand_lagrange_equilibrium(row.scores[0]);
    const S rate = S(eta.head(row.head));
    const int count = mode == FlowMode::equilibrium
                          ? detail::steps_to_rest(contraction_of(eta.head(row.head)))
                          : steps;
    return detail::long_hand_flow(row.scores[0], rate, count, multiplier());
  }
  // The multiplier's weights are differences, 1/N + w (D - mean D).
  template <class S>
  [[nodiscard]] std::vector<double> weight_terms(const std::vector<std::vector<S>>& rows,
                                                 const std::vector<S>& weights) const {
    std::vector<double> terms;
    for (const S& w : weights) terms.push_back(std::abs(double(math::value_of(w))));
    if (!multiplier()) return terms;
    double top = 0;
    for (const S& d : rows[0]) top = std::max(top, std::abs(double(math::value_of(d))));
    for (double& term : terms) term += 1.0 / double(weights.size()) + top;
    return terms;
  }

 private:
  [[nodiscard]] bool softmax_flow() const {
    return mode == FlowMode::steps || mode == FlowMode::equilibrium;
  }
  [[nodiscard]] bool multiplier() const {
    return mode == FlowMode::lagrange || mode == FlowMode::lagrange_equilibrium;
  }
  [[nodiscard]] static double contraction_of(const Real& rate) {
    return std::abs(1 - double(math::value_of(rate))) / 2;
  }
  // With eta = 1 a step does not depend on the weights before it: the second step repeats the first.
  [[nodiscard]] int distinct_steps(Real rate) const {
    return rate == Real(1) ? std::min(steps, 2) : steps;
  }
  [[nodiscard]] double logit_tolerance() const {
    return std::max(tolerance, double(std::numeric_limits<Real>::epsilon()) / 2);
  }
  [[nodiscard]] detail::LagrangeGain gain(Real rate) const {
    if (mode == FlowMode::lagrange_equilibrium) return {};
    return detail::LagrangeGain::after(steps, double(rate));
  }
};

template <class Real>
using ResonantOde = Attention<Real, ResonantScore<Real>, ResonantFlow<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
