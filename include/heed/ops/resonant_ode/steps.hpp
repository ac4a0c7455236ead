// SPDX-License-Identifier: Apache-2.0
#pragma once

// The resonant flow in n steps, for one vector of queries (lanes) and all keys j of their rows; formulas and bounds:
// ops/resonant_ode.hpp.
//
//   a_1 = softmax(eta D)          a_(t+1) = softmax(kappa a_t + eta D)      kappa = 1 - eta
//   g_n = a_n o (X - <a_n, X>)    g_t = a_t o kappa (g_(t+1) - <a_t, g_(t+1)>)
//   dL/dD = eta sum_t g_t         dL/deta = <sum_t g_t, D> - sum_(t>=2) <g_t, a_(t-1)>
//
// Rows of every g_t of the backward pass sum to 0: D may be taken relative to D_top, and the
// uniform start a_0 has no effect.

#include <heed/ops/resonant_ode/flow.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Turns scores into a_n; takes one work column.
template <class Real>
inline void resonant_steps_forward(const RowBlock<Real>& block, int v, Real eta, int steps) {
  using P = Pack<Real>;
  const auto weights = column_of(block.scores[0], v);
  const SoftmaxFlow<Real> flow(block, v, eta, work_column(block, 0));
  P sum = flow.start(weights), residual;
  if (steps == 1) {
    const P uniform = inverse_or_zero(count_visible(flow.argument, flow.keys));
    residual = flow.finish(weights, inverse_or_zero(sum), weights, [&](Index j) {
      return zero_where(is_hidden(flow.argument.load(j)), uniform);
    });
  } else {
    for (int t = 2; t < steps; ++t)
      sum = flow.step(weights, weights, flow.kappa_over(inverse_or_zero(sum)));
    residual = flow.take_last_step(weights, sum);
  }
  report(block, v, flow.lse(sum), residual);
}

// The backward pass, from the last step to the first. It keeps every step: work column 0 is the argument, column t is p_t, then g_t.
template <class Real>
struct ResonantStepsVjp {
  using P = Pack<Real>;
  // Numbers that the pass over step t passes to that over step t - 1.
  struct Before {
    P inverse, inner;  // 1 / sum of p_(t-1), <a_(t-1), g_t>; not used if t is 1
  };
  const RowBlock<Real>& block;
  int v;
  int steps;
  SoftmaxFlow<Real> flow;

  ResonantStepsVjp(const RowBlock<Real>& b, int vector, Real eta, int n)
      : block(b), v(vector), steps(n), flow(b, vector, eta, work_column(b, 0)) {}

  // Returns the lane-wise gradient of eta.
  [[nodiscard]] P run() const {
    Before before = last_step(replay());
    P deta = Real(0);
    for (int t = steps - 1; t >= 1; --t) {
      deta -= before.inner;
      before = earlier_step(t, before);
    }
    return deta + end();
  }

 private:
  [[nodiscard]] TileColumn<Real> kept(int t) const { return work_column(block, t); }
  [[nodiscard]] static Before before_of(const PackPair<Real>& sums) {
    const P inverse = inverse_or_zero(sums.second);
    return {inverse, sums.first * inverse};
  }

  // Runs forward again: columns 1 ... n become p_t; returns 1 / sum of p_n.
  [[nodiscard]] P replay() const {
    P sum = flow.start(kept(1));
    for (int t = 1; t < steps; ++t)
      sum = flow.step(kept(t), kept(t + 1), flow.kappa_over(inverse_or_zero(sum)));
    return inverse_or_zero(sum);
  }

  // Step n: writes the weights, column n becomes g_n = a_n o (X - <a_n, X>).
  [[nodiscard]] Before last_step(P inverse) const {
    const auto now = kept(steps), before = kept(std::max(1, steps - 1));
    const auto dweights = column_of(block.dweights, v), weights = column_of(block.weights, v);
    const auto drive = flow.drive;
    const P dot = inverse * sum_over_keys<Real>(flow.keys, [&](Index j) {
                    return zero_where(is_hidden(drive.load(j)), now.load(j) * dweights.load(j));
                  });
    return before_of(sum_over_keys<Real, PackPair<Real>>(flow.keys, [&](Index j) {
      const P p = now.load(j), a = p * inverse, p_before = before.load(j);
      const auto none = p == P(Real(0));
      const P g = select(none, p, a * (dweights.load(j) - dot));
      weights.store(j, select(none, p, a));  // may share memory with dweights
      now.store(j, g);
      return PackPair<Real>(g * p_before, p_before);
    }));
  }

  // Step t < n: column t becomes g_t = a_t o kappa (g_(t+1) - <a_t, g_(t+1)>).
  [[nodiscard]] Before earlier_step(int t, const Before& from) const {
    const auto now = kept(t), next = kept(t + 1), before = kept(std::max(1, t - 1));
    const P factor = from.inverse * (Real(1) - flow.eta), inner = from.inner;
    return before_of(sum_over_keys<Real, PackPair<Real>>(flow.keys, [&](Index j) {
      const P p_before = before.load(j);
      const P g = now.load(j) * factor * (next.load(j) - inner);
      now.store(j, g);
      return PackPair<Real>(g * p_before, p_before);
    }));
  }

  // Writes dL/dD = eta sum_t g_t; returns <sum_t g_t, D>.
  [[nodiscard]] P end() const {
    const auto dscores = column_of(block.dscores[0], v), drive = flow.drive, first = kept(1);
    const Index next_column = flow.keys * first.stride;
    const P eta = flow.eta, top = flow.top;
    const int n = steps;
    return sum_over_keys<Real>(flow.keys, [&](Index j) {
      P g = first.load(j);
      for (int t = 1; t < n; ++t) g += P::load(first.data + t * next_column + j * first.stride);
      const P d = drive.load(j);
      const auto hidden = is_hidden(d);
      dscores.store(j, zero_where(hidden, g * eta));
      return zero_where(hidden, g * (d - top));
    });
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
