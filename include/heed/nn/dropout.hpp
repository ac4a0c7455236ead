// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dropout of single numbers of a row.
//
//   y = keep ? x / (1 - rate) : 0      dx = keep ? dy / (1 - rate) : 0
//
// keep is a function of (seed, step, stream, row, column) alone: nothing is stored, and backward draws the same
// bits again, for float and double and for any number of threads. `row` is a row of the whole batch (Context::row_of_batch). The row's key is 64 random bits of
// (seed, step, stream, row); simd/keep_bits.hpp has the rest of the formula.
//
// Bounds    a dropped place is 0 even if x holds NaN there.

#include <heed/core/parallel.hpp>
#include <heed/core/random.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/keep_bits.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

namespace detail {

template <class Real>
void drop_row(std::uint64_t key, double rate, const Real* x, Index count, Real* y) {
  constexpr Index W = kLanes<Real>;
  Dropper<Real> dropper = Dropper<Real>::along_columns(rate, key, 0);
  const auto drop = [&](const Real* from, Real* to) {
    dropper.next();
    dropper(Pack<Real>::load(from)).store(to);
  };
  Index j = 0;
  for (; j + W <= count; j += W) drop(x + j, y + j);
  if (j == count) return;
  Real lanes[std::size_t(W)] = {};
  std::copy(x + j, x + count, lanes);
  drop(lanes, lanes);
  std::copy(lanes, lanes + (count - j), y + j);
}

}  // namespace detail

// Does apply_dropout() with this rate change anything?
template <class Real>
[[nodiscard]] bool drops(const Context<Real>& c, double rate) {
  return c.training && rate != 0;
}

// Drops elements of x, or of a gradient, with probability `rate` in [0, 1) and scales the others. Copies x when rate
// is 0 or the context is not training. y may be x. Calls with the same stream in the
// same step drop the same places: every layer needs a stream of its own.
template <class Real>
void apply_dropout(Context<Real>& c, double rate, std::uint64_t stream,
                   const std::type_identity_t<MatrixView<const Real>>& x,
                   const std::type_identity_t<MatrixView<Real>>& y) {
  require(rate >= 0 && rate < 1, "apply_dropout: rate is ", rate, ", it must be in [0, 1)");
  require_extents(y, x.rows, x.columns, "apply_dropout", "y");
  const bool copies = !drops(c, rate);
  if (copies && x.data == y.data) return;
  const CounterRandom rows(CounterRandom(c.seed, stream).bits(c.step));
  detail::for_row_blocks(c, x.rows, x.columns, [&](Index first, Index last) {
    for (Index r = first; r < last; ++r) {
      if (copies)
        std::copy(x.row(r), x.row(r) + x.columns, y.row(r));
      else
        detail::drop_row(rows.bits(std::uint64_t(c.row_of_batch(r))), rate, x.row(r), x.columns,
                         y.row(r));
    }
  });
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
