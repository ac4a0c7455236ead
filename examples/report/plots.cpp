// SPDX-License-Identifier: Apache-2.0
#include "plots.hpp"

#include "labels.hpp"
#include "scale.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace heed_report {

namespace {

constexpr double kTitleSize = 14;
constexpr double kAxisName = kLine + 6;  // room above a plot for the name of its y axis

[[nodiscard]] std::string colour(const char* kind, std::size_t i) {
  return kind + std::to_string(i % std::size_t(kColours));
}

// The classes of line i: its colour and, where the colours have begun again, dashes.
[[nodiscard]] std::string stroke(std::size_t i) {
  const std::size_t dash = i / std::size_t(kColours);
  return colour("line l", i) + (dash == 0 ? "" : dash % 2 == 1 ? " dash1" : " dash2");
}

[[nodiscard]] double head_of(Drawing& drawing, const std::string& title) {
  return drawing.paragraph(0, title, "title", kTitleSize) + 6;
}

// Draws the note and the sentence on what was left out below `top`. Returns the height of the picture.
[[nodiscard]] double foot_of(Drawing& drawing, double top, const std::string& note,
                             std::size_t left_out) {
  std::string text = note;
  if (left_out > 0) text += (text.empty() ? "" : " ") + left_out_text(left_out);
  return text.empty() ? top + 4 : drawing.paragraph(top + 4, text, "note") + 6;
}

// A legend: names beside samples of their colour, as many on a line as fit.
class Legend {
 public:
  Legend(Drawing& drawing, double top) : drawing_(drawing), y_(top + kLine) {}

  void add(const std::string& whole_name, std::size_t i) {
    const std::string name = fitted(whole_name, kWidth - 2 * kMargin - kSample - 6);
    const double width = kSample + 6 + text_width(name) + 10;
    if (x_ > kMargin && x_ + width - 10 > kWidth - kMargin) {
      x_ = kMargin;
      y_ += kLine;
    }
    drawing_.rectangle({x_, y_ - 10}, kSample, 11, colour("bar f", i));
    drawing_.text({x_ + kSample + 6, y_}, name);
    x_ += width;
  }
  [[nodiscard]] double end() const { return y_ + 4; }

 private:
  static constexpr double kSample = 12;
  Drawing& drawing_;
  double x_ = kMargin, y_;
};

[[nodiscard]] double widest(const std::vector<double>& ticks) {
  double width = 0;
  for (const double tick : ticks) width = std::max(width, text_width(number_text(tick)));
  return width;
}

[[nodiscard]] double half_width(double tick) { return text_width(number_text(tick)) / 2; }

// The scale of an x axis between `left` and `right`, or less where its first or last number would leave the picture.
[[nodiscard]] Scale x_scale(std::vector<double> ticks, bool logarithmic, double left,
                            double right) {
  left = std::max(left, kMargin + half_width(ticks.front()));
  right = std::min(right, kWidth - kMargin - half_width(ticks.back()));
  return {std::move(ticks), logarithmic, left, right};
}

// The x axis of a plot: grid lines from `top` to `bottom`, numbers and the label below. Returns the end.
double x_axis(Drawing& drawing, const Scale& x, double top, double bottom,
              const std::string& label) {
  double last_end = -kWidth;
  for (const double tick : x.ticks()) {
    drawing.line({x(tick), top}, {x(tick), bottom}, "grid");
    const double half = half_width(tick);
    if (x(tick) - half < last_end + 4) continue;
    drawing.text({x(tick), bottom + 16}, number_text(tick), Anchor::middle);
    last_end = x(tick) + half;
  }
  const double half = text_width(label) / 2,
               middle = (x(x.ticks().front()) + x(x.ticks().back())) / 2;
  drawing.text(
      {std::max(kMargin + half, std::min(middle, kWidth - kMargin - half)), bottom + 16 + kLine},
      label, Anchor::middle);
  return bottom + 21 + kLine;
}

// The ticks of the points' own places; none where there are fewer than two places.
[[nodiscard]] std::vector<double> places_of_points(const LinePlot& plot) {
  std::vector<double> places;
  for (const Series& s : plot.series)
    for (const double x : s.x) {
      Range alone(plot.x.logarithmic);
      if (alone.include(x)) places.push_back(x);
    }
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  if (places.size() < 2) places.clear();
  return places;
}

class LineDrawing {
 public:
  explicit LineDrawing(const LinePlot& plot) : plot_(plot) {}

