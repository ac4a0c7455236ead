// SPDX-License-Identifier: Apache-2.0
#include "plots.hpp"

#include "labels.hpp"
#include "plot_parts.hpp"

#include <algorithm>
#include <cmath>

namespace heed_report {

namespace {

class BarDrawing {
 public:
  explicit BarDrawing(const BarChart& chart) : chart_(chart) {}

  [[nodiscard]] Picture run() {
    top_ = head_of(drawing_, chart_.title);
    row_ = kBar * double(std::max<std::size_t>(1, chart_.groups.size())) + kGap;
    const double bottom = top_ + row_ * double(chart_.labels.size()) + kGap / 2;
    const Range range = range_of();
    const std::vector<double> ticks = ticks_over(range, 4);
    step_ = ticks[1] - ticks[0];
    const Scale x =
        x_scale(ticks, false, kMargin + 6 + widest_label(), kWidth - kMargin - widest_value());
    const double left = x(x.ticks().front()), right = x(x.ticks().back());
    const double end = x_axis(drawing_, x, top_, bottom, chart_.axis);
    for (std::size_t i = 0; i < chart_.labels.size(); ++i)
      drawing_.text({left - 6, middle(i, 0) + (row_ - kGap - kBar) / 2 + 4},
                    fitted(chart_.labels[i], kWidestLabel), Anchor::end);
    if (!chart_.points) each([&](std::size_t g, std::size_t i) { bar(g, i, x); });
    if (chart_.points) drawing_.rectangle({left, top_}, right - left, bottom - top_, "frame");
    for (const double at : reference_places(range))
      drawing_.line({x(at), top_}, {x(at), bottom}, "mark");
    each([&](std::size_t g, std::size_t i) { value(g, i, x); });
    return drawing_.finish(chart_.name, chart_.title,
                           foot_of(drawing_, legend(end), chart_.note, left_out_));
  }

 private:
  static constexpr double kBar = 15, kGap = 7, kWidestLabel = 150;

  [[nodiscard]] double widest_label() const {
    double width = 0;
    for (const std::string& label : chart_.labels)
      width = std::max(width, text_width(fitted(label, kWidestLabel)));
    return width;
  }
  // Values of points have the digits that the axis tells apart; values of bars have the usual ones.
  [[nodiscard]] std::string value_text(double value) const {
    return chart_.points ? label_text(value, step_) : label_text(value);
  }
  // Width of the column of values.
  [[nodiscard]] double widest_value() const {
    double width = 0;
    for (const Group& group : chart_.groups)
      for (const double value : group.values)
        width = std::max(width, text_width(value_text(value)) + 6);
    return width;
  }

  // The y of the middle of entry i of group g.
  [[nodiscard]] double middle(std::size_t i, std::size_t g) const {
    return top_ + kGap / 2 + row_ * double(i) + kBar * (double(g) + 0.5);
  }

  template <class Function>
  void each(const Function& function) const {
    for (std::size_t i = 0; i < chart_.labels.size(); ++i)
      for (std::size_t g = 0; g < chart_.groups.size(); ++g) function(g, i);
  }

  [[nodiscard]] Range range_of() const {
    Range range;
    if (!chart_.points) (void)range.include(0);
    if (chart_.reference) (void)range.include(*chart_.reference);
    for (const Group& group : chart_.groups)
      for (std::size_t i = 0; i < group.values.size(); ++i) {
        if (!is_drawn(group.values[i])) continue;
        (void)range.include(group.values[i]);
        if (const auto whisker = whisker_at(group.whiskers, i))
          (void)(range.include(whisker->low) && range.include(whisker->high));
      }
    return range;
  }

  // Positions of lines across the chart: at the reference, if any, and at 0, where bars begin.
  [[nodiscard]] std::vector<double> reference_places(const Range& range) const {
    std::vector<double> places;
    Range alone;
    if (chart_.reference && alone.include(*chart_.reference)) places.push_back(*chart_.reference);
    if (!chart_.points && !range.empty()) places.push_back(0);
    return places;
  }

  [[nodiscard]] static bool is_drawn(double value) {
    Range alone;
    return alone.include(value);
  }
  void bar(std::size_t g, std::size_t i, const Scale& x) {
    const double value = chart_.groups[g].values[i];
    if (!is_drawn(value)) return;
    const double zero = x(0), at = x(value);
    drawing_.rectangle({std::min(zero, at), middle(i, g) - kBar / 2 + 1}, std::abs(at - zero),
                       kBar - 2, colour("bar f", g));
  }

  // Draws the marks on top of bars and lines: whisker, point and the value as text.
  void value(std::size_t g, std::size_t i, const Scale& x) {
    const Group& group = chart_.groups[g];
    const double y = middle(i, g);
    if (!is_drawn(group.values[i])) {
      ++left_out_;
      drawing_.text({kWidth - kMargin, y + 4}, "\u2013", Anchor::end);
      return;
    }
    if (const auto whisker = whisker_at(group.whiskers, i)) {
      const std::string css = chart_.points ? colour("line l", g) : "whisker";
      const double low = x(whisker->low), high = x(whisker->high);
      drawing_.line({low, y}, {high, y}, css);
      for (const double end : {low, high}) drawing_.line({end, y - 4}, {end, y + 4}, css);
    }
    if (chart_.points) drawing_.circle({x(group.values[i]), y}, 4, colour("f", g));
    drawing_.text({kWidth - kMargin, y + 4}, value_text(group.values[i]), Anchor::end);
  }

  [[nodiscard]] double legend(double top) {
    if (chart_.groups.size() < 2) return top;
    Legend legend(drawing_, top);
    for (std::size_t g = 0; g < chart_.groups.size(); ++g) legend.add(chart_.groups[g].name, g);
    return legend.end();
  }

  const BarChart& chart_;
  Drawing drawing_;
  std::size_t left_out_ = 0;
  double top_ = 0, row_ = 0, step_ = 1;  // step: of the axis
};

}  // namespace

Picture draw(const BarChart& chart) { return BarDrawing(chart).run(); }

}  // namespace heed_report
