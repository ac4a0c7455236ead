// SPDX-License-Identifier: Apache-2.0
#include "plot_parts.hpp"

#include "labels.hpp"

#include <algorithm>
#include <utility>

namespace heed_report {

namespace {

constexpr double kTitleSize = 14;

[[nodiscard]] double half_width(double tick) { return text_width(number_text(tick)) / 2; }

}  // namespace

std::string colour(const char* kind, std::size_t i) {
  return kind + std::to_string(i % std::size_t(kColours));
}

std::string stroke(std::size_t i) {
  const std::size_t dash = i / std::size_t(kColours);
  return colour("line l", i) + (dash == 0 ? "" : dash % 2 == 1 ? " dash1" : " dash2");
}

double head_of(Drawing& drawing, const std::string& title) {
  return drawing.paragraph(0, title, "title", kTitleSize) + 6;
}

double foot_of(Drawing& drawing, double top, const std::string& note, std::size_t left_out) {
  std::string text = note;
  if (left_out > 0) text += (text.empty() ? "" : " ") + left_out_text(left_out);
  return text.empty() ? top + 4 : drawing.paragraph(top + 4, text, "note") + 6;
}

void Legend::add(const std::string& whole_name, std::size_t i) {
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

std::optional<Whisker> whisker_at(const std::vector<Whisker>& whiskers, std::size_t i,
                                  bool logarithmic) {
  if (i >= whiskers.size()) return {};
  const Whisker& w = whiskers[i];
  Range alone(logarithmic);
  if (!alone.include(w.low) || !alone.include(w.high) || !(w.low < w.high)) return {};
  return w;
}

double widest(const std::vector<double>& ticks) {
  double width = 0;
  for (const double tick : ticks) width = std::max(width, text_width(number_text(tick)));
  return width;
}

Scale x_scale(std::vector<double> ticks, bool logarithmic, double left, double right) {
  left = std::max(left, kMargin + half_width(ticks.front()));
  right = std::min(right, kWidth - kMargin - half_width(ticks.back()));
  return {std::move(ticks), logarithmic, left, right};
}

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

}  // namespace heed_report
