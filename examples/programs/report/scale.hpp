// SPDX-License-Identifier: Apache-2.0
#pragma once

// Axes: Range collects the numbers to show, ticks_over() finds round numbers that cover them, and Scale maps values to
// places of a picture.

#include <limits>
#include <vector>

namespace heed_report {

// The smallest and the largest of the numbers that an axis can show.
class Range {
 public:
  explicit Range(bool logarithmic = false) : logarithmic_(logarithmic) {}

  // Widens the range to hold the value. Returns false and does nothing for NaN, for infinities (sizes over 1e300) and, on
  // a logarithmic axis, for numbers that are not positive (below 1e-280).
  bool include(double value);
  [[nodiscard]] bool empty() const { return low_ > high_; }
  [[nodiscard]] bool logarithmic() const { return logarithmic_; }
  [[nodiscard]] double low() const { return low_; }
  [[nodiscard]] double high() const { return high_; }

 private:
  bool logarithmic_;
  double low_ = std::numeric_limits<double>::infinity(), high_ = -low_;
};

// 1, 2 or 5 times powers of ten, about `wanted` of them, the first at or below the range and the last at or
// above it; on a logarithmic axis of less than a factor of four closer ones. A range of one number is widened, an empty one
// is [0, 1] or, logarithmic, [1, 10].
[[nodiscard]] std::vector<double> ticks_over(const Range& range, int wanted);

class Scale {
 public:
  // The first tick lies at `from`, the last at `to`.
  Scale(const Range& range, int wanted, double from, double to);
  // A scale with these ticks: at least two, rising, and positive on a logarithmic axis.
  Scale(std::vector<double> ticks, bool logarithmic, double from, double to);

  [[nodiscard]] double operator()(double value) const;
  [[nodiscard]] const std::vector<double>& ticks() const { return ticks_; }

 private:
  [[nodiscard]] double linear(double value) const;
  bool logarithmic_;
  double from_, to_;
  std::vector<double> ticks_;
};

}  // namespace heed_report
