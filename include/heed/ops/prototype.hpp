// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prototype attention: a pair scores more when the query resembles the key's category, one of a few prototypes per
// head, and the output is pulled towards the query's own prototype. Prototypes are learnt by gradients, or online by
// an ART memory (ops/prototype/art_memory.hpp).
//
//   u(x) = x / (|x| + eps),   f_i = 1 / (|q_i| + eps)
//     df/dq = -f^2 q / |q|
//     dW_m = (du - W_m (W_m . du) / (|W_m| (|W_m| + eps))) / (|W_m| + eps)              du = dL/du(W_m)
//   c(j) = argmax_m u(k_j) . u(W_m),   j*(i) = argmax_m u(q_i) . u(W_m)
//     winners are constants
//   t_ij = q_i . u(W_c(j))
//     du(W_m) = sum over i and the keys of category m of dt_ij q_i                      dq_i = sum_j dt_ij u(W_c(j))
//   score_ij = logit_ij + lambda t_ij f_i                                               G = dL/dscore
//     dlogit = G      dt = G lambda f      df = G lambda t      dlambda = sum G t f
//   out_i = mixed_i + mu (W_j*(i) - q_i)
//     dmixed = dout   dq_i -= mu dout_i    dW_j*(i) += mu dout_i    dmu = sum_i dout_i . (W_j*(i) - q_i)
//
// Symbols  strength lambda, pull mu: one value, or one per head. W: ops/prototype/memory.hpp.
// Shapes   W (heads, M, dim_qk); categories are per query head, also where heads share keys. The
//          readout needs dim_v = dim_qk.
// Bounds   |score - logit| <= |lambda|; they are equal at lambda = 0, where dlambda is still exact. Without prototypes
//          score = logit and out = mixed. A row that sees no key keeps the mu term. At W_m = 0 or q_i = 0 the derivative of
//          u is I / eps, as automatic differentiation has it.
// Ranges   useful: lambda 0.1 ... 1, mu 0 ... 0.2.
// Accuracy errors of out, gradients on hard inputs (README.md beside this file):
//          accuracy of prototype  float 4e-6, 8e-4; double 4e-15, 3e-12
// Source   GPT2-ART note, section 2.1. The note's index j names keys and prototypes at once: here a
//          key stands for its category.
// Cost     M dim_qk multiplications per query and key, once; per pair one table entry. The readout:
//          M dim_qk per query again.

#include <heed/ops/prototype/categories.hpp>
#include <heed/ops/prototype/readout.hpp>
#include <heed/plug/attention.hpp>

namespace heed {
inline namespace HEED_ABI {

// pair.query[0] is f, pair.table is t.
template <class Real>
struct PrototypeScore : ScoreWith<PrototypeCategories<Real>> {
  static constexpr bool has_table = true;
  using KeptFeatures = PrototypeScore;
  template <class S>
  using PairType = PairOf<PrototypeScore, S>;

  Param<Real> strength = Real(0.1);  // lambda

  static constexpr auto parameters =
      std::tuple{tensor_if_given("W", &PrototypeScore::W, &PrototypeScore::memory_shape),
                 named("strength", &PrototypeScore::strength),
                 option("counts", &PrototypeScore::counts), option("eps", &PrototypeScore::eps)};

  void check(const Geometry& g, const char* where) const { this->check_memory(g, where); }

  template <class S>
  [[nodiscard]] S score(const PairType<S>& pair, const auto& p) const {
    return pair.logit + p[0] * (pair.table * pair.query[0]);
  }
  template <class S>
  void score_vjp(const PairType<S>& pair, const auto& p, S g, PairType<S>& d, auto& dp) const {
    const S e = g * p[0];
    d.logit = g;
    d.table = e * pair.query[0];
    d.query[0] = e * pair.table;
    dp[0] += g * (pair.table * pair.query[0]);
  }
};

// Score and readout share one W, which the score keeps: op.score.W.
template <class Real>
using Prototype = Attention<Real, PrototypeScore<Real>, Softmax<Real>, TiedPrototypeReadout<Real>>;

// The op for `g`, with `prototypes` rows of zeros per head, to be filled.
template <class Real>
[[nodiscard]] Prototype<Real> make_prototype(const Geometry& g, Index prototypes) {
  require(prototypes >= 0, "make_prototype: prototypes is ", prototypes,
          ", it must not be negative");
  Prototype<Real> op;
  op.score.W = Param<Real>(std::vector<Index>{g.heads, prototypes, g.dim_qk});
  return op;
}

}  // namespace HEED_ABI
}  // namespace heed
