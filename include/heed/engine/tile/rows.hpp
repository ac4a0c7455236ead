// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of keys, values or queries in row-major order, and whether they hold finite numbers only.

#include <heed/simd/pack.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {

// Row-major numbers in user or scratch memory.
template <class Real>
struct Rows {
  const Real* data = nullptr;
  Index count = 0, columns = 0, stride = 0;
  [[nodiscard]] const Real* row(Index r) const { return data + r * stride; }
  [[nodiscard]] Rows part(Index first, Index rows) const {
    return {row(first), rows, columns, stride};
  }
};

// to[r][c] = factor * from[r][c], rows of `stride` numbers, with zeros behind the last column. `to` may be `from`.
template <class Real>
void copy_rows(const Rows<Real>& from, Real factor, Real* to, Index stride) {
  constexpr Index W = kLanes<Real>;
  const Index whole = from.columns / W * W;
  for (Index r = 0; r < from.count; ++r, to += stride) {
    const Real* row = from.row(r);
    for (Index c = 0; c < whole; c += W)
      (Pack<Real>::load(row + c) * Pack<Real>(factor)).store(to + c);
    for (Index c = whole; c < stride; ++c) to[c] = c < from.columns ? factor * row[c] : Real(0);
  }
}

template <class Real>
[[nodiscard]] bool all_finite(const Rows<Real>& rows) {
  constexpr Index W = kLanes<Real>, chains = 4;
  const Index whole = rows.columns / W * W;
  Pack<Real> probe[chains] = {};  // x * 0 is 0 for finite x, NaN otherwise
  Real edge = Real(0);
  for (Index r = 0; r < rows.count; ++r) {
    const Real* row = rows.row(r);
    const auto look = [&](Index c, Index chain) {
      probe[chain] += Pack<Real>::load(row + c) * Real(0);
    };
    Index c = 0;
    for (; c + chains * W <= whole; c += chains * W)
#pragma GCC unroll 4
      for (Index chain = 0; chain < chains; ++chain) look(c + chain * W, chain);
    for (; c < whole; c += W) look(c, 0);
    for (; c < rows.columns; ++c) edge += row[c] * Real(0);
  }
  return sum_lanes((probe[0] + probe[1]) + (probe[2] + probe[3])) + edge == Real(0);
}

// Dense copy with `stride` numbers per row, zeros for non-finite numbers and behind the last column.
template <class Real>
[[nodiscard]] Rows<Real> finite_copy(const Rows<Real>& rows, Real* memory, Index stride) {
  for (Index r = 0; r < rows.count; ++r) {
    for (Index c = 0; c < rows.columns; ++c) {
      const Real x = rows.row(r)[c];
      memory[r * stride + c] = std::isfinite(x) ? x : Real(0);
    }
    for (Index c = rows.columns; c < stride; ++c) memory[r * stride + c] = Real(0);
  }
  return {memory, rows.count, rows.columns, stride};
}

}  // namespace HEED_ABI
}  // namespace heed
