// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures seconds, and the spread of several measurements.

#include <heed/core/error.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
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

// The median: the middle one of the sorted numbers; for an even count the mean of the two in the
// middle. Throws std::invalid_argument for no numbers.
[[nodiscard]] inline double median_of(std::vector<double> x) {
  require(!x.empty(), "median_of: there are no numbers");
  const auto middle = x.begin() + std::ptrdiff_t(x.size() / 2);
  std::nth_element(x.begin(), middle, x.end());
  if (x.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(x.begin(), middle)) / 2;
}

// The minimum of several numbers, and their quartiles and median.
struct Spread {
  double minimum = 0, lower = 0, median = 0, upper = 0;
};

// A quartile that falls between two of the sorted numbers is interpolated: the lower one of 1, 2,
// 4, 8 is 1.75. Throws std::invalid_argument for no numbers.
[[nodiscard]] inline Spread spread_of(std::vector<double> x) {
  require(!x.empty(), "spread_of: there are no numbers");
  std::sort(x.begin(), x.end());
  const auto quantile = [&](double share) {
    const double place = share * double(x.size() - 1);
    const std::size_t below = std::size_t(place), above = std::min(below + 1, x.size() - 1);
    return x[below] + (place - double(below)) * (x[above] - x[below]);
  };
  return {x.front(), quantile(0.25), quantile(0.5), quantile(0.75)};
}

}  // namespace HEED_ABI
}  // namespace heed
