// SPDX-License-Identifier: Apache-2.0
#include "plots.hpp"

#include "scale.hpp"

#include <algorithm>
#include <cmath>
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

  void add(const std::string& name, std::size_t i, bool line) {
    const double width = kSample + 6 + text_width(name) + 10;
    if (x_ > kMargin && x_ + width > kWidth) {
      x_ = kMargin;
      y_ += kLine;
    }
    if (line)
      drawing_.line({x_, y_ - 4}, {x_ + kSample, y_ - 4}, stroke(i));
    else
      drawing_.rectangle({x_ + kSample - 12, y_ - 10}, 12, 11, colour("f", i));
    drawing_.text({x_ + kSample + 6, y_}, name);
    x_ += width;
  }
  [[nodiscard]] double end() const { return y_ + 4; }

 private:
  static constexpr double kSample = 24;
  Drawing& drawing_;
  double x_ = kMargin, y_;
};

[[nodiscard]] double widest(const std::vector<double>& ticks) {
  double width = 0;
  for (const double tick : ticks) width = std::max(width, text_width(number_text(tick)));
  return width;
}

// The x axis of a plot: grid lines from `top` to `bottom`, numbers and the label below. Returns the end.
double x_axis(Drawing& drawing, const Scale& x, double top, double bottom,
              const std::string& label) {
  double last_end = -kWidth;
  for (const double tick : x.ticks()) {
    drawing.line({x(tick), top}, {x(tick), bottom}, "grid");
    const std::string text = number_text(tick);
    const double half = text_width(text) / 2;
    if (x(tick) - half < last_end + 4) continue;
    drawing.text({x(tick), bottom + 15}, text, Anchor::middle);
    last_end = x(tick) + half;
  }
  const double middle = (x(x.ticks().front()) + x(x.ticks().back())) / 2;
  drawing.text({middle, bottom + 15 + kLine}, label, Anchor::middle);
  return bottom + 20 + kLine;
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
    const double top = head_of(drawing_, plot_.title) + kAxisName, bottom = top + kPlotHeight;
    const Scale y(y_range, 5, bottom, top);
    const double left = kMargin + widest(y.ticks()) + 6, right = kWidth - 16;
    const Scale x(x_range, 5, left, right);
    drawing_.text({kMargin, top - 10}, plot_.y.label);
    const double end = x_axis(drawing_, x, top, bottom, plot_.x.label);
    for (const double tick : y.ticks()) {
      drawing_.line({left, y(tick)}, {right, y(tick)}, "grid");
      drawing_.text({left - 5, y(tick) + 4}, number_text(tick), Anchor::end);
    }
    drawing_.rectangle({left, top}, right - left, bottom - top, "frame");
    for (std::size_t i = 0; i < plot_.series.size(); ++i) series(i, x, y);
    return drawing_.finish(plot_.name, plot_.title,
                           foot_of(drawing_, legend(end), plot_.note, left_out_));
  }

 private:
  static constexpr double kPlotHeight = 200;

  // Notes a point in both ranges, or, where one of its coordinates cannot be drawn, in none.
  void note(Range& x_range, Range& y_range, double x, double y) {
    Range x_alone(x_range.logarithmic()), y_alone(y_range.logarithmic());
    if (!x_alone.include(x) || !y_alone.include(y)) {
      ++left_out_;
      return;
    }
    (void)x_range.include(x);
    (void)y_range.include(y);
  }

  void series(std::size_t i, const Scale& x, const Scale& y) {
    const Series& s = plot_.series[i];
    std::vector<Point> run;
    const auto put = [&] {
      if (run.size() > 1) drawing_.polyline(run, stroke(i));
      if (run.size() == 1 || plot_.marks)
        for (const Point& p : run) drawing_.circle(p, 2.5, colour("f", i));
      run.clear();
    };
    for (std::size_t n = 0; n < s.x.size(); ++n) {
      Range x_alone(plot_.x.logarithmic), y_alone(plot_.y.logarithmic);
      if (x_alone.include(s.x[n]) && y_alone.include(s.y[n]))
        run.push_back({x(s.x[n]), y(s.y[n])});
      else
        put();
    }
    put();
  }

  [[nodiscard]] double legend(double top) {
    if (plot_.series.size() < 2) return top;
    Legend legend(drawing_, top);
    for (std::size_t i = 0; i < plot_.series.size(); ++i) legend.add(plot_.series[i].name, i, true);
    return legend.end();
  }

  const LinePlot& plot_;
  Drawing drawing_;
  std::size_t left_out_ = 0;
};

class BarDrawing {
 public:
  explicit BarDrawing(const BarChart& chart) : chart_(chart) {}

  [[nodiscard]] Picture run() {
    const double top = head_of(drawing_, chart_.title);
    const double row = kBar * double(std::max<std::size_t>(1, chart_.groups.size())) + kGap;
    const double bottom = top + row * double(chart_.labels.size()) + kGap / 2;
    const Range range = range_of();
    double left = 0;
    for (const std::string& label : chart_.labels) left = std::max(left, text_width(label));
    left += kMargin + 6;
    const Scale x(range, 4, left, kWidth - (chart_.points ? 16 : 52));
    const double end = x_axis(drawing_, x, top, bottom, chart_.axis);
    for (std::size_t i = 0; i < chart_.labels.size(); ++i) {
      const double y = top + kGap / 2 + row * double(i);
      drawing_.text({left - 6, y + (row - kGap) / 2 + 4}, chart_.labels[i], Anchor::end);
      for (std::size_t g = 0; g < chart_.groups.size(); ++g)
        entry(chart_.groups[g], g, i, y + kBar * double(g), x);
    }
    if (chart_.points) drawing_.rectangle({left, top}, kWidth - 16 - left, bottom - top, "frame");
    for (const double at : reference_places(range))
      drawing_.line({x(at), top}, {x(at), bottom}, "mark");
    return drawing_.finish(chart_.name, chart_.title,
                           foot_of(drawing_, legend(end), chart_.note, left_out_));
  }

