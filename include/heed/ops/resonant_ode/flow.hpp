// SPDX-License-Identifier: Apache-2.0
#pragma once

// The softmax passes that the steps and the equilibrium of the resonant flow share (formulas: ops/resonant_ode.hpp).
//
// Exponentials are taken of  e_j + kappa log2(e) a_j,  e_j = eta log2(e) (D_j - D_top) <= 0, where
// D_top is the visible drive at which eta D is largest; a in [0,1] adds at most |kappa| log2(e), so
// that no step searches for a maximum. Passes exchange p_j = l a_j and the sum l instead of a_j.
//
// Cost    a step, per pair: one multiply-add, one exponential, one addition; two loads, one store.

#include <heed/plug/row_kit.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The passes of one vector of queries over its row. A pass returns the sum l of what it wrote.
template <class Real>
struct SoftmaxFlow {
  using P = Pack<Real>;
  Index keys;
  Real eta;
  TileColumn<Real> drive;     // D
  TileColumn<Real> argument;  // e; -infinity for hidden keys
  P top;                      // D_top; infinite for a lane that sees no key

  SoftmaxFlow(const RowBlock<Real>& block, int v, Real rate, TileColumn<Real> argument_column)
      : keys(block.keys()),
        eta(rate),
        drive(column_of(block.scores[0], v)),
        argument(argument_column) {
    top = eta > Real(0) ? P::load(block.score_max[0] + v * kLanes<Real>) : smallest_drive();
  }

  // Factor on an unnormalised weight p = l a inside an exponent in log2 units.
  [[nodiscard]] P kappa_over(P inverse_sum) const {
    return inverse_sum * Real((1.0 - double(eta)) * kLog2e);
  }

  // Fills `argument`; `next` becomes p_1. `next` may be the drive's own column.
  [[nodiscard]] P start(TileColumn<Real> next) const {
    const P factor = Real(double(eta) * kLog2e);
    return sum_over_keys<Real>(keys, [&](Index j) {
      const P d = drive.load(j);
      const P e = select(is_hidden(d), d, (d - top) * factor);  // 0 * infinity when eta is 0
      const P p = exp2_weight(e);
      argument.store(j, e);
      next.store(j, p);
      return p;
    });
  }

  // p_(t+1) from p_t; `next` may be `now` itself, or `argument` in the last step of all.
  [[nodiscard]] P step(TileColumn<Real> now, TileColumn<Real> next, P factor) const {
    return sum_over_keys<Real>(keys, [&](Index j) {
      const P e = argument.load(j);
      const P p = exp2_weight(mul_add(now.load(j), factor, e));
      const P visible = zero_where(is_hidden(e), p);  // p is NaN in the lane of a NaN
      next.store(j, visible);
      return visible;
    });
  }

  // out = last * factor. Returns the largest |out_j - before(j)|; NaN for a lane of NaN.
  template <class Before>
  [[nodiscard]] P finish(TileColumn<Real> last, P factor, TileColumn<Real> out,
                         Before&& before) const {
    P residual = Real(0);
    for (Index j = 0; j < keys; ++j) {
      const P p = last.load(j);
      const P a = select(p == P(Real(0)), p, p * factor);
      residual = max(residual, math::absolute(P(a - before(j))));
      out.store(j, a);
    }
    return select(factor == factor, residual, factor);
  }

  // The last step, p_(n-1) in `weights` becomes a_n; returns the residual.
  [[nodiscard]] P take_last_step(TileColumn<Real> weights, P& sum) const {
    const P before = inverse_or_zero(sum);
    sum = step(weights, argument, kappa_over(before));
    return finish(argument, inverse_or_zero(sum), weights,
                  [&](Index j) { return weights.load(j) * before; });
  }

  // Log-sum-exp of the argument whose exponentials, relative to D_top, have the sum `sum`.
  [[nodiscard]] P lse(P sum) const {
    return select(sum == P(Real(0)), P(-kInfinity<Real>), mul_add(top, P(eta), math::log(sum)));
  }

 private:
  // The smallest visible drive; +infinity if there is none.
  [[nodiscard]] P smallest_drive() const {
    P low = kInfinity<Real>;
    for (Index j = 0; j < keys; ++j) {
      const P d = drive.load(j);
      low = select((d < low) & (d > P(-kInfinity<Real>)), d, low);
    }
    return low;
  }
};

template <class Real>
inline void report(const RowBlock<Real>& block, int v, Pack<Real> lse, Pack<Real> residual) {
  if (block.lse[0] != nullptr) lse.store(block.lse[0] + v * kLanes<Real>);
  if (block.diagnostics != nullptr) residual.store(block.diagnostics + v * kLanes<Real>);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
