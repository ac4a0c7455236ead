// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a parameter may lie, declared once. A part of an op that has bounded parameters shows them by
//
//   visit_ranges(f)     f("name", Param<Real>&, Interval) for each that has one value, or one per head
//   keep_jointly()      where several have a bound together: brings back what has left it
//
// validate() refuses what is outside (require_ranges); keep_in_range() brings back what a step of an optimiser
// has carried out. A value inside is never moved, and one that is NaN or infinite is left for validate() to
// name: no step of a sound size leads there.

#include <heed/core/error.hpp>
#include <heed/core/param.hpp>
#include <heed/core/scalar.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace heed {
inline namespace HEED_ABI {

// An open interval of finite numbers, or with `with_low` one that its lower end belongs to. `rule` ends the
// sentence "eta is 4, ...".
struct Interval {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  const char* rule = "it must be finite";
  bool with_low = false;

  [[nodiscard]] bool contains(double x) const {
    return std::isfinite(x) && (x > low || (with_low && x == low)) && x < high;
  }
  // x, or what lies inside next to the end that x has passed: the end itself where it belongs to the interval,
  // else 1/1024 away, or a quarter of a narrow interval.
  [[nodiscard]] double nearest(double x) const {
    if (contains(x) || !std::isfinite(x)) return x;
    const double room = std::min(1.0 / 1024, (high - low) / 4);
    if (x >= high) return high - room;
    return with_low ? low : low + room;
  }
};

[[nodiscard]] inline Interval positive_numbers() {
  Interval range;
  range.low = 0;
  range.rule = "it must be positive";
  return range;
}

inline void require_within(double value, const Interval& range, const char* where,
                           const char* name) {
  require(std::isfinite(value), where, ": ", name, " is ", value, ", it must be finite");
  require(range.contains(value), where, ": ", name, " is ", value, ", ", range.rule);
}

// Throws unless every parameter that `part` shows by visit_ranges() has one value, or one per head, each inside
// of its interval.
template <class Part>
void require_ranges(const Part& part, Index heads, const char* where) {
  const auto check = [&](const char* name, const auto& param, const Interval& range) {
    require_per_head(param, heads, where, name);
    for (Index i = 0; i < param.size(); ++i)
      require_within(double(math::value_of(param[i])), range, where, name);
  };
  const_cast<Part&>(part).visit_ranges(check);
}

// Brings the parameters of a part of an op back to where they may lie; nothing for a part without bounds.
template <class Part>
void keep_in_range(Part& part) {
  if constexpr (requires { part.visit_ranges([](const char*, auto&, const Interval&) {}); })
    part.visit_ranges([](const char*, auto& param, const Interval& range) {
      for (Index i = 0; i < param.size(); ++i) {
        auto& value = param[i];
        value = std::remove_reference_t<decltype(value)>(range.nearest(double(value)));
      }
    });
  if constexpr (requires { part.keep_jointly(); }) part.keep_jointly();
}

}  // namespace HEED_ABI
}  // namespace heed
