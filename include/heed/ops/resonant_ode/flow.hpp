// SPDX-License-Identifier: Apache-2.0
#pragma once

// Normaliser: the drive of a row becomes weights through a flow of attention.
//
//   da/dt = eta (D - a) with sum a = 1          Euler steps from a_0 = 1/N, N visible keys
//
//   steps                 n times a <- softmax(a + eta (D - a))          resonant_steps.hpp
//   equilibrium           the fixed point of that step                   resonant_equilibrium.hpp
//   lagrange              n times a <- a + eta (D - a) - multiplier      resonant_lagrange.hpp
//   lagrange_equilibrium  the fixed point of that: 1/N + D - mean D
//
// Symbols      D drive (score), eta resonance rate, kappa = 1 - eta
// Recommended  eta 0.1 to 1, steps 3 to 5; eta = 1 is softmax(D) after any number of steps.
// Bounds       a softmax step multiplies the distance of two rows by at most contraction() =
//              |kappa| / 2: below 1 the fixed point is unique and the steps tend to it. A flow of n
//              steps is defined and differentiable for every finite eta.
//              A learnt eta stays between 0 and 3 (equilibrium), 0 and 2 (lagrange_equilibrium) by
//              keep_in_range() (core/interval.hpp) after a step.
//              A row that sees no key has weights 0, lse -infinity, residual 0, gradient 0.
// Diagnostics  residual: max_j |a_n - a_(n-1)|; at equilibrium, by how much one more step moves a.
// lse          log-sum-exp of the last softmax argument, kappa a_(n-1) + eta D, for the D given;
//              for n = 1 of eta D alone (a_0 is constant in a row and cancels). A row constant c
//              that D lacks is missing in it as eta c.

#include <heed/ops/resonant_ode/equilibrium.hpp>
#include <heed/ops/resonant_ode/lagrange.hpp>
#include <heed/ops/resonant_ode/steps.hpp>
#include <heed/plug/softmax.hpp>

#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

enum class FlowMode { steps, equilibrium, lagrange, lagrange_equilibrium };

struct ResonantFlowOptions {
  FlowMode mode = FlowMode::steps;
  int steps = 5;         // >= 1; modes steps and lagrange
  double tolerance = 0;  // >= 0, of the logits at equilibrium; 0: rounding of the scalar type
};

template <class Real>
struct ResonantFlow : PlainRows, ResonantFlowOptions {
  static constexpr int diagnostics = 1;
  using PlaceFree = ResonantFlow;

  Param<Real> eta = Real(0.5);  // scalar or per head

  // Where eta may lie.
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
    require(mode == FlowMode::steps || mode == FlowMode::equilibrium ||
                mode == FlowMode::lagrange || mode == FlowMode::lagrange_equilibrium,
            where, ": mode is ", int(mode), ", it must be one of FlowMode's four (0 to 3)");
  }

  // |1 - eta| / 2, the largest of all heads.
  [[nodiscard]] double contraction() const {
    double largest = 0;
    for (Index i = 0; i < eta.size(); ++i)
      largest = std::max(largest, std::abs(1 - double(math::value_of(eta[i]))) / 2);
    return largest;
  }

  // Scratch tiles, of which one vector's share is touched; backward keeps every step.
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

  void vjp(const RowBlock<Real>& block, ResonantFlow& grad) const {
    const Real rate = eta.head(block.head);
    double deta = 0;
    for (int v = 0; v < block.vectors; ++v) {
      if (mode == FlowMode::steps) {
        const detail::ResonantStepsVjp<Real> pass(block, v, rate, distinct_steps(rate));
        deta += detail::sum_valid(block, v, pass.run());
      } else if (mode == FlowMode::equilibrium) {
        deta += detail::sum_valid(
            block, v, detail::resonant_equilibrium_vjp(block, v, rate, logit_tolerance()));
      } else {
        deta += detail::sum_valid(block, v, detail::resonant_lagrange_vjp(block, v, gain(rate)));
      }
    }
    grad.eta.head(block.head) += Real(deta);
  }

  // In long hand: the weights of one row, given its visible drives. The fixed point takes as many steps
  // as the contraction asks for; with the multiplier it is linear, and taken as it is.
  template <class S>
  [[nodiscard]] std::vector<S> reference(const std::vector<std::vector<S>>& rows, Index h,
                                         const S&) const {
    const std::vector<S>& drive = rows[0];
    const bool multiplier = mode == FlowMode::lagrange || mode == FlowMode::lagrange_equilibrium;
    const S rate = S(eta.head(h));
    const S share = math::constant<S>(drive.empty() ? 0.0 : 1.0 / double(drive.size()));
    std::vector<S> a(drive.size(), share);
    if (mode == FlowMode::lagrange_equilibrium) {
      std::vector<S> deviation = drive;
      subtract_mean(deviation);
      for (std::size_t j = 0; j < a.size(); ++j) a[j] += deviation[j];
      return a;
    }
    const double kappa = std::abs(1 - double(math::value_of(rate))) / 2;
    const int count = mode == FlowMode::equilibrium ? steps_to_rest(kappa) : steps;
    for (int t = 0; t < count; ++t) {
      std::vector<S> change;
      for (std::size_t j = 0; j < a.size(); ++j) change.push_back(rate * (drive[j] - a[j]));
      if (multiplier) subtract_mean(change);
      for (std::size_t j = 0; j < a.size(); ++j) a[j] += change[j];
      if (!multiplier) a = long_hand_softmax(a);
    }
    return a;
  }
  // The sizes of the terms that such weights are sums of, given the weights: what rounding errors are
  // measured by. The multiplier's weights are differences, 1/N + w (D - mean D).
  template <class S>
  [[nodiscard]] std::vector<double> weight_terms(const std::vector<std::vector<S>>& rows,
                                                 const std::vector<S>& weights) const {
    std::vector<double> terms;
    for (const S& w : weights) terms.push_back(std::abs(double(math::value_of(w))));
    if (mode != FlowMode::lagrange && mode != FlowMode::lagrange_equilibrium) return terms;
    double top = 0;
    for (const S& d : rows[0]) top = std::max(top, std::abs(double(math::value_of(d))));
    for (double& term : terms) term += 1.0 / double(weights.size()) + top;
    return terms;
  }

 private:
  // With eta = 1 a step forgets where it came from: the second repeats the first.
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

  // Steps of the given contraction after which e^-50 of a change is left.
  [[nodiscard]] static int steps_to_rest(double contraction) {
    if (contraction == 0) return 2;
    return 2 + int(std::ceil(-50 / std::log(contraction)));
  }

  template <class S>
  static void subtract_mean(std::vector<S>& x) {
    S sum = math::constant<S>(0);
    for (const S& entry : x) sum += entry;
    for (S& entry : x) entry -= sum / math::constant<S>(double(x.size()));
  }
};

}  // namespace HEED_ABI
}  // namespace heed
