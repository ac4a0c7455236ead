// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <numeric>
#include <vector>

namespace compare {

// The mean of at least one number.
[[nodiscard]] inline double mean_of(const std::vector<double>& x) {
  return std::accumulate(x.begin(), x.end(), 0.0) / double(x.size());
}

// The standard deviation of at least two numbers.
[[nodiscard]] inline double spread_of(const std::vector<double>& x) {
  const double mean = mean_of(x);
  double sum = 0;
  for (const double v : x) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / double(x.size() - 1));
}

}  // namespace compare
