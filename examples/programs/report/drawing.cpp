// SPDX-License-Identifier: Apache-2.0
#include "drawing.hpp"

#include <heed/core/utf8.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace heed_report {

namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr std::array<std::pair<double, const char*>, 3> kUnits{
    {{1e9, "G"}, {1e6, "M"}, {1e3, "k"}}};

// The number of bytes of the UTF-8 character at `at`; 0 if there is none, or one that XML forbids.
[[nodiscard]] std::size_t character_length(std::string_view text, std::size_t at) {
  const heed::Utf8Step step = heed::utf8_step(text, at);
  const bool control =
      (step.code < 0x20 && step.code != '\n' && step.code != '\t') || step.code == 0x7F;
  const bool none = step.code == 0xFFFE || step.code == 0xFFFF;
  return step.kind == heed::Utf8::character && !control && !none ? step.bytes : 0;
}

[[nodiscard]] std::string attribute(const char* name, const std::string& value) {
  return value.empty() ? "" : std::string(" ") + name + "=\"" + escaped(value) + "\"";
}

[[nodiscard]] std::string attribute(const char* name, double value) {
  return std::string(" ") + name + "=\"" + coordinate(value) + "\"";
}

// 1e-06 -> 1e-6
[[nodiscard]] std::string short_exponent(std::string text) {
  const std::size_t at = text.find('e');
  if (at == std::string::npos) return text;
  const std::string sign = text[at + 1] == '-' ? "-" : "";
  const std::size_t digits = std::min(text.find_first_not_of('0', at + 2), text.size() - 1);
  return text.substr(0, at + 1) + sign + text.substr(digits);
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = character_length(text, at);
    switch (text[at]) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      case '\'': out += "&#39;"; break;
      default: out += length == 0 ? kReplacement : text.substr(at, length);
    }
    at += std::max<std::size_t>(length, 1);
  }
  return out;
}

std::string coordinate(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string shortest = text;
  shortest.erase(shortest.find_last_not_of('0') + 1);
  if (shortest.back() == '.') shortest.pop_back();
  return shortest == "-0" ? "0" : shortest;
}

std::string label_text(double value) {
  // Rounds first: 9.996 is 10.0, and 999.6 is 1.00k.
  char text[64];
  std::snprintf(text, sizeof text, "%.*e", std::abs(value) < 1 ? 1 : 2, value);
  const double rounded = std::strtod(text, nullptr), size = std::abs(rounded);
  if (size == 0) return "0";
  double unit = 1;
  const char* letter = "";
  for (const auto& [each, name] : kUnits)
    if (unit == 1 && size >= each && size < 1e12) {
      unit = each;
      letter = name;
    }
  if (size >= 1e12 || size < 1e-3) {
    std::snprintf(text, sizeof text, "%.2g", rounded);
    return short_exponent(text);
  }
  const double shown = size / unit;
  const int decimals = shown >= 100    ? 0
                       : shown >= 10   ? 1
                       : shown >= 0.1  ? 2
                       : shown >= 0.01 ? 3
                                       : 4;
  std::snprintf(text, sizeof text, "%.*f%s", decimals, rounded / unit, letter);
  return text;
}

std::string label_text(double value, double step) {
  const std::string coarse = label_text(value);
  const int decimals = 1 - int(std::floor(std::log10(2 * step) + 1e-9));
  const std::size_t point = coarse.find('.');
  const std::size_t has = point == std::string::npos ? 0 : coarse.size() - point - 1;
  // Units and exponents do not change.
  if (coarse.find_first_of("kMGe") != std::string::npos || decimals > 6 || decimals <= int(has))
    return coarse;
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

std::string number_text(double value) {
  char text[64];
  const double size = std::abs(value);
  if (size >= 1e4 && size < 1e13)
    for (const auto& [unit, letter] : kUnits)
      if (size >= unit) {
        std::snprintf(text, sizeof text, "%.4g%s", value / unit, letter);
        return text;
      }
  std::snprintf(text, sizeof text, "%.4g", value);
  return short_exponent(text);
}

double text_width(std::string_view text, double size) {
  const auto characters = std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0u) != 0x80u;
  });
  return 0.56 * size * double(characters);
}

