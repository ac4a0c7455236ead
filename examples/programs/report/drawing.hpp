// SPDX-License-Identifier: Apache-2.0
#pragma once

// Draws the body of an SVG picture of a fixed width from the top down. Sizes are in units of the viewBox. A page shows the
// 384 units on at least 360 pixels, so that text of 12 units is 11 pixels high on a narrow screen.
//
// Colours are CSS classes: page.hpp defines them for pages and for files of their own.

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace heed_report {

inline constexpr double kWidth = 384, kMargin = 4, kLine = 16;
inline constexpr int kColours = 7;  // for series; further ones are dashed

struct Point {
  double x = 0, y = 0;
};

// A picture; `name` is the name of its file without ending.
struct Picture {
  std::string name, title, body;
  double height = 0;
  bool beside_next = false;  // a page shows it beside the next one if there is room
};

// The text as XML content or attribute value. Control characters and bytes that are not UTF-8, which XML forbids, become
// U+FFFD.
[[nodiscard]] std::string escaped(std::string_view text);

// A coordinate as text, with at most two decimals.
[[nodiscard]] std::string coordinate(double value);

// A number as text of at most four digits: 0.25, 1e-6, 12.5k, 3M.
[[nodiscard]] std::string number_text(double value);

// A number as the label of a bar or point, with two digits after the first one, below 1 with two in
// all: 1.20, 12.3, 0.50, 0.012, 12.3k, 4.2e-5. Measured values vary more than that from run to run.
[[nodiscard]] std::string label_text(double value);

// The same with further decimals, as many as distinguish numbers that differ by a fifth of `step`:
// on an axis with ticks at 3.10, 3.11, ... 3.124 and not 3.12.
[[nodiscard]] std::string label_text(double value, double step);

// An estimate of the width of a text, not too small for most fonts.
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
  // A filled band between two upright edges of this height, whose middles are `from` and `to`.
  void band(Point from, Point to, double height, const std::string& css);
  // Many cells of one colour; `data` is that of an SVG path.
  void cells(const std::string& data, const std::string& fill);
  void text(Point at, std::string_view text, Anchor anchor = Anchor::start,
            const std::string& css = "");

  // Text that runs upwards.
  void upright_text(Point at, std::string_view text, Anchor anchor = Anchor::end,
                    const std::string& css = "");

  // Sets the text in lines over the whole width, the first with its top at `top`. Returns the end of the last line.
  double paragraph(double top, const std::string& text, const std::string& css = "",
                   double size = 12);

  [[nodiscard]] Picture finish(std::string name, std::string title, double height);

 private:
  void put_text(Point at, std::string_view text, Anchor anchor, const std::string& css,
                const std::string& transform);

  std::string body_;
};

// The sentence that says how many values are left out; empty if none is.
[[nodiscard]] std::string left_out_text(std::size_t count);

}  // namespace heed_report
