// SPDX-License-Identifier: Apache-2.0
#include "scale.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <utility>

namespace heed_report {

namespace {

constexpr std::array<double, 3> kRound{1, 2, 5};
constexpr std::array<double, 7> kFine{1, 1.5, 2, 3, 4, 6, 8};
constexpr double kSmallest = 1e-280,
                 kLargest = 1e300;  // so that steps and ends stay normal numbers

[[nodiscard]] std::vector<double> linear_ticks(double low, double high, int wanted) {
  // The range is also widened if it is lost in the rounding of its ends.
  const double size = std::max(std::abs(low), std::abs(high));
  if (!(high - low > std::max(1e-9 * size, kSmallest))) {
    const double around = size > kSmallest ? 0.1 * size : 1;
    low -= around;
    high += around;
  }
  const double rough = high / wanted - low / wanted;  // each term alone is finite
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0})
    if (factor * power >= rough * (1 - 1e-9)) step = factor * power;
  std::vector<double> ticks;
  const double slack = 1e-9;  // a round end needs no further tick
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
  // Round numbers would leave more of a short axis empty than filled.
  const bool wide = high > 4 * low || !(high > low);
  if (!wide && high < 1.5 * low) return linear_ticks(low, high, wanted);
  const std::span<const double> factors =
      wide ? std::span<const double>(kRound) : std::span<const double>(kFine);
  std::vector<double> ticks;
  for (int e = first; e <= last; ++e)
    for (const double factor : factors) ticks.push_back(factor * std::pow(10.0, e));
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
    : Scale(ticks_over(range, wanted), range.logarithmic(), from, to) {}

Scale::Scale(std::vector<double> ticks, bool logarithmic, double from, double to)
    : logarithmic_(logarithmic), from_(from), to_(to), ticks_(std::move(ticks)) {}

double Scale::operator()(double value) const {
  const double low = linear(ticks_.front()), high = linear(ticks_.back());
  return from_ + (to_ - from_) * ((linear(value) - low) / (high - low));
}

double Scale::linear(double value) const { return logarithmic_ ? std::log10(value) : value; }

}  // namespace heed_report
