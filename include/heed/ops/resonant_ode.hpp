// SPDX-License-Identifier: Apache-2.0
#pragma once

// Resonant attention as a differential equation: attention weights that flow towards resonance.
//
//   drive      S_ij = scale q_i.k_j - rho |q_i - k_j|^2
//   flow       a <- softmax(a + eta (S_i - a)),  n times from a uniform row, or its fixed point
//   out_i      = sum_j a_ij v_j
//
// Computed without the row constant:
//   D_ij = S_ij + rho |q_i|^2 = logit_ij + rho (2 q_i.k_j - |k_j|^2)
// -rho |q_i|^2 is the same for all keys of a row and cancels in every softmax, and in the Lagrange
// flow as D - mean D: one product q.k, one number per key, no tensor of len_q x len_kv x dim.
//
// Derivatives (G = dL/dD; its rows sum to 0 for every flow, so that the dropped constant has none):
//   dlogit = G     d(q.k) = 2 rho G     d|k|^2 = -rho G     dk = ... + 2 k d|k|^2
//   drho   = sum_ij G_ij (2 q_i.k_j - |k_j|^2) = -sum_ij G_ij |q_i - k_j|^2
//
// Symbols   rho vigilance, eta resonance rate; both one number, or one per head
// Shapes    any: kv_heads may divide heads, len_q and len_kv are free
// Bounds    rho is any finite number, recommended 0 to 1; rho = 0 with eta = 1 is plain attention.
//           Those of the flow stand in resonant_flow.hpp.
// Accuracy  D carries rounding of size rho |q_i|^2 and rho |k_j|^2: where both are far larger than
//           |q_i - k_j|^2, take longer scalars or centre the rows.
// Source    "Adaptive Resonance as Differential Equations for Attention" (GPT2-ART notes), sections
//           3.1 to 4, and its listing ResonantDifferentialAttention. Differs in: hidden keys weigh
//           exactly 0; equilibrium is the fixed point of the listing's loop, lagrange_equilibrium
//           that of section 3.3, where the note has one "normalized(S)" for both.
// Cost      one product q.k, one a.v, n exponentials per pair; backward as many again.

#include <heed/ops/resonant_ode/flow.hpp>
#include <heed/plug/attention.hpp>

namespace heed {
inline namespace HEED_ABI {

// The drive D. Table of side values: key feature 0 is |k|^2.
template <class Real>
struct ResonantScore : NoSideValues {
  static constexpr int scalars = 1;
  static constexpr int key_features = 1;
  template <class U>
  using rebind = ResonantScore<U>;
  using PlaceFree = ResonantScore;

  Param<Real> rho = Real(0.2);  // scalar or per head

  template <class F>
  void visit(F&& f) {
    f("rho", rho);
  }
  template <class F>
  void visit_ranges(F&& f) {
    f("rho", rho, Interval{});
  }
  void validate(const Geometry& g, const char* where) const {
    require_ranges(*this, g.heads, where);
  }

  [[nodiscard]] Real scalar(int, Index h) const { return rho.head(h); }
  void chain_scalars(Index h, const double* dp, ResonantScore& grad) const {
    grad.rho.head(h) += Real(dp[0]);
  }

  template <class S>
  [[nodiscard]] S score(const PairOf<ResonantScore, S>& pair,
                        const ScalarsOf<ResonantScore, S>& p) const {
    return pair.logit + p[0] * closeness(pair);
  }
  template <class S>
  void score_vjp(const PairOf<ResonantScore, S>& pair, const ScalarsOf<ResonantScore, S>& p, S g,
                 PairOf<ResonantScore, S>& d, ScalarsOf<ResonantScore, S>& dp) const {
    const S scaled = p[0] * g;
    d.logit = g;
    d.dot = scaled + scaled;
    d.key[0] = -scaled;
    dp[0] += g * closeness(pair);
  }

  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    const auto x = [&row](Index c) { return row.x(c); };
    f[0] = math::dot_product(row.dim(), x, x);
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row& row, const S*, const S* df, const Add& add) const {
    const S twice = df[0] + df[0];
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, twice * row.x(c));
  }

 private:
  // |q|^2 - |q - k|^2
  template <class S>
  [[nodiscard]] static S closeness(const PairOf<ResonantScore, S>& pair) {
    return pair.dot + pair.dot - pair.key[0];
  }
};

template <class Real>
using ResonantOde = Attention<Real, ResonantScore<Real>, ResonantFlow<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
