// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace heed::inline HEED_ABI {

// Throws std::invalid_argument with all parts joined: `fail("forward(dar): key has dim ", 48)`.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  text.precision(17);
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) fail(parts...);
}

// a * b for extents; throws when the product does not fit an Index.
[[nodiscard]] inline Index checked_product(Index a, Index b, const char* what) {
  if (a != 0 && b > std::numeric_limits<Index>::max() / a)
    fail(what, ": ", a, " x ", b, " overflows a 64-bit index");
  return a * b;
}

}  // namespace heed::inline HEED_ABI
