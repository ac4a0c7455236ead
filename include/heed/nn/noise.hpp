// SPDX-License-Identifier: Apache-2.0
#pragma once

// Normal noise on rows, for tests of how robust matching is against it.
//
//   x <- x + sigma rms(x) n        n standard normal
//
// rms is the root mean square of all numbers of x. The noise of a number is a function of the context's seed and step, the
// stream, and the place of the number: its sequence, its position and its column.
//
// Shapes    x (batch * len, columns); row r has position first_position + r % len of sequence r / len, or as they are packed.
// Results   do not depend on the number of threads, not in their last bit.

#include <heed/core/random.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/nn/token_places.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

template <class Real>
void add_noise(const Context<Real>& c, double sigma, std::uint64_t stream,
               const MatrixView<Real>& x, Index len, Index first_position = 0) {
  double squares = 0;
  for (Index r = 0; r < x.rows; ++r)
    for (Index i = 0; i < x.columns; ++i) squares += double(x.row(r)[i]) * double(x.row(r)[i]);
  const double numbers = std::max(1.0, double(x.rows) * double(x.columns));
  const double scale = sigma * std::sqrt(squares / numbers);
  const CounterRandom random(CounterRandom(c.seed, stream).bits(c.step));
  const TokenPlaces places(c, x.rows, len);
  detail::for_row_blocks(c, x.rows, x.columns, [&](Index first, Index last) {
    for (Index r = first; r < last; ++r) {
      // Sequences have 2^32 random numbers each.
      const std::uint64_t place = (std::uint64_t(places.sequence(r)) << 32) +
                                  std::uint64_t(first_position + places.position(r));
      for (Index i = 0; i < x.columns; ++i)
        x.row(r)[i] +=
            Real(scale * random.normal(place * std::uint64_t(x.columns) + std::uint64_t(i)));
    }
  });
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
