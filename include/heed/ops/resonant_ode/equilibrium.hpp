// SPDX-License-Identifier: Apache-2.0
#pragma once

// Finds the equilibrium of the resonant flow and its gradient, exact in rows of any sharpness, for one vector of queries
// (lanes) and all keys of their rows (formulas and bounds: ops/resonant_ode.hpp).
//
//   a = softmax(kappa a + eta D)      kappa = 1 - eta, 0 < eta < 3
//
// With logits z + d, z = eta D, the equilibrium is the root of d - kappa a(d): the gradient of
//   Phi(d) = |d|^2 / 2 - kappa logsumexp(z + d),   Hessian I - kappa J,   J = diag(a) - a a^T,
// whose eigenvalues lie between 1 and 1 - kappa lambda when those of J lie in [0, lambda]. Hence
//   d <- d - tau (d - kappa a(d)),   tau = 2 / (2 - kappa lambda)
// comes closer to the root, from anywhere, by the factor |kappa| lambda / (2 - kappa lambda) <= 1/3
// each time; at eta = 1/2 by 1/7 where the loop of the note (tau = 1) guarantees 1/4.
//   lambda = min(1/2, B / l, 2 B (l - 1)),   l = sum_j exp(z_j - max z),   B = e^W
// since J has no eigenvalue above max a_j, max 2 a_j (1 - a_j) (Gershgorin) or 1/2, and the path of
// d lies in an interval of length W = 2 kappa / (2 - kappa) (kappa > 0) or -kappa, so that no a_j
// leaves softmax(z)_j by more than the factor B: flat and one-hot rows end in a few rounds. The
// number of rounds follows from lambda; a lane does not change after its own number of rounds.
//
// Backward (X = dL/da), exact: (I - kappa J)^-1 J is diagonal plus rank one,
//   b = a / (1 - kappa a)            h = b o (X - sum(b X) / sum(b))
//   dL/dD = eta h                    dL/deta = sum_j (D_j - a_j) h_j      (sum_j h_j = 0)
// 1 - kappa a = (1 - a) + eta a. A key t with a_t > 3/4 has c = 1 - kappa a_t = (sum of the other a) + eta a_t,
// which may be any small number; nothing is divided by it, since with Y = X - X_t and sums over j != t
//   S = sum b_j Y_j,  B = sum b_j    h_j = b_j (Y_j - S c / (a_t + B c))    h_t = -S a_t / (a_t + B c)
// A row without such a key is the case a_t = 0, c = 1, X_t = 0, where t is no key.
//
// Accuracy  the logits end within `tolerance` of the root (0: to rounding), then one plain step.
// Bounds    1 - kappa a >= eta > 0, for every eta > 0 that the scalar holds: gradients
//           are as exact as those of softmax, in rows of any sharpness, and 0 where one key is seen.
// Cost      a round: one exponential, two multiply-adds and one addition per pair; three loads, two
//           stores. Rounds at eta = 1/2: at most 9 (float), 19 (double); at any eta 16 and 34.

#include <heed/ops/resonant_ode/flow.hpp>

#include <array>
#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The relaxation of each lane of one vector.
template <class Real>
struct Relaxation {
  Pack<Real> tau, rounds;
  Real most_rounds = 0;
};

// An upper bound of J's eigenvalues along the path of d, from l = sum of exp(z - max z).
[[nodiscard]] inline double coupling_bound(double kappa, double sum) {
  const double width = kappa > 0 ? 2 * kappa / (2 - kappa) : -kappa;
  const double factor = std::exp(width);
  return std::min({0.5, factor / sum, 2 * factor * std::max(0.0, sum - 1)});
}

// Rounds after which an error of at most |kappa| in d is below the tolerance.
[[nodiscard]] inline double relaxation_rounds(double kappa, double rate, double tolerance) {
  if (!(rate > 0)) return 1;
  return std::max(1.0, std::ceil(std::log(tolerance / std::abs(kappa)) / std::log(rate)));
}

template <class Real>
[[nodiscard]] inline Relaxation<Real> relaxation(Pack<Real> sum, double kappa, double tolerance) {
  std::array<Real, std::size_t(kLanes<Real>)> tau, rounds;
  Relaxation<Real> result;
  for (int i = 0; i < kLanes<Real>; ++i) {
    const double l = double(sum.lane(i));
    const double lambda = l >= 1 ? coupling_bound(kappa, l) : 0;  // 0: no key, or NaN
    const double step = 2 / (2 - kappa * lambda);
    tau[std::size_t(i)] = Real(step);
    rounds[std::size_t(i)] =
        Real(relaxation_rounds(kappa, std::abs(kappa) * lambda * step / 2, tolerance));
    result.most_rounds = std::max(result.most_rounds, rounds[std::size_t(i)]);
  }
  result.tau = Pack<Real>::load(tau.data());
  result.rounds = Pack<Real>::load(rounds.data());
  return result;
}