std::string heat_colour(double share) {
  constexpr std::array<std::array<double, 3>, 5> stops{
      {{13, 20, 72}, {45, 74, 122}, {70, 133, 136}, {150, 190, 110}, {252, 236, 120}}};
  const double place = std::clamp(share, 0.0, 1.0) * double(stops.size() - 1);
  const std::size_t at = std::min(std::size_t(place), stops.size() - 2);
  int rgb[3];
  for (std::size_t c = 0; c < 3; ++c)
    rgb[c] = int(std::lround(std::lerp(stops[at][c], stops[at + 1][c], place - double(at))));
  char text[16];
  std::snprintf(text, sizeof text, "#%02x%02x%02x", unsigned(rgb[0]), unsigned(rgb[1]),
                unsigned(rgb[2]));
  return text;
}

void Drawing::line(Point from, Point to, const std::string& css) {
  body_ += "<line" + attribute("x1", from.x) + attribute("y1", from.y) + attribute("x2", to.x) +
           attribute("y2", to.y) + attribute("class", css) + "/>\n";
}

void Drawing::rectangle(Point corner, double width, double height, const std::string& css,
                        const std::string& fill) {
  body_ += "<rect" + attribute("x", corner.x) + attribute("y", corner.y) +
           attribute("width", width) + attribute("height", height) + attribute("class", css) +
           attribute("fill", fill) + "/>\n";
}

void Drawing::circle(Point centre, double radius, const std::string& css) {
  body_ += "<circle" + attribute("cx", centre.x) + attribute("cy", centre.y) +
           attribute("r", radius) + attribute("class", css) + "/>\n";
}

void Drawing::polyline(const std::vector<Point>& points, const std::string& css) {
  std::string places;
  for (const Point& p : points)
    places += (places.empty() ? "" : " ") + coordinate(p.x) + "," + coordinate(p.y);
  body_ += "<polyline" + attribute("points", places) + attribute("class", css) + "/>\n";
}

void Drawing::band(Point from, Point to, double height, const std::string& css) {
  std::string places;
  for (const Point& p : {Point{from.x, from.y - height / 2}, Point{to.x, to.y - height / 2},
                         Point{to.x, to.y + height / 2}, Point{from.x, from.y + height / 2}})
    places += (places.empty() ? "" : " ") + coordinate(p.x) + "," + coordinate(p.y);
  body_ += "<polygon" + attribute("points", places) + attribute("class", css) + "/>\n";
}

void Drawing::cells(const std::string& data, const std::string& fill) {
  body_ += "<path" + attribute("class", "cells") + attribute("fill", fill) + attribute("d", data) +
           "/>\n";
}

void Drawing::text(Point at, std::string_view text, Anchor anchor, const std::string& css) {
  put_text(at, text, anchor, css, "");
}

void Drawing::upright_text(Point at, std::string_view text, Anchor anchor, const std::string& css) {
  put_text(at, text, anchor, css, "rotate(-90 " + coordinate(at.x) + " " + coordinate(at.y) + ")");
}

void Drawing::put_text(Point at, std::string_view text, Anchor anchor, const std::string& css,
                       const std::string& transform) {
  constexpr const char* names[] = {"", "middle", "end"};
  body_ += "<text" + attribute("x", at.x) + attribute("y", at.y) +
           attribute("text-anchor", names[int(anchor)]) + attribute("class", css) +
           attribute("transform", transform) + ">" + escaped(text) + "</text>\n";
}

double Drawing::paragraph(double top, const std::string& words, const std::string& css,
                          double size) {
  const double width = kWidth - 2 * kMargin;
  std::string line;
  const auto put = [&] {
    if (line.empty()) return;
    top += size + 4;
    text({kMargin, top - 4}, line, Anchor::start, css);
    line.clear();
  };
  for (std::size_t at = 0; at < words.size();) {
    const std::size_t end = std::min(words.find(' ', at), words.size());
    const std::string word = words.substr(at, end - at);
    if (text_width(line + " " + word, size) > width) put();
    line += (line.empty() ? "" : " ") + word;
    at = end + 1;
  }
  put();
  return top;
}

Picture Drawing::finish(std::string name, std::string title, double height) {
  return {std::move(name), std::move(title), std::move(body_), height, false};
}

std::string left_out_text(std::size_t count) {
  if (count == 0) return "";
  if (count == 1) return "1 value that cannot be drawn is left out.";
  return std::to_string(count) + " values that cannot be drawn are left out.";
}

}  // namespace heed_report
