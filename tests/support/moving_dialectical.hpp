// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/variants.hpp>

namespace heed_test {

// A dialectical op whose rows move by different amounts; with the zero weights of make_dialectical() no row would move.
template <class T>
[[nodiscard]] heed::Dialectical<T> moving_dialectical(const heed::Geometry& g,
                                                      const heed::DialecticalOptions& options) {
  heed::Dialectical<T> op = heed::make_dialectical<T>(g, options);
  heed::detail::fill_tensors(op, 3);
  return op;
}

}  // namespace heed_test
