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

// The standard deviation; 0 for a single number.
[[nodiscard]] inline double spread_of(const std::vector<double>& x) {
  if (x.size() < 2) return 0;
  const double mean = mean_of(x);
  double sum = 0;
  for (const double v : x) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / double(x.size() - 1));
}

}  // namespace compare