  [[nodiscard]] Picture run() {
    Range x_range(plot_.x.logarithmic), y_range(plot_.y.logarithmic);
    for (const Series& s : plot_.series)
      for (std::size_t i = 0; i < s.x.size(); ++i) note(x_range, y_range, s.x[i], s.y[i]);
    for (const auto& [axis, range] : {std::pair(&plot_.x, &x_range), std::pair(&plot_.y, &y_range)})
      if (axis->from_zero && !axis->logarithmic) (void)range->include(0);
    const double top = head_of(drawing_, plot_.title) + kAxisName, bottom = top + height();
    const Scale y(y_range, 5, bottom, top);
    const Scale x = x_scale(x_ticks(x_range), plot_.x.logarithmic, kMargin + widest(y.ticks()) + 6,
                            kWidth - room_for_names());
    const double left = x(x.ticks().front());
    right_ = x(x.ticks().back());
    drawing_.text({kMargin, top - 10}, plot_.y.label);
    const double end = x_axis(drawing_, x, top, bottom, plot_.x.label);
    for (const double tick : y.ticks()) {
      drawing_.line({left, y(tick)}, {right_, y(tick)}, "grid");
      drawing_.text({left - 5, y(tick) + 4}, number_text(tick), Anchor::end);
    }
    drawing_.rectangle({left, top}, right_ - left, bottom - top, "frame");
    find_ends(x, y, bottom);
    for (std::size_t i = 0; i < plot_.series.size(); ++i) series(i, x, y);
    if (is_named()) names(top, bottom);
    return drawing_.finish(plot_.name, plot_.title, foot_of(drawing_, end, plot_.note, left_out_));
  }

 private:
  static constexpr double kPlotHeight = 200, kWidestName = 150;
  static constexpr double kNameHeight = 14, kLeader = 20;

  [[nodiscard]] bool is_named() const { return plot_.series.size() > 1; }
  [[nodiscard]] std::string name_of(std::size_t i) const {
    return fitted(plot_.series[i].name, kWidestName);
  }
  // A quarter more than the names need: lines to names that fill the whole side would be steep.
  [[nodiscard]] double height() const {
    return std::max(kPlotHeight, 1.25 * kNameHeight * double(plot_.series.size()));
  }

  [[nodiscard]] std::vector<double> x_ticks(const Range& range) const {
    std::vector<double> ticks;
    if (plot_.x.at_points) ticks = places_of_points(plot_);
    return ticks.empty() ? ticks_over(range, 5) : ticks;
  }
  [[nodiscard]] double room_for_names() const {
    double room = 0;
    if (is_named())
      for (std::size_t i = 0; i < plot_.series.size(); ++i)
        room = std::max(room, kLeader + text_width(name_of(i)) + kMargin);
    return room;
  }

  // Notes a point in both ranges, or, where one of its coordinates cannot be drawn, in none.
  void note(Range& x_range, Range& y_range, double x, double y) {
    if (!is_drawn(x, y)) {
      ++left_out_;
      return;
    }
    (void)x_range.include(x);
    (void)y_range.include(y);
  }
  [[nodiscard]] bool is_drawn(double x, double y) const {
    Range x_alone(plot_.x.logarithmic), y_alone(plot_.y.logarithmic);
    return x_alone.include(x) && y_alone.include(y);
  }

