// SPDX-License-Identifier: Apache-2.0
#pragma once

// Draws plots as pictures. Numbers that are not finite are left out, and on a logarithmic axis those that are not
// positive; the picture says how many. Axes are drawn even if there is no number.

#include "drawing.hpp"

#include <optional>

namespace heed_report {

// A line from the smallest to the largest of the numbers from which a value was made. It is not
// drawn if one of them is not finite.
struct Whisker {
  double low = 0, high = 0;
};
[[nodiscard]] Whisker whisker_over(const std::vector<double>& numbers);

struct Series {
  std::string name;
  std::vector<double> x, y;            // a y that is left out breaks the line
  bool marks = false;                  // a dot at each point; single points always have one
  std::vector<Whisker> whiskers = {};  // one per point; empty: none
};

struct Axis {
  std::string label;  // with the unit; the plot adds that the axis is logarithmic
  bool logarithmic = false, from_zero = false;
  bool at_points = false;  // on the x axis: ticks at two or more points' own places
};

// Lines; if there are several, each has its name at its end, and the plot is as high as its names need. As long as there
// are no more lines than colours, line i has colour i. With more lines, lines that end beside each other differ in colour.
struct LinePlot {
  std::string name, title, note;
  Axis x, y;
  std::vector<Series> series;
};
[[nodiscard]] Picture draw(const LinePlot& plot);

// Numbers of one kind, one for each label of the chart.
struct Group {
  std::string name;  // may be empty if it is the only one
  std::vector<double> values;
  std::vector<Whisker> whiskers = {};  // empty: none
};

// A chart of horizontal bars from 0, or, with `points`, of points on an axis that need not begin at 0. Values stand in a
// column on the right, where no line crosses them.
struct BarChart {
  std::string name, title, note, axis;
  std::vector<std::string> labels;
  std::vector<Group> groups;
  bool points = false;
  std::optional<double> reference = {};  // a line across the chart
};
[[nodiscard]] Picture draw(const BarChart& chart);

struct HeatMap {
  std::string name, title, note, x_label, y_label, scale_label;
  std::size_t rows = 0, columns = 0;
  std::vector<double> values;  // (rows, columns), the first row on top
  std::vector<bool> hidden =
      {};  // for each cell, or empty: cells without a value, which do not count as left out
  // A name for each row and each column, or empty: they are counted from 0 and the cells are squares. Cells of named rows
  // have their numbers in them, upright in narrow ones, unless they are narrower than a line is high.
  std::vector<std::string> row_names = {}, column_names = {};
};
[[nodiscard]] Picture draw(const HeatMap& map);

// A text with a column above each character: its height is one number, its colour another.
struct TextStrip {
  std::string name, title, note, height_label, colour_label;
  std::vector<std::string> characters;
  std::vector<double> heights, colours;
};
[[nodiscard]] Picture draw(const TextStrip& strip);

// The course of a number over many steps, kept as at most `capacity` points, each the mean of equally many steps.
class Curve {
 public:
  explicit Curve(std::size_t capacity = 200) : capacity_(capacity) {}

  void add(double x, double y);
  [[nodiscard]] bool empty() const { return sums_.empty(); }
  [[nodiscard]] std::size_t steps_per_point() const { return each_; }
  [[nodiscard]] Series series(std::string name) const;

 private:
  struct Sum {
    double x = 0, y = 0;
    std::size_t count = 0;
  };
  std::size_t capacity_, each_ = 1;
  std::vector<Sum> sums_;
};

}  // namespace heed_report
