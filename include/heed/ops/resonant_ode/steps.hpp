// SPDX-License-Identifier: Apache-2.0
#pragma once

// The resonant flow in n steps, for one vector of queries (lanes) and all keys j of their rows.
//
//   a_1 = softmax(eta D)      a_(t+1) = softmax(kappa a_t + eta D)      kappa = 1 - eta
//
// Exponentials are taken of  e_j + kappa log2(e) a_j,  e_j = eta log2(e) (D_j - D_top) <= 0, where
// D_top is the visible drive at which eta D is largest; a in [0,1] adds at most |kappa| log2(e), so
// that no step looks for a maximum. Steps pass on p_j = l a_j and the sum l instead of a_j.
//
// Backward, from the last step (X = dL/da_n):
//   g_n = a_n o (X - <a_n, X>)            g_t = a_t o kappa (g_(t+1) - <a_t, g_(t+1)>)
//   dL/dD = eta sum_t g_t                 dL/deta = <sum_t g_t, D> - sum_(t>=2) <g_t, a_(t-1)>
// Rows of every g_t sum to 0: D may be counted from D_top, and the uniform start a_0 has no part.
//
// Bounds  hidden entries (D = -infinity) have weight and gradient exactly 0, whatever X holds
//         there; a lane without a visible key has weights 0 and lse -infinity; a visible NaN makes
//         the visible part of its lane NaN, and no other lane.
// Cost    a step, per pair: one multiply-add, one exponential, one addition; two loads, one store.

#include <heed/plug/normaliser.hpp>
#include <heed/simd/exp.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// One vector of a lane tile: a pack per key.
template <class Real>
struct TileColumn {
  Real* data;
  Index stride;
  [[nodiscard]] Pack<Real> load(Index j) const { return Pack<Real>::load(data + j * stride); }
  void store(Index j, Pack<Real> p) const { p.store(data + j * stride); }
};

template <class Real>
[[nodiscard]] inline TileColumn<Real> column(const LaneTile<Real>& tile, int v) {
  return {tile.data + v * kLanes<Real>, tile.lanes};
}

// Scratch column `index` of the vector at hand. All vectors take the same dense memory: it stays in
// cache, where columns of lane tiles would leave most cache sets unused.
template <class Real>
[[nodiscard]] inline TileColumn<Real> work_column(const RowBlock<Real>& block, Index index) {
  return {block.work.data + index * block.keys() * kLanes<Real>, kLanes<Real>};
}

// term(0) + ... + term(keys - 1), by blocks of 128: the rounding error of 1e5 terms is that of 900.
// Sum is Pack<Real>, or PackPair<Real> for two sums in one pass.
template <class Real, class Sum = Pack<Real>, class Term>
[[nodiscard]] inline Sum sum_over_keys(Index keys, Term&& term) {
  Sum total = Real(0);
  for (Index first = 0; first < keys; first += 128) {
    const Index end = std::min<Index>(keys, first + 128);
    Sum part = Real(0);
    for (Index j = first; j < end; ++j) part += term(j);
    total += part;
  }
  return total;
}

template <class Real>
struct PackPair {
  Pack<Real> first, second;
  PackPair(Real both) : first(both), second(both) {}
  PackPair(Pack<Real> a, Pack<Real> b) : first(a), second(b) {}
  PackPair& operator+=(const PackPair& o) {
    first += o.first;
    second += o.second;
    return *this;
  }
};

// 1 / x, and 0 where x is 0.
template <class Real>
[[nodiscard]] inline Pack<Real> inverse_or_zero(Pack<Real> x) {
  return select(x == Pack<Real>(Real(0)), Pack<Real>(Real(0)), Real(1) / x);
}

template <class Real>
[[nodiscard]] inline auto is_hidden(Pack<Real> score) {
  return score == Pack<Real>(-kInfinity<Real>);
}

// The softmax passes that steps and equilibrium share. A pass returns the sum l of what it wrote.
template <class Real>
struct SoftmaxFlow {
  using P = Pack<Real>;
  Index keys;
  Real eta;
  TileColumn<Real> drive;     // D
  TileColumn<Real> argument;  // e of the head of this file; -infinity for hidden keys
  P top;                      // D_top; infinite for a lane that sees no key

  SoftmaxFlow(const RowBlock<Real>& block, int v, Real rate, TileColumn<Real> argument_column)
      : keys(block.keys()),
        eta(rate),
        drive(column(block.scores[0], v)),
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
      const P visible = select(is_hidden(e), P(Real(0)), p);  // p is NaN all over the lane of a NaN
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