  // Finds where each line ends, at the bottom where nothing of it is drawn, and gives the lines their looks.
  void find_ends(const Scale& x, const Scale& y, double bottom) {
    for (const Series& s : plot_.series) {
      Point end{right_, bottom};
      for (std::size_t n = 0; n < s.x.size(); ++n)
        if (is_drawn(s.x[n], s.y[n])) end = {x(s.x[n]), y(s.y[n])};
      ends_.push_back(end);
      looks_.push_back(looks_.size());
    }
    if (looks_.size() <= std::size_t(kColours)) return;
    std::vector<std::size_t> order = looks_;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return ends_[a].y < ends_[b].y; });
    for (std::size_t rank = 0; rank < order.size(); ++rank) looks_[order[rank]] = rank;
  }

  void series(std::size_t i, const Scale& x, const Scale& y) {
    const Series& s = plot_.series[i];
    std::vector<Point> run;
    const auto put = [&] {
      if (run.size() > 1) drawing_.polyline(run, stroke(looks_[i]));
      if (run.size() == 1 || s.marks)
        for (const Point& p : run) drawing_.circle(p, 3, colour("f", looks_[i]));
      run.clear();
    };
    for (std::size_t n = 0; n < s.x.size(); ++n)
      if (is_drawn(s.x[n], s.y[n]))
        run.push_back({x(s.x[n]), y(s.y[n])});
      else
        put();
    put();
  }

  // Writes the names beside the ends of their lines, each with a thin line that leads to it.
  void names(double top, double bottom) {
    std::vector<double> wishes;
    for (const Point& end : ends_) wishes.push_back(end.y);
    const std::vector<double> places =
        spread_out(wishes, kNameHeight, top + kNameHeight / 2, bottom - kNameHeight / 2);
    for (std::size_t i = 0; i < places.size(); ++i) {
      const Point end = ends_[i], name{right_ + kLeader, places[i]};
      drawing_.polyline({{std::max(end.x, right_ + 1), end.y}, {name.x - 3, name.y}},
                        colour("leader l", looks_[i]));
      drawing_.text({name.x, name.y + 4}, name_of(i));
    }
  }

  const LinePlot& plot_;
  Drawing drawing_;
  std::size_t left_out_ = 0;
  double right_ = 0;  // of the frame
  std::vector<Point> ends_;
  std::vector<std::size_t> looks_;  // numbers of colours and dashes
};

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
  // Points on an axis that shows a part of their size have the digits that this axis tells apart.
  [[nodiscard]] std::string value_text(double value) const {
    return chart_.points ? label_text(value, step_) : label_text(value);
  }
  // Of the column of values.
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
        if (const auto whisker = whisker_of(group, i))
          (void)(range.include(whisker->low) && range.include(whisker->high));
      }
    return range;
  }

  // Where lines across the chart stand: at the reference, if any, and at 0, where bars begin.
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
  [[nodiscard]] static std::optional<Whisker> whisker_of(const Group& group, std::size_t i) {
    if (i >= group.whiskers.size()) return {};
    const Whisker& w = group.whiskers[i];
    if (!is_drawn(w.low) || !is_drawn(w.high) || !(w.low < w.high)) return {};
    return w;
  }

  void bar(std::size_t g, std::size_t i, const Scale& x) {
    const double value = chart_.groups[g].values[i];
    if (!is_drawn(value)) return;
    const double zero = x(0), at = x(value);
    drawing_.rectangle({std::min(zero, at), middle(i, g) - kBar / 2 + 1}, std::abs(at - zero),
                       kBar - 2, colour("bar f", g));
  }

  // Draws what stands on top of bars and lines: whisker, point and the value as text.
  void value(std::size_t g, std::size_t i, const Scale& x) {
    const Group& group = chart_.groups[g];
    const double y = middle(i, g);
    if (!is_drawn(group.values[i])) {
      ++left_out_;
      drawing_.text({kWidth - kMargin, y + 4}, "\u2013", Anchor::end);
      return;
    }
    if (const auto whisker = whisker_of(group, i)) {
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

// From a number to one of the levels of colour.
class Heat {
 public:
  static constexpr int kLevels = 32;

  explicit Heat(const Range& range) : scale_(range, 4, 0, 1) {}

  [[nodiscard]] int level(double value) const {
    return std::clamp(int(scale_(value) * kLevels), 0, kLevels - 1);
  }
  [[nodiscard]] static std::string colour_of(int level) {
    return heat_colour(double(level) / (kLevels - 1));
  }

  // Draws a bar of all colours with numbers below. Returns where it ends.
  double legend(Drawing& drawing, double top, const std::string& label) const {
    const double left = 24, right = kWidth - 24, step = (right - left) / kLevels;
    drawing.text({left, top + 12}, label);
    for (int i = 0; i < kLevels; ++i)
      drawing.rectangle({left + step * i, top + 18}, step + 0.3, 10, "cells", colour_of(i));
    for (const double tick : scale_.ticks())
      drawing.text({left + (right - left) * scale_(tick), top + 42}, number_text(tick),
                   Anchor::middle);
    return top + 46;
  }

 private:
  Scale scale_;
};

// A rectangle as SVG path data.
[[nodiscard]] std::string box(Point corner, double width, double height) {
  return "M" + coordinate(corner.x) + " " + coordinate(corner.y) + "h" + coordinate(width) + "v" +
         coordinate(height) + "h" + coordinate(-width) + "z";
}

[[nodiscard]] Range range_of(const std::vector<double>& values, std::size_t& left_out) {
  Range range;
  for (const double value : values)
    if (!range.include(value)) ++left_out;
  return range;
}

class HeatDrawing {
 public:
  explicit HeatDrawing(const HeatMap& map) : map_(map) {}

  [[nodiscard]] Picture run() {
    std::vector<double> shown;
    for (std::size_t i = 0; i < map_.values.size(); ++i)
      if (!is_hidden(i)) shown.push_back(map_.values[i]);
    const Heat heat(range_of(shown, left_out_));
    place_cells();
    const double right = corner_.x + width_ * double(map_.columns),
                 bottom = corner_.y + height_ * double(map_.rows);
    drawing_.text({kMargin, corner_.y - 10}, map_.y_label);
    draw_cells(heat);
    drawing_.rectangle(corner_, right - corner_.x, bottom - corner_.y, "frame");
    name_rows();
    const double below = name_columns(bottom);
    const double half = text_width(map_.x_label) / 2;
    drawing_.text({std::max(kMargin + half, (corner_.x + right) / 2), below + kLine}, map_.x_label,
                  Anchor::middle);
    const double end = heat.legend(drawing_, below + 5 + kLine, map_.scale_label);
    return drawing_.finish(map_.name, map_.title, foot_of(drawing_, end, map_.note, left_out_));
  }

 private:
  static constexpr double kOverlap =
      0.2;  // of neighbours, so that the background does not shine through
  static constexpr double kNamedRow = 16, kWidestName = 150;

  void place_cells() {
    const double top = head_of(drawing_, map_.title) + kAxisName;
    double left = 36;
    for (const std::string& name : map_.row_names)
      left = std::max(left, kMargin + text_width(fitted(name, kWidestName)) + 6);
    corner_ = {left, top};
    const double size = kWidth - left - 16;
    const auto count = [](std::size_t n) { return double(std::max<std::size_t>(1, n)); };
    width_ = height_ = size / count(std::max(map_.rows, map_.columns));
    if (!map_.row_names.empty()) height_ = kNamedRow;
    if (!map_.column_names.empty()) width_ = std::min(4 * kNamedRow, size / count(map_.columns));
  }

  [[nodiscard]] std::size_t every() const {
    return std::max<std::size_t>(1, std::max(map_.rows, map_.columns) / 8);
  }
  void name_rows() {
    for (std::size_t i = 0; i < map_.rows; i += map_.row_names.empty() ? every() : 1)
      drawing_.text(
          {corner_.x - 5, corner_.y + (double(i) + 0.5) * height_ + 4},
          map_.row_names.empty() ? std::to_string(i) : fitted(map_.row_names[i], kWidestName),
          Anchor::end);
  }
  // Returns the base line of the lowest name.
  [[nodiscard]] double name_columns(double bottom) {
    const auto middle = [&](std::size_t i) { return corner_.x + (double(i) + 0.5) * width_; };
    if (map_.column_names.empty()) {
      for (std::size_t i = 0; i < map_.columns; i += every())
        drawing_.text({middle(i), bottom + 15}, std::to_string(i), Anchor::middle);
      return bottom + 15;
    }
    double longest = 0;
    const auto each = std::size_t(std::max(1.0, std::ceil(13 / width_)));
    for (std::size_t i = 0; i < map_.columns; i += each) {
      const std::string name = fitted(map_.column_names[i], kWidestName);
      drawing_.upright_text({middle(i) + 4, bottom + 5}, name);
      longest = std::max(longest, text_width(name));
    }
    return bottom + 5 + longest;
  }

  // Draws one path per colour, in which neighbours in a row share a box.
  void draw_cells(const Heat& heat) {
    std::map<int, std::string> paths;
    for (std::size_t r = 0; r < map_.rows; ++r)
      for (std::size_t c = 0; c < map_.columns;) {
        const int level = level_at(heat, r, c);
        std::size_t end = c + 1;
        while (end < map_.columns && level_at(heat, r, end) == level) ++end;
        if (level >= 0)
          paths[level] += box({corner_.x + double(c) * width_, corner_.y + double(r) * height_},
                              double(end - c) * width_ + kOverlap, height_ + kOverlap);
        c = end;
      }
    for (const auto& [level, path] : paths) drawing_.cells(path, Heat::colour_of(level));
  }

  [[nodiscard]] bool is_hidden(std::size_t i) const {
    return !map_.hidden.empty() && map_.hidden[i];
  }

  // The colour level of a cell; -1 where there is no number.
  [[nodiscard]] int level_at(const Heat& heat, std::size_t row, std::size_t column) const {
    const std::size_t i = row * map_.columns + column;
    Range alone;
    return !is_hidden(i) && alone.include(map_.values[i]) ? heat.level(map_.values[i]) : -1;
  }

  const HeatMap& map_;
  Drawing drawing_;
  std::size_t left_out_ = 0;
  Point corner_;
  double width_ = 0, height_ = 0;  // of a cell
};

class StripDrawing {
 public:
  explicit StripDrawing(const TextStrip& strip) : strip_(strip) {}

  [[nodiscard]] Picture run() {
    Range heights = range_of(strip_.heights, left_out_);
    (void)heights.include(0);
    const Heat heat(range_of(strip_.colours, left_out_));
    double top = head_of(drawing_, strip_.title) + kAxisName;
    drawing_.text({kMargin, top - 10}, strip_.height_label);
    for (std::size_t first = 0; first < strip_.characters.size(); first += kPerLine) {
      const Scale y(heights, 3, top + kColumn, top);
      line(first, y, heat, top + kColumn);
      top += kColumn + kLine + 6;
    }
    const double end = heat.legend(drawing_, top, strip_.colour_label);
    return drawing_.finish(strip_.name, strip_.title,
                           foot_of(drawing_, end, strip_.note, left_out_));
  }

 private:
  static constexpr std::size_t kPerLine = 32;
  static constexpr double kColumn = 42, kLeft = 32;

  void line(std::size_t first, const Scale& y, const Heat& heat, double base) {
    const double step = (kWidth - kLeft - kMargin) / double(kPerLine);
    for (const double tick : {y.ticks().front(), y.ticks().back()}) {
      drawing_.line({kLeft, y(tick)}, {kWidth - kMargin, y(tick)}, "grid");
      drawing_.text({kLeft - 5, y(tick) + 4}, number_text(tick), Anchor::end);
    }
    const std::size_t end = std::min(first + kPerLine, strip_.characters.size());
    for (std::size_t i = first; i < end; ++i) {
      const double x = kLeft + step * double(i - first);
      Range alone;
      if (alone.include(strip_.heights[i]) && alone.include(strip_.colours[i])) {
        const double top = y(strip_.heights[i]);
        drawing_.rectangle({x + 0.5, top}, step - 1, base - top, "column",
                           Heat::colour_of(heat.level(strip_.colours[i])));
      }
      drawing_.text({x + step / 2, base + 13}, strip_.characters[i], Anchor::middle, "letter");
    }
  }

  const TextStrip& strip_;
  Drawing drawing_;
  std::size_t left_out_ = 0;
};

}  // namespace

Picture draw(const LinePlot& plot) { return LineDrawing(plot).run(); }
Picture draw(const BarChart& chart) { return BarDrawing(chart).run(); }
Picture draw(const HeatMap& map) { return HeatDrawing(map).run(); }
Picture draw(const TextStrip& strip) { return StripDrawing(strip).run(); }

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
