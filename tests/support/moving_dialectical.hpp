// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/variants.hpp>

namespace heed_test {

// A dialectical op whose rows move, each as far as it does: with the weights of zeros that make_dialectical() gives all of
// them would rest from the beginning.
template <class T>
[[nodiscard]] heed::Dialectical<T> moving_dialectical(const heed::Geometry& g,
                                                      const heed::DialecticalOptions& options) {
  heed::Dialectical<T> op = heed::make_dialectical<T>(g, options);
  heed::detail::fill_tensors(op, 3);
  return op;
}

}  // namespace heed_test
