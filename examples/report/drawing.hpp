// SPDX-License-Identifier: Apache-2.0
#pragma once

// The body of an SVG picture of a fixed width, drawn from the top down. Sizes are in units of the viewBox: a
// page shows 384 of them on 360 pixels or more, so that text of 12 units has 11 pixels on a narrow screen.
//
// Colours are classes, which a page and a file of its own define each in their way (page.hpp).

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace heed_report {

inline constexpr double kWidth = 384, kMargin = 4, kLine = 16;
inline constexpr int kColours = 7;  // of series; further ones are dashed

struct Point {
  double x = 0, y = 0;
};

// One picture: `name` is that of its file without ending.
struct Picture {
  std::string name, title, body;
  double height = 0;
  bool beside_next = false;  // a page shows it beside the next one if there is room
};

// As content or as the value of an attribute. What XML forbids, control characters and bytes that are no
// UTF-8, becomes U+FFFD.
[[nodiscard]] std::string escaped(std::string_view text);

// A coordinate, two decimals at most.
[[nodiscard]] std::string coordinate(double value);

// At most four digits: 0.25, 1e-6, 12.5k, 3M.
[[nodiscard]] std::string number_text(double value);

// About the width of a text, no less for most fonts.
[[nodiscard]] double text_width(std::string_view text, double size = 12);

// A colour for a share from 0 to 1: from dark blue to light yellow, lightness rising throughout.
[[nodiscard]] std::string heat_colour(double share);

enum class Anchor { start, middle, end };

class Drawing {
 public:
  void line(Point from, Point to, const std::string& css);
  void rectangle(Point corner, double width, double height, const std::string& css,
                 const std::string& fill = "");
  void circle(Point centre, double radius, const std::string& css);
  void polyline(const std::vector<Point>& points, const std::string& css);
  // `data`: of a path, one colour for many cells.
  void cells(const std::string& data, const std::string& fill);
  void text(Point at, std::string_view text, Anchor anchor = Anchor::start,
            const std::string& css = "");

  // Lines over the whole width, the first with its top at `top`; returns where they end.
  double paragraph(double top, const std::string& text, const std::string& css = "",
                   double size = 12);

  [[nodiscard]] Picture finish(std::string name, std::string title, double height);

 private:
  std::string body_;
};

// What is left out is said in a sentence; empty if nothing is.
[[nodiscard]] std::string left_out_text(std::size_t count);

}  // namespace heed_report