// Solves for the weights of vector v. Returns the residual: the change of the weights by one more step of the flow.
template <class Real>
[[nodiscard]] inline Pack<Real> solve_equilibrium(const SoftmaxFlow<Real>& flow,
                                                  TileColumn<Real> weights,
                                                  TileColumn<Real> d_column, double tolerance,
                                                  Pack<Real>& sum) {
  using P = Pack<Real>;
  const double kappa = 1.0 - double(flow.eta);
  const TileColumn<Real> argument = flow.argument;
  sum = flow.start(weights);
  for (Index j = 0; j < flow.keys; ++j) d_column.store(j, P(Real(0)));
  const Relaxation<Real> relax = relaxation(sum, kappa, tolerance);
  for (Real round = 0; round < relax.most_rounds && kappa != 0; round += Real(1)) {
    const auto moves = relax.rounds > P(round);
    const P keep = select(moves, Real(1) - relax.tau, P(Real(1)));
    const P pull = select(moves, relax.tau * flow.kappa_over(inverse_or_zero(sum)), P(Real(0)));
    sum = sum_over_keys<Real>(flow.keys, [&](Index j) {
      const P d = mul_add(d_column.load(j), keep, weights.load(j) * pull);  // in log2 units
      const P p = exp2_weight(argument.load(j) + d);
      d_column.store(j, d);
      weights.store(j, p);
      return p;
    });
  }
  return flow.take_last_step(weights, sum);
}

// Turns scores into the weights at equilibrium; takes two work columns.
template <class Real>
inline void resonant_equilibrium_forward(const RowBlock<Real>& block, int v, Real eta,
                                         double tolerance) {
  const SoftmaxFlow<Real> flow(block, v, eta, work_column(block, 0));
  Pack<Real> sum;
  const Pack<Real> residual =
      solve_equilibrium(flow, column_of(block.scores[0], v), work_column(block, 1), tolerance, sum);
  report(block, v, flow.lse(sum), residual);
}

// Returns the lane-wise gradient of eta; takes three work columns.
template <class Real>
[[nodiscard]] inline Pack<Real> resonant_equilibrium_vjp(const RowBlock<Real>& block, int v,
                                                         Real eta, double tolerance) {
  using P = Pack<Real>;
  const SoftmaxFlow<Real> flow(block, v, eta, work_column(block, 0));
  const auto a_column = work_column(block, 2), b_column = work_column(block, 1);
  P sum;
  static_cast<void>(solve_equilibrium(flow, a_column, b_column, tolerance, sum));

  const auto dweights = column_of(block.dweights, v), weights = column_of(block.weights, v);
  const P rate = eta, zero = Real(0);
  const auto leads = [](P a) { return a > P(Real(0.75)); };  // a_t
  P lead = zero, lead_dweight = zero, largest = zero;
  const P others = sum_over_keys<Real>(flow.keys, [&](Index j) {
    const P a = a_column.load(j);
    largest = max(largest, a);
    lead = select(leads(a), a, lead);
    lead_dweight = select(leads(a), dweights.load(j), lead_dweight);
    return zero_where(leads(a), a);
  });
  P b_sum = zero;
  const P b_dot = sum_over_keys<Real>(flow.keys, [&](Index j) {
    const auto hidden = is_hidden(flow.drive.load(j));
    const P a = a_column.load(j);
    const P b = zero_where(leads(a), a / ((Real(1) - a) + rate * a));
    b_column.store(j, b);
    b_sum += b;
    return zero_where(hidden | leads(a), b * (dweights.load(j) - lead_dweight));
  });
  const P c = select(leads(lead), mul_add(rate, lead, others), P(Real(1)));
  const P share = b_dot * inverse_or_zero(mul_add(b_sum, c, lead));  // S / (a_t + B c)
  const P mean = share * c, lead_h = -(share * lead);

  // D and a are taken relative to the key with the largest weight, whose term in the sum is then 0.
  const auto dscores = column_of(block.dscores[0], v);
  return sum_over_keys<Real>(flow.keys, [&](Index j) {
    const P d = flow.drive.load(j), a = a_column.load(j);
    const auto hidden = is_hidden(d);
    const P other_h = b_column.load(j) * ((dweights.load(j) - lead_dweight) - mean);
    const P h = zero_where(hidden, select(leads(a), lead_h, other_h));
    weights.store(j, a);  // may share memory with dweights
    dscores.store(j, h * rate);
    return zero_where(hidden, h * ((d - flow.top) - (a - largest)));
  });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
