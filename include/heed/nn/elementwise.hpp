// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sums and copies of whole matrices.

#include <heed/core/parallel.hpp>
#include <heed/nn/context.hpp>
#include <heed/simd/instructions.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

namespace detail {

// Calls body(first, last) in parallel for ranges of rows that hold about 65,536 numbers each.
template <class Real, class Body>
void for_row_blocks(const Context<Real>& c, Index rows, Index columns, Body&& body) {
  const Index block = std::max<Index>(1, (Index(1) << 16) / std::max<Index>(1, columns));
  const Index blocks = (rows + block - 1) / block;
  parallel_for(blocks, blocks > 1 ? resolve_threads(c.threads) : 1,
               [&](Index n) { body(n * block, std::min(rows, (n + 1) * block)); });
}

}  // namespace detail

// to = from
template <class Real>
void copy(const Context<Real>& c, const MatrixView<const Real>& from, const MatrixView<Real>& to) {
  require_extents(to, from.rows, from.columns, "copy", "to");
  detail::for_row_blocks(c, from.rows, from.columns, [&](Index first, Index last) {
    for (Index r = first; r < last; ++r)
      std::copy(from.row(r), from.row(r) + from.columns, to.row(r));
  });
}

// to += from
template <class Real>
void add(const Context<Real>& c, const MatrixView<const Real>& from, const MatrixView<Real>& to) {
  require_extents(to, from.rows, from.columns, "add", "to");
  detail::for_row_blocks(c, from.rows, from.columns, [&](Index first, Index last) {
    for (Index r = first; r < last; ++r) {
      const Real* source = from.row(r);
      Real* target = to.row(r);
      for (Index i = 0; i < from.columns; ++i) target[i] += source[i];
    }
  });
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
