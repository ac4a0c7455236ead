// SPDX-License-Identifier: Apache-2.0
#pragma once

// The features that adaptive resonance computes for each query and key row x:
//
//   f_0 = 1/(|y| + eps),  y = x, or x P (low rank)          df_0/dy = -f_0^2 y/|y|
//   f_1 = factor |x| if adaptive, else 0                    df_1/dx = factor x/|x|
//
// Bounds  derivatives of norms are 0 at a zero row. ZeroNorm::safe: there, f_0 is 0 as well.

#include <heed/core/error.hpp>
#include <heed/core/param.hpp>
#include <heed/core/scalar.hpp>
#include <heed/simd/row_norm.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {

enum class ZeroNorm { regularised, safe };

struct DarFeatures {
  double eps;
  ZeroNorm zero_norm;
  bool adaptive, low_rank;

  template <class Row, class S>
  void of(const Row& row, double factor, S* f) const {
    const S norm = angle_norm<S>(row), zero = math::constant<S>(0);
    const S inverse = math::constant<S>(1) / (norm + math::constant<S>(eps));
    f[0] = zero_norm == ZeroNorm::regularised
               ? inverse
               : math::select(math::value_of(norm) == math::value_of(zero), zero, inverse);
    f[1] = zero;
    if (adaptive) f[1] = (low_rank ? full_norm<S>(row) : norm) * math::constant<S>(factor);
  }

  template <class Row, class S, class Add>
  void vjp(const Row& row, double factor, const S* f, const S* df, const Add& add) const {
    const S norm = angle_norm<S>(row);
    const S dangle = -(df[0] * f[0] * f[0]);
    const S dfull = adaptive ? S(df[1] * math::constant<S>(factor)) : math::constant<S>(0);
    if (!low_rank) {
      const S along = dangle + dfull;
      for (Index c = 0; c < row.dim(); ++c) add.add_x(c, along * over_norm(row.x(c), norm));
      return;
    }
    for (Index c = 0; c < row.rank(); ++c)
      add.add_projected(c, dangle * over_norm(row.projected(c), norm));
    if (!adaptive) return;
    const S full = full_norm<S>(row);
    for (Index c = 0; c < row.dim(); ++c) add.add_x(c, dfull * over_norm(row.x(c), full));
  }

 private:
  template <class S, class Row>
  [[nodiscard]] static S full_norm(const Row& row) {
    return row_norm<S>(row.dim(), [&](Index c) { return row.x(c); });
  }
  // |y|, the norm of the row that enters the cosine.
  template <class S, class Row>
  [[nodiscard]] S angle_norm(const Row& row) const {
    if (!low_rank) return full_norm<S>(row);
    return row_norm<S>(row.rank(), [&](Index c) { return row.projected(c); });
  }
};

// Throws unless `basis`, if given, has shape (dim, rank <= dim) and orthonormal columns, to 1e-3,
// so that a basis rounded to 16 bits passes.
template <class Real>
void require_orthonormal(const Param<Real>& basis, Index dim, const char* where) {
  if (!basis.given()) return;
  require(basis.shape().size() == 2 && basis.extent(0) == dim && basis.extent(1) <= dim, where,
          ": projection has ", basis.shape().size(), " axes and ", basis.size(),
          " values, it must have the shape (dim_qk, rank) with dim_qk ", dim,
          " and rank at most that");
  const Index rank = basis.extent(1);
  const auto at = [&](Index x, Index c) { return double(math::value_of(basis[x * rank + c])); };
  for (Index a = 0; a < rank; ++a)
    for (Index b = 0; b <= a; ++b) {
      double product = 0.0;
      for (Index x = 0; x < dim; ++x) product += at(x, a) * at(x, b);
      require(std::abs(product - (a == b ? 1.0 : 0.0)) < 1e-3, where, ": columns ", b, " and ", a,
              " of projection have the dot product ", product, ", they must be orthonormal");
    }
}

}  // namespace HEED_ABI
}  // namespace heed
