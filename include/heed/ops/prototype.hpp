// SPDX-License-Identifier: Apache-2.0
#pragma once

// Prototype attention: pairs score more when the query resembles the key's category, and the output
// is pulled towards the query's own.
//
//   u(x)     = x / (|x| + eps)
//   c(j)     = argmax_m u(k_j) . u(W_m)         j*(i) = argmax_m u(q_i) . u(W_m)
//   score_ij = logit_ij + lambda u(q_i) . u(W_c(j))
//   out_i    = mixed_i + mu (W_j*(i) - q_i)
//
// Backward; winners are constants. G = dL/dscore, t_ij = q_i . u(W_c(j)), f_i = 1 / (|q_i| + eps):
//
//   dlogit = G,  dt = G lambda f,  df = G lambda t,  dlambda = sum G t f,  df/dq = -f^2 q / |q|
//   du(W_m) = sum over i and the keys of category m of dt_ij q_i
//   dW_m  = (du - W_m (W_m . du) / (|W_m| (|W_m| + eps))) / (|W_m| + eps)
//           + mu sum over the i with j*(i) = m of dout_i
//   dmixed = dout,  dq_i -= mu dout_i,  dmu = sum_i dout_i . (W_j*(i) - q_i)
//
// Symbols  strength lambda, pull mu: one value, or one per head. W: ops/prototype/memory.hpp.
// Shapes   W (heads, M, dim_qk); categories are per query head, also where heads share keys. The
//          readout needs dim_v = dim_qk.
// Bounds   |score - logit| <= |lambda|; equal at lambda = 0, where dlambda is still exact. Without
//          prototypes score = logit and out = mixed. A row that sees no key keeps the mu term. At
//          W_m = 0 or q_i = 0 the derivative of u is I / eps, as automatic differentiation has it.
// Ranges   that serve: lambda 0.1 ... 1, mu 0 ... 0.2.
// Source   GPT2-ART note, section 2.1. Its index j names keys and prototypes at once: here a key
//          stands for its category.
// Cost     M dim_qk multiplications per query and key, once; per pair one table entry. The readout:
//          M dim_qk per query again.

#include <heed/ops/prototype/readout.hpp>
#include <heed/plug/attention.hpp>

namespace heed {
inline namespace HEED_ABI {

// score = logit + lambda t f. Key feature 0 is the category, query feature 0 is f.
template <class Real>
struct PrototypeScore : PlainScore, PrototypeMemory<Real> {
  static constexpr bool has_table = true;
  static constexpr int query_features = 1, key_features = 1;
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

  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = math::constant<S>(1) / (norm_of<S>(row) + math::constant<S>(this->eps));
  }
  template <class Row, class S, class Add>
  void query_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    const S along = over_norm(S(-(df[0] * f[0] * f[0])), norm_of<S>(row));
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, along * row.x(c));
  }
  // The category: padding repeats prototype 0 in the table and loses every tie against it.
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    auto best = math::value_of(row.table(0));
    f[0] = math::constant<S>(0);
    for (Index m = 1; m < row.table_rows(); ++m) {
      const auto match = math::value_of(row.table(m));
      const auto better = match > best;
      best = math::select(better, match, best);
      f[0] = math::select(better, math::constant<S>(m), f[0]);
    }
  }
  template <class Row, class S, class Add>
  void key_features_vjp(const Row&, const S*, const S*, const Add&) const {}

  // Row m is u(W_m). A head without prototypes has zeros, and an empty W one such row.
  [[nodiscard]] Index table_size() const { return std::max<Index>(1, this->rows()); }
  void prepare_table(Index h, Index dim, Real* out) const {
    const Index count = this->count(h);
    for (Index m = 0; m < table_size(); ++m)
      for (Index c = 0; c < dim; ++c) out[m * dim + c] = math::constant<Real>(0);
    for (Index m = 0; m < (count > 0 ? table_size() : 0); ++m) {
      const Index source = m < count ? m : 0;
      const Real factor =
          math::constant<Real>(1) / (this->norm(h, source) + math::constant<Real>(this->eps));
      for (Index c = 0; c < dim; ++c) out[m * dim + c] = this->prototype(h, source)[c] * factor;
    }
  }
  void table_vjp(Index h, Index dim, const double* dtable, PrototypeScore& grad) const {
    const Index count = this->count(h);
    for (Index m = 0; m < (count > 0 ? table_size() : 0); ++m) {
      const Index source = m < count ? m : 0;
      unit_vjp(this->prototype(h, source), dim, dtable + m * dim, grad.prototype(h, source));
    }
  }

 private:
  template <class S, class Row>
  [[nodiscard]] static S norm_of(const Row& row) {
    return row_norm<S>(row.dim(), [&](Index c) { return row.x(c); });
  }
  // Adds (du - w (w . du) / (n (n + eps))) / (n + eps), n = |w|; the second term is 0 at w = 0.
  void unit_vjp(const Real* w, Index dim, const double* du, Real* dw) const {
    const double n = row_norm<double>(dim, [=](Index c) { return double(w[c]); });
    const double factor = 1.0 / (n + this->eps);
    double along = 0.0;  // (w / n) . du
    for (Index c = 0; c < dim && n > 0.0; ++c) along += double(w[c]) / n * du[c];
    for (Index c = 0; c < dim; ++c) dw[c] += Real((du[c] - double(w[c]) * factor * along) * factor);
  }
};

// Score and readout share one W, which the score keeps: op.score.W.
template <class Real>
using Prototype = Attention<Real, PrototypeScore<Real>, Softmax<Real>, TiedPrototypeReadout<Real>>;

// For `g`, with `prototypes` rows of zeros per head, to be filled.
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
