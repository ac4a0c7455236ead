// SPDX-License-Identifier: Apache-2.0
#pragma once

// A row of floats as int8 numbers with one scale.
//
//   s = max_c |x(c)| / 127, at least 2^-126,   n(c) = x(c) / s rounded to the nearest integer, ties to even
//   x~(c) = s n(c), rounded to float
//
// Accuracy  |x~(c) - x(c)| <= (1/2 + 2^-16) s: half a step from rounding to n, 127 2^-24 of a step from rounding x / s,
//           which is at most 127 (1 + 2^-23), and as much from rounding s n. That is less than max |x| / 253, or 2^-126
//           where all |x| are below 127 2^-126. Zeros stay zeros.
// Bounds    every finite row: |n| <= 127, and x~ is finite. A row that holds a NaN or an infinity has s = NaN and n = 0:
//           it is NaN as a whole.

#include <heed/core/config.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

namespace heed {
inline namespace HEED_ABI {

// Writes n; returns s.
[[nodiscard]] inline float quantise(const float* row, Index count, std::int8_t* to) {
  // Compared as integers, the bits of |x| have the order of the numbers, with infinity and NaN above all.
  std::uint32_t top = 0;
  for (Index c = 0; c < count; ++c)
    top = std::max(top, std::bit_cast<std::uint32_t>(row[c]) & 0x7FFFFFFFU);
  const float largest = std::bit_cast<float>(top);
  if (!(largest <= std::numeric_limits<float>::max())) {
    std::fill_n(to, count, std::int8_t{0});
    return std::numeric_limits<float>::quiet_NaN();
  }
  constexpr float least = std::numeric_limits<float>::min();
  constexpr float most = 0x1.020406p121F;  // max / 127 rounded down: 127 times it is finite
  const float scale = std::clamp(largest / 127.0F, least, most);
  // After this is added the lowest bits hold the integer.
  constexpr float shift = 0x1.8p23F;
  for (Index c = 0; c < count; ++c)
    to[c] = static_cast<std::int8_t>(std::bit_cast<std::uint32_t>(row[c] / scale + shift) -
                                     std::bit_cast<std::uint32_t>(shift));
  return scale;
}

}  // namespace HEED_ABI
}  // namespace heed
