// SPDX-License-Identifier: Apache-2.0
#pragma once

// Parts that the kinds of plots share: colours, head and foot, the x axis, the legend.

#include "plots.hpp"
#include "scale.hpp"

namespace heed_report {

inline constexpr double kAxisName = kLine + 6;  // room above a plot for the name of its y axis

// The CSS classes of an element in the i-th colour: kind and number.
[[nodiscard]] std::string colour(const char* kind, std::size_t i);

// The CSS classes of line i: its colour and, once all colours are used, dashes.
[[nodiscard]] std::string stroke(std::size_t i);

// Draws the title. Returns its lower end.
[[nodiscard]] double head_of(Drawing& drawing, const std::string& title);

// Draws the note and the sentence on left-out values below `top`. Returns the height of the picture.
[[nodiscard]] double foot_of(Drawing& drawing, double top, const std::string& note,
                             std::size_t left_out);

// A legend: names beside samples of their colour, as many on a line as fit.
class Legend {
 public:
  Legend(Drawing& drawing, double top) : drawing_(drawing), y_(top + kLine) {}

  void add(const std::string& whole_name, std::size_t i);
  [[nodiscard]] double end() const { return y_ + 4; }

 private:
  static constexpr double kSample = 12;
  Drawing& drawing_;
  double x_ = kMargin, y_;
};

// Whisker number `i`, if there is one that the axis can show and that is longer than nothing.
[[nodiscard]] std::optional<Whisker> whisker_at(const std::vector<Whisker>& whiskers, std::size_t i,
                                                bool logarithmic = false);

// The width of the widest number.
[[nodiscard]] double widest(const std::vector<double>& ticks);

// The scale of an x axis between `left` and `right`, or narrower if its first or last number would leave the picture.
[[nodiscard]] Scale x_scale(std::vector<double> ticks, bool logarithmic, double left, double right);

// The x axis of a plot: grid lines from `top` to `bottom`, numbers and the label below. Returns the end.
double x_axis(Drawing& drawing, const Scale& x, double top, double bottom,
              const std::string& label);

}  // namespace heed_report
