// SPDX-License-Identifier: Apache-2.0
#pragma once

// The range in which a number must lie, and the error for a number outside.

#include <heed/core/error.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace heed {
inline namespace HEED_ABI {

// An open interval of finite numbers; `with_low` includes its lower end. `rule` ends the sentence "eta is 4, ...".
struct Interval {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  const char* rule = "it must be finite";
  bool with_low = false;

  [[nodiscard]] bool contains(double x) const {
    return std::isfinite(x) && (x > low || (with_low && x == low)) && x < high;
  }
  // x, or if x lies outside, a number inside next to the end that x has passed: the end itself
  // where it belongs to the interval, else 1/1024 away from it, or a quarter of a narrow interval.
  [[nodiscard]] double nearest(double x) const {
    if (contains(x) || !std::isfinite(x)) return x;
    const double room = std::min(1.0 / 1024, (high - low) / 4);
    if (x >= high) return high - room;
    return with_low ? low : low + room;
  }
};

[[nodiscard]] constexpr Interval positive_numbers() {
  Interval range;
  range.low = 0;
  range.rule = "it must be positive";
  return range;
}
// [low, infinity)
[[nodiscard]] constexpr Interval at_least(double low, const char* rule) {
  Interval range;
  range.low = low;
  range.rule = rule;
  range.with_low = true;
  return range;
}

// Throws std::invalid_argument, its sentence starting with `where`, unless `value` lies in the range.
inline void require_within(double value, const Interval& range, const char* where,
                           const char* name) {
  require(std::isfinite(value), where, ": ", name, " is ", value, ", it must be finite");
  require(range.contains(value), where, ": ", name, " is ", value, ", ", range.rule);
}

}  // namespace HEED_ABI
}  // namespace heed
