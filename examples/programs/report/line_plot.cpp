// SPDX-License-Identifier: Apache-2.0
#include "plots.hpp"

#include "labels.hpp"
#include "plot_parts.hpp"

#include <algorithm>
#include <utility>

namespace heed_report {

namespace {

// Ticks at the points' own places; none if there are fewer than two places.
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
      for (std::size_t i = 0; i < s.x.size(); ++i) note(x_range, y_range, s, i);
    for (const auto& [axis, range] : {std::pair(&plot_.x, &x_range), std::pair(&plot_.y, &y_range)})
      if (axis->from_zero && !axis->logarithmic) (void)range->include(0);
    const double top = head_of(drawing_, plot_.title) + kAxisName, bottom = top + height();
    const Scale y(y_range, 5, bottom, top);
    const Scale x = x_scale(x_ticks(x_range), plot_.x.logarithmic, kMargin + widest(y.ticks()) + 6,
                            kWidth - room_for_names());
    const double left = x(x.ticks().front());
    right_ = x(x.ticks().back());
    drawing_.text({kMargin, top - 10}, text_of(plot_.y));
    const double end = x_axis(drawing_, x, top, bottom, text_of(plot_.x));
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

  [[nodiscard]] static std::string text_of(const Axis& axis) {
    return axis.label + (axis.logarithmic ? ", logarithmic" : "");
  }
  [[nodiscard]] bool is_named() const { return plot_.series.size() > 1; }
  [[nodiscard]] std::string name_of(std::size_t i) const {
    return fitted(plot_.series[i].name, kWidestName);
  }
  // A quarter more than the names need: lines to names that fill the whole height would be steep.
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

  // Adds a point to both ranges, or to none if one of its coordinates cannot be drawn.
  void note(Range& x_range, Range& y_range, const Series& s, std::size_t n) {
    if (!is_drawn(s.x[n], s.y[n])) {
      ++left_out_;
      return;
    }
    (void)x_range.include(s.x[n]);
    (void)y_range.include(s.y[n]);
    if (const auto whisker = whisker_at(s.whiskers, n, plot_.y.logarithmic))
      (void)(y_range.include(whisker->low) && y_range.include(whisker->high));
  }
  [[nodiscard]] bool is_drawn(double x, double y) const {
    Range x_alone(plot_.x.logarithmic), y_alone(plot_.y.logarithmic);
    return x_alone.include(x) && y_alone.include(y);
  }

  // Finds the end of each line, at the bottom if nothing of it is drawn, and gives the lines their looks.
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
      if (is_drawn(s.x[n], s.y[n])) {
        run.push_back({x(s.x[n]), y(s.y[n])});
        if (const auto whisker = whisker_at(s.whiskers, n, plot_.y.logarithmic))
          draw_whisker(run.back().x, y(whisker->low), y(whisker->high),
                       colour("leader l", looks_[i]));
      } else {
        put();
      }
    put();
  }
  void draw_whisker(double x, double low, double high, const std::string& css) {
    drawing_.line({x, low}, {x, high}, css);
    for (const double end : {low, high}) drawing_.line({x - 3, end}, {x + 3, end}, css);
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
  double right_ = 0;  // right edge of the frame
  std::vector<Point> ends_;
  std::vector<std::size_t> looks_;  // numbers of colours and dashes
};

}  // namespace

Picture draw(const LinePlot& plot) { return LineDrawing(plot).run(); }

}  // namespace heed_report
