// SPDX-License-Identifier: Apache-2.0
#include "scale.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace heed_report {

namespace {

constexpr std::array<double, 3> kRound{1, 2, 5};
constexpr double kSmallest = 1e-280,
                 kLargest = 1e300;  // so that steps and ends stay normal numbers

[[nodiscard]] std::vector<double> linear_ticks(double low, double high, int wanted) {
  // Widened also where the range is lost in the rounding of its ends.
  const double size = std::max(std::abs(low), std::abs(high));
  if (!(high - low > std::max(1e-9 * size, kSmallest))) {
    const double around = size > kSmallest ? 0.1 * size : 1;
    low -= around;
    high += around;
  }
  const double rough = high / wanted - low / wanted;  // each alone is finite
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0})
    if (factor * power >= rough * (1 - 1e-9)) step = factor * power;
  std::vector<double> ticks;
  const double slack = 1e-9;  // an end that is round itself needs no further tick
  for (double n = std::floor(low / step + slack); n <= std::ceil(high / step - slack); ++n)
    ticks.push_back(n * step);
  return ticks;
}

[[nodiscard]] std::vector<double> decades(int first, int last, int wanted) {
  const int stride = std::max(1, (last - first + wanted - 1) / wanted);
  std::vector<double> ticks;
  for (int e = first; e < last + stride; e += stride) ticks.push_back(std::pow(10.0, e));
  return ticks;
}

[[nodiscard]] std::vector<double> logarithmic_ticks(double low, double high, int wanted) {
  const double slack = 1e-9;
  const int first = int(std::floor(std::log10(low) + slack));
  const int last = std::max(first + 1, int(std::ceil(std::log10(high) - slack)));
  if (last - first > 2) return decades(first, last, wanted);
  std::vector<double> ticks;
  for (int e = first; e <= last; ++e)
    for (const double factor : kRound) ticks.push_back(factor * std::pow(10.0, e));
  const auto begin = std::upper_bound(ticks.begin(), ticks.end(), low * (1 + slack)) - 1;
  auto end = std::lower_bound(ticks.begin(), ticks.end(), high * (1 - slack));
  if (end == begin) ++end;
  return {begin, end + 1};
}

}  // namespace

bool Range::include(double value) {
  if (!(std::abs(value) <= kLargest) || (logarithmic_ && value < kSmallest)) return false;
  low_ = std::min(low_, value);
  high_ = std::max(high_, value);
  return true;
}

std::vector<double> ticks_over(const Range& range, int wanted) {
  if (range.logarithmic())
    return range.empty() ? std::vector<double>{1, 10}
                         : logarithmic_ticks(range.low(), range.high(), wanted);
  return range.empty() ? linear_ticks(0, 1, wanted)
                       : linear_ticks(range.low(), range.high(), wanted);
}

Scale::Scale(const Range& range, int wanted, double from, double to)
    : logarithmic_(range.logarithmic()), from_(from), to_(to), ticks_(ticks_over(range, wanted)) {}

double Scale::operator()(double value) const {
  const double low = linear(ticks_.front()), high = linear(ticks_.back());
  return from_ + (to_ - from_) * ((linear(value) - low) / (high - low));
}

double Scale::linear(double value) const { return logarithmic_ ? std::log10(value) : value; }

}  // namespace heed_report
