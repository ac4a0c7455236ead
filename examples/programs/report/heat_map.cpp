// SPDX-License-Identifier: Apache-2.0
#include "plots.hpp"

#include "labels.hpp"
#include "plot_parts.hpp"

#include <algorithm>
#include <cmath>
#include <map>

namespace heed_report {

namespace {

// Maps a number to one of the levels of colour.
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

  // The CSS class of a text on this level.
  [[nodiscard]] static const char* ink_on(int level) {
    return 2 * level < kLevels ? "on-dark" : "on-light";
  }

  // Draws a bar of all colours with numbers below. Returns its lower end.
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
    if (has_numbers_) write_numbers(heat);
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
      0.2;  // overlap of neighbours, so that the background does not shine through
  // Columns with an upright name or number are at least this wide.
  static constexpr double kNamedRow = 16, kWidestName = 150, kNarrowest = 13;

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
    has_numbers_ = !map_.row_names.empty() && width_ >= kNarrowest;
    if (has_numbers_ && are_upright()) height_ = std::max(kNamedRow, widest_number() + 6);
  }

  [[nodiscard]] double widest_number() const {
    double width = 0;
    for (const double value : map_.values) width = std::max(width, text_width(label_text(value)));
    return width;
  }
  [[nodiscard]] bool are_upright() const { return widest_number() + 4 > width_; }

  void write_numbers(const Heat& heat) {
    for (std::size_t r = 0; r < map_.rows; ++r)
      for (std::size_t c = 0; c < map_.columns; ++c) {
        const int level = level_at(heat, r, c);
        if (level < 0) continue;
        const std::string number = label_text(map_.values[r * map_.columns + c]);
        const Point middle{corner_.x + (double(c) + 0.5) * width_,
                           corner_.y + (double(r) + 0.5) * height_};
        if (are_upright())
          drawing_.upright_text({middle.x + 4, middle.y}, number, Anchor::middle,
                                Heat::ink_on(level));
        else
          drawing_.text({middle.x, middle.y + 4}, number, Anchor::middle, Heat::ink_on(level));
      }
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
    const auto each = std::size_t(std::max(1.0, std::ceil(kNarrowest / width_)));
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
  double width_ = 0, height_ = 0;  // size of a cell
  bool has_numbers_ = false;
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

Picture draw(const HeatMap& map) { return HeatDrawing(map).run(); }
Picture draw(const TextStrip& strip) { return StripDrawing(strip).run(); }

}  // namespace heed_report
