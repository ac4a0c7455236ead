// SPDX-License-Identifier: Apache-2.0
#pragma once

// Seconds of a piece of work, and the median of several such numbers.

#include <heed/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class F>
[[nodiscard]] double seconds_of(F&& work) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point begin = Clock::now();
  work();
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The number in the middle of the sorted ones; of an even count the mean of the two in the middle. Throws
// std::invalid_argument for no numbers.
[[nodiscard]] inline double median_of(std::vector<double> x) {
  require(!x.empty(), "median_of: there are no numbers");
  const auto middle = x.begin() + std::ptrdiff_t(x.size() / 2);
  std::nth_element(x.begin(), middle, x.end());
  if (x.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(x.begin(), middle)) / 2;
}

}  // namespace HEED_ABI
}  // namespace heed