 private:
  static constexpr double kBar = 15, kGap = 7;

  [[nodiscard]] Range range_of() const {
    Range range;
    if (!chart_.points) (void)range.include(0);
    if (chart_.reference) (void)range.include(*chart_.reference);
    for (const Group& group : chart_.groups)
      for (std::size_t i = 0; i < group.values.size(); ++i) {
        (void)range.include(group.values[i] - spread(group, i));
        (void)range.include(group.values[i] + spread(group, i));
      }
    return range;
  }

  // Where lines across the chart stand: at the reference, if any, and at 0, where bars begin.
  [[nodiscard]] std::vector<double> reference_places(const Range& range) const {
    std::vector<double> places;
    if (chart_.reference) places.push_back(*chart_.reference);
    if (!chart_.points && !range.empty()) places.push_back(0);
    return places;
  }

  [[nodiscard]] static double spread(const Group& group, std::size_t i) {
    const double half = i < group.spreads.size() ? group.spreads[i] : 0;
    return std::isfinite(half) ? half : 0;
  }

  void entry(const Group& group, std::size_t g, std::size_t i, double y, const Scale& x) {
    Range alone;
    if (!alone.include(group.values[i])) {
      ++left_out_;
      return;
    }
    const double at = x(group.values[i]), half = spread(group, i), middle = y + kBar / 2;
    if (chart_.points) {
      whisker(x(group.values[i] - half), x(group.values[i] + half), middle, g);
      drawing_.circle({at, middle}, 4, colour("f", g));
      return;
    }
    const double zero = x(0);
    drawing_.rectangle({std::min(zero, at), y + 1}, std::abs(at - zero), kBar - 2, colour("f", g));
    const double end = std::max(zero, x(group.values[i] + half));
    if (half > 0) whisker(x(group.values[i] - half), x(group.values[i] + half), middle, g);
    drawing_.text({end + 4, middle + 4}, number_text(group.values[i]));
  }

  void whisker(double from, double to, double y, std::size_t g) {
    const std::string css = chart_.points ? colour("line l", g) : "mark";
    drawing_.line({from, y}, {to, y}, css);
    for (const double end : {from, to}) drawing_.line({end, y - 4}, {end, y + 4}, css);
  }

  [[nodiscard]] double legend(double top) {
    if (chart_.groups.size() < 2) return top;
    Legend legend(drawing_, top);
    for (std::size_t g = 0; g < chart_.groups.size(); ++g)
      legend.add(chart_.groups[g].name, g, false);
    return legend.end();
  }

  const BarChart& chart_;
  Drawing drawing_;
  std::size_t left_out_ = 0;
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
    const double top = head_of(drawing_, map_.title) + kAxisName, left = 36,
                 size = kWidth - left - 16;
    const double cell = size / double(std::max<std::size_t>(1, std::max(map_.rows, map_.columns)));
    const double right = left + cell * double(map_.columns),
                 bottom = top + cell * double(map_.rows);
    drawing_.text({kMargin, top - 10}, map_.y_label);
    draw_cells(heat, {left, top}, cell);
    drawing_.rectangle({left, top}, right - left, bottom - top, "frame");
    const auto each = std::max<std::size_t>(1, std::max(map_.rows, map_.columns) / 8);
    for (std::size_t i = 0; i < map_.columns; i += each)
      drawing_.text({left + (double(i) + 0.5) * cell, bottom + 15}, std::to_string(i),
                    Anchor::middle);
    for (std::size_t i = 0; i < map_.rows; i += each)
      drawing_.text({left - 5, top + (double(i) + 0.5) * cell + 4}, std::to_string(i), Anchor::end);
    drawing_.text({(left + right) / 2, bottom + 15 + kLine}, map_.x_label, Anchor::middle);
    const double end = heat.legend(drawing_, bottom + 20 + kLine, map_.scale_label);
    return drawing_.finish(map_.name, map_.title, foot_of(drawing_, end, map_.note, left_out_));
  }

 private:
  static constexpr double kOverlap =
      0.2;  // of neighbours, so that the background does not shine through

  // Draws one path per colour, in which neighbours in a row share a box.
  void draw_cells(const Heat& heat, Point corner, double cell) {
    std::map<int, std::string> paths;
    for (std::size_t r = 0; r < map_.rows; ++r)
      for (std::size_t c = 0; c < map_.columns;) {
        const int level = level_at(heat, r, c);
        std::size_t end = c + 1;
        while (end < map_.columns && level_at(heat, r, end) == level) ++end;
        if (level >= 0)
          paths[level] += box({corner.x + double(c) * cell, corner.y + double(r) * cell},
                              double(end - c) * cell + kOverlap, cell + kOverlap);
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
