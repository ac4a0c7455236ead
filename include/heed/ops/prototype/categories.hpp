// SPDX-License-Identifier: Apache-2.0
#pragma once

// The derived values of prototype attention (formulas: ops/prototype.hpp): f of each query, the category of each key, and
// the table of unit prototypes u(W_m) that categories name.

#include <heed/ops/prototype/memory.hpp>
#include <heed/plug/features.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {

// Query feature 0 is f, key feature 0 the category.
template <class Real>
struct PrototypeCategories : PrototypeMemory<Real> {
  static constexpr int query_features = 1, key_features = 1;
  static constexpr bool counts_visible = false;

  // f = 1 / (|q| + eps)
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = InverseNorm::of<S>(row, this->eps);
  }
  template <class Row, class S, class Add>
  void query_features_vjp(const Row& row, const S* f, const S* df, const Add& add) const {
    InverseNorm::vjp(row, f[0], df[0], add);
  }
  // The category. Padding repeats prototype 0 in the table and loses every tie against it.
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

  // Number of rows of the table; row m is u(W_m). A head without prototypes has rows of zeros, and
  // an empty W one row of zeros.
  [[nodiscard]] Index table_size() const { return std::max<Index>(1, this->rows()); }
  // Not inlined, so that a program has it once: all calls then give the same bits, however their files were optimised.
  [[gnu::noinline]] void prepare_table(Index h, Index dim, Real* out) const {
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
  [[gnu::noinline]] void table_vjp(Index h, Index dim, const double* dtable,
                                   PrototypeMemory<Real>& grad) const {
    const Index count = this->count(h);
    for (Index m = 0; m < (count > 0 ? table_size() : 0); ++m) {
      const Index source = m < count ? m : 0;
      unit_vjp(this->prototype(h, source), dim, dtable + m * dim, grad.prototype(h, source));
    }
  }

 private:
  // Adds (du - w (w . du) / (n (n + eps))) / (n + eps), n = |w|; the second term is 0 at w = 0.
  void unit_vjp(const Real* w, Index dim, const double* du, Real* dw) const {
    const double n = row_norm<double>(dim, [=](Index c) { return double(w[c]); });
    const double factor = 1.0 / (n + this->eps);
    double along = 0.0;  // (w / n) . du
    for (Index c = 0; c < dim && n > 0.0; ++c) along += double(w[c]) / n * du[c];
    for (Index c = 0; c < dim; ++c) dw[c] += Real((du[c] - double(w[c]) * factor * along) * factor);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