  // Log-sum-exp of an argument of which `sum` was taken about D_top.
  [[nodiscard]] P lse(P sum) const {
    return select(sum == P(Real(0)), P(-kInfinity<Real>), mul_add(top, P(eta), math::log(sum)));
  }

 private:
  // +infinity for none.
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

// Sum over the valid lanes of vector v.
template <class Real>
[[nodiscard]] inline double sum_valid(const RowBlock<Real>& block, int v, Pack<Real> p) {
  Real lanes[kLanes<Real>];
  p.store(lanes);
  return sum_valid_lanes(lanes,
                         std::min<Index>(kLanes<Real>, block.valid_lanes - v * kLanes<Real>));
}

// Scores become a_n; takes one work column.
template <class Real>
inline void resonant_steps_forward(const RowBlock<Real>& block, int v, Real eta, int steps) {
  using P = Pack<Real>;
  const auto weights = column(block.scores[0], v);
  const SoftmaxFlow<Real> flow(block, v, eta, work_column(block, 0));
  P sum = flow.start(weights), residual;
  if (steps == 1) {
    const P count = sum_over_keys<Real>(flow.keys, [&](Index j) {
      return select(is_hidden(flow.argument.load(j)), P(Real(0)), P(Real(1)));
    });
    const P uniform = inverse_or_zero(count);
    residual = flow.finish(weights, inverse_or_zero(sum), weights, [&](Index j) {
      return select(is_hidden(flow.argument.load(j)), P(Real(0)), uniform);
    });
  } else {
    for (int t = 2; t < steps; ++t)
      sum = flow.step(weights, weights, flow.kappa_over(inverse_or_zero(sum)));
    residual = flow.take_last_step(weights, sum);
  }
  report(block, v, flow.lse(sum), residual);
}

// The backward pass. It keeps every step: work column 0 is the argument, t is p_t, then
// g_t.
template <class Real>
struct ResonantStepsVjp {
  using P = Pack<Real>;
  // What a pass over step t hands to that over step t - 1.
  struct Before {
    P inverse, inner;  // 1 / sum of p_(t-1), <a_(t-1), g_t>; of no use if t is 1
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

  // Columns 1 ... n become p_t; returns 1 / sum of p_n.
  [[nodiscard]] P replay() const {
    P sum = flow.start(kept(1));
    for (int t = 1; t < steps; ++t)
      sum = flow.step(kept(t), kept(t + 1), flow.kappa_over(inverse_or_zero(sum)));
    return inverse_or_zero(sum);
  }

  // Step n: writes the weights, column n becomes g_n.
  [[nodiscard]] Before last_step(P inverse) const {
    const auto now = kept(steps), before = kept(std::max(1, steps - 1));
    const auto dweights = column(block.dweights, v), weights = column(block.weights, v);
    const auto drive = flow.drive;
    const P dot =
        inverse * sum_over_keys<Real>(flow.keys, [&](Index j) {
          return select(is_hidden(drive.load(j)), P(Real(0)), now.load(j) * dweights.load(j));
        });
    return before_of(sum_over_keys<Real, PackPair<Real>>(flow.keys, [&](Index j) {
      const P p = now.load(j), a = p * inverse, p_before = before.load(j);
      const auto none = p == P(Real(0));
      const P g = select(none, p, a * (dweights.load(j) - dot));
      weights.store(j, select(none, p, a));  // may lie where dweights lies
      now.store(j, g);
      return PackPair<Real>(g * p_before, p_before);
    }));
  }

  // Step t < n: column t becomes g_t.
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

  // Writes eta sum_t g_t; returns <sum_t g_t, D>.
  [[nodiscard]] P end() const {
    const auto dscores = column(block.dscores[0], v), drive = flow.drive, first = kept(1);
    const Index next_column = flow.keys * first.stride;
    const P eta = flow.eta, top = flow.top;
    const int n = steps;
    return sum_over_keys<Real>(flow.keys, [&](Index j) {
      P g = first.load(j);
      for (int t = 1; t < n; ++t) g += P::load(first.data + t * next_column + j * first.stride);
      const P d = drive.load(j);
      const auto hidden = is_hidden(d);
      dscores.store(j, select(hidden, P(Real(0)), g * eta));
      return select(hidden, P(Real(0)), g * (d - top));
    });
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
