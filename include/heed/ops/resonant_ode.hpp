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
#include <heed/plug/features.hpp>

namespace heed {
inline namespace HEED_ABI {

// The drive D; key feature 0 is |k|^2.
template <class Real>
struct ResonantScore : ScoreWith<SquaredKeyNorms> {
  using PlaceFree = ResonantScore;

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

template <class Real>
using ResonantOde = Attention<Real, ResonantScore<Real>, ResonantFlow<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
