// SPDX-License-Identifier: Apache-2.0
#include "plots.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace heed_report {

Whisker whisker_over(const std::vector<double>& numbers) {
  if (numbers.empty()) return {};
  const auto [low, high] = std::minmax_element(numbers.begin(), numbers.end());
  const bool finite =
      std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x); });
  const double none = std::numeric_limits<double>::quiet_NaN();
  return finite ? Whisker{*low, *high} : Whisker{none, none};
}

void Curve::add(double x, double y) {
  if (sums_.empty() || sums_.back().count == each_) {
    if (sums_.size() >= capacity_) {
      std::vector<Sum> halved;
      for (std::size_t i = 0; i + 1 < sums_.size(); i += 2)
        halved.push_back({sums_[i].x + sums_[i + 1].x, sums_[i].y + sums_[i + 1].y,
                          sums_[i].count + sums_[i + 1].count});
      sums_ = std::move(halved);
      each_ *= 2;
    }
    sums_.emplace_back();
  }
  Sum& last = sums_.back();
  last = {last.x + x, last.y + y, last.count + 1};
}

Series Curve::series(std::string name) const {
  Series series{std::move(name), {}, {}};
  for (const Sum& sum : sums_) {
    series.x.push_back(sum.x / double(sum.count));
    series.y.push_back(sum.y / double(sum.count));
  }
  return series;
}

}  // namespace heed_report
