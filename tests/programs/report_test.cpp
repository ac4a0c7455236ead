// SPDX-License-Identifier: Apache-2.0

// The pictures of --report: well-formed, complete, and each number at its place on the axis.

#include "catch.hpp"
#include "temporary.hpp"

#include "report/labels.hpp"
#include "report/links.hpp"
#include "report/page.hpp"
#include "report/plots.hpp"
#include "report/scale.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>

namespace {

using namespace heed_report;
namespace fs = std::filesystem;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Element {
  std::string name, text;
  std::map<std::string, std::string> attributes;
  [[nodiscard]] double number(const std::string& key) const {
    return std::stod(attributes.at(key));
  }
  [[nodiscard]] bool is(const std::string& css) const {
    const auto at = attributes.find("class");
    return at != attributes.end() &&
           (" " + at->second + " ").find(" " + css + " ") != std::string::npos;
  }
};

// All elements of an XML text; throws if it is not well-formed. It knows what the pictures use:
// elements, attributes in double quotes, five entities, and one document type.
class Xml {
 public:
  explicit Xml(const std::string& text) : text_(text) {
    if (text_.rfind("<!DOCTYPE html>", 0) == 0) at_ = 15;
    content("");
    require(at_ == text_.size(), "something after the end");
  }
  [[nodiscard]] std::vector<Element> all(const std::string& name,
                                         const std::string& css = "") const {
    std::vector<Element> found;
    for (const Element& e : elements_)
      if (e.name == name && (css.empty() || e.is(css))) found.push_back(e);
    return found;
  }
  [[nodiscard]] Element text_of(const std::string& content) const {
    for (const Element& e : elements_)
      if (e.name == "text" && e.text == content) return e;
    throw std::runtime_error("no text " + content);
  }

 private:
  void require(bool good, const std::string& what) const {
    if (!good) throw std::runtime_error(what + " at: " + text_.substr(at_, 60));
  }
  [[nodiscard]] bool next_is(const std::string& what) const {
    return text_.compare(at_, what.size(), what) == 0;
  }

  // Characters up to one of `stops`.
  std::string characters(const std::string& stops) {
    static const std::map<std::string, std::string> entities{
        {"&amp;", "&"}, {"&lt;", "<"}, {"&gt;", ">"}, {"&quot;", "\""}, {"&#39;", "'"}};
    std::string out;
    while (at_ < text_.size() && stops.find(text_[at_]) == std::string::npos) {
      require(text_[at_] != '<' &&
                  (static_cast<unsigned char>(text_[at_]) >= 0x20 || text_[at_] == '\n'),
              "a character that is not allowed");
      if (text_[at_] != '&') {
        out += text_[at_++];
        continue;
      }
      const std::size_t end = text_.find(';', at_);
      const auto entity = entities.find(text_.substr(at_, end - at_ + 1));
      require(entity != entities.end(), "an unknown entity");
      out += entity->second;
      at_ = end + 1;
    }
    return out;
  }
  std::string word() {
    const std::size_t begin = at_;
    while (at_ < text_.size() &&
           (std::isalnum(static_cast<unsigned char>(text_[at_])) || text_[at_] == '-'))
      ++at_;
    require(at_ > begin, "no name");
    return text_.substr(begin, at_ - begin);
  }
  void content(const std::string& parent) {
    const std::size_t owner = elements_.size();
    while (at_ < text_.size()) {
      const std::string said = characters("<");
      if (owner > 0 && !parent.empty()) elements_[owner - 1].text += said;
      if (at_ == text_.size() || next_is("</")) return;
      element();
    }
  }
  void element() {
    ++at_;
    Element e{word(), "", {}};
    while (next_is(" ")) {
      ++at_;
      const std::string key = word();
      require(next_is("=\""), "an attribute without value");
      at_ += 2;
      require(e.attributes.emplace(key, characters("\"")).second, "an attribute twice");
      ++at_;
    }
    const std::string name = e.name;
    elements_.push_back(std::move(e));
    if (next_is("/>")) {
      at_ += 2;
      return;
    }
    require(next_is(">"), "a tag without end");
    ++at_;
    content(name);
    require(next_is("</" + name + ">"), "no end of " + name);
    at_ += name.size() + 3;
  }

  std::string text_;
  std::size_t at_ = 0;
  std::vector<Element> elements_;
};

[[nodiscard]] Xml svg(const Picture& picture) { return Xml(svg_text(picture)); }

[[nodiscard]] std::vector<Point> points_of(const Element& polyline) {
  std::istringstream in(polyline.attributes.at("points"));
  std::vector<Point> points;
  char comma = 0;
  for (Point p; in >> p.x >> comma >> p.y;) points.push_back(p);
  return points;
}

[[nodiscard]] LinePlot plot_of(std::vector<Series> series) {
  return {"plot", "A title", "", {"step"}, {"loss, nats"}, std::move(series)};
}

[[nodiscard]] bool says(const Xml& xml, const std::string& words) {
  std::string all;
  for (const Element& e : xml.all("text")) all += e.text + " ";
  return all.find(words) != std::string::npos;
}

[[nodiscard]] std::string text_in(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// The box of a text: as wide as text_width() says, from its capitals' tops to below its line.
struct TextBox {
  double left, top, right, bottom;
  std::string text;
};
[[nodiscard]] std::vector<TextBox> text_boxes(const Xml& xml) {
  std::vector<TextBox> boxes;
  for (const Element& e : xml.all("text")) {
    const double size = e.is("title") ? 14 : 12, x = e.number("x"), y = e.number("y");
    const auto anchor = e.attributes.find("text-anchor");
    const double width = text_width(e.text, size), left = anchor == e.attributes.end() ? x
                                                          : anchor->second == "middle"
                                                              ? x - width / 2
                                                              : x - width;
    if (e.attributes.contains("transform")) {  // upright
      const double top = anchor->second == "middle" ? y - width / 2 : y;
      boxes.push_back({x - 0.74 * size, top, x + 0.2 * size, top + width, e.text});
    } else {
      boxes.push_back({left, y - 0.74 * size, left + width, y + 0.2 * size, e.text});
    }
  }
  return boxes;
}

// The texts of a picture that cover each other, leave the picture or are crossed by a line; empty if none does.
[[nodiscard]] std::string faults_of_texts(const Picture& picture) {
  const Xml xml = svg(picture);
  const std::vector<TextBox> boxes = text_boxes(xml);
  std::string faults;
  const double rounding = 0.02;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const TextBox& a = boxes[i];
    if (a.left < -rounding || a.right > kWidth + rounding || a.top < 0 || a.bottom > picture.height)
      faults += "outside: " + a.text + "\n";
    for (std::size_t j = 0; j < i; ++j) {
      const TextBox& b = boxes[j];
      if (a.left < b.right - rounding && b.left < a.right - rounding &&
          a.top < b.bottom - rounding && b.top < a.bottom - rounding)
        faults += a.text + " covers " + b.text + "\n";
    }
    for (const Element& line : xml.all("line")) {  // upright or level
      const double x1 = line.number("x1"), x2 = line.number("x2"), y1 = line.number("y1"),
                   y2 = line.number("y2");
      if (std::max(x1, x2) > a.left + rounding && std::min(x1, x2) < a.right - rounding &&
          std::max(y1, y2) > a.top + rounding && std::min(y1, y2) < a.bottom - rounding)
        faults += line.attributes.at("class") + " crosses " + a.text + "\n";
    }
  }
  return faults;
}

class Draws {
 public:
  explicit Draws(unsigned seed) : random_(seed) {}
  [[nodiscard]] double real(double low, double high) {
    return std::uniform_real_distribution<>(low, high)(random_);
  }
  [[nodiscard]] int whole(int low, int high) {
    return std::uniform_int_distribution<>(low, high)(random_);
  }
  [[nodiscard]] bool one_in(int n) { return whole(1, n) == 1; }
  // A number of any size from 1e-5 to 1e8, or one close to 1.
  [[nodiscard]] double number() {
    if (one_in(3)) return real(0.9, 1.5);
    return std::pow(10.0, real(-5, 8)) * (one_in(8) ? -1 : 1);
  }
  [[nodiscard]] std::string name() {
    std::string name;
    for (int length = whole(1, one_in(10) ? 60 : 18); length > 0; --length)
      name += char('a' + whole(0, 25));
    return name;
  }

 private:
  std::mt19937 random_;
};

[[nodiscard]] LinePlot random_plot(Draws& draws) {
  LinePlot plot = plot_of({});
  plot.y.logarithmic = draws.one_in(3);
  plot.x.logarithmic = draws.one_in(3);
  plot.x.at_points = draws.one_in(2);
  const double centre = draws.number(), width = std::pow(10.0, draws.real(-6, 1));
  const bool whiskers = draws.one_in(2);
  const int points = draws.whole(1, 5), lines = draws.whole(1, draws.one_in(3) ? 45 : 9);
  for (int i = 0; i < lines; ++i) {
    Series series{draws.name(), {}, {}, draws.one_in(2)};
    for (int n = 0; n < points; ++n) {
      series.x.push_back(100 << n);
      const double value = centre * (1 + width * draws.real(-0.5, 0.5));
      series.y.push_back(draws.one_in(20) ? kNaN : value);
      if (whiskers)
        series.whiskers.push_back(
            whisker_over({value, value * draws.real(0.5, 1), value * draws.real(1, 2)}));
    }
    plot.series.push_back(series);
  }
  return plot;
}

[[nodiscard]] BarChart random_chart(Draws& draws) {
  BarChart chart{"b", "A title", "A note.", "ratio", {}, {}};
  chart.points = draws.one_in(2);
  if (draws.one_in(2)) chart.reference = 1;
  const int groups = draws.whole(1, 3);
  for (int i = draws.whole(1, 20); i > 0; --i) chart.labels.push_back(draws.name());
  const bool alike = draws.one_in(2);
  for (int g = 0; g < groups; ++g) {
    Group group{draws.name(), {}};
    for (std::size_t i = 0; i < chart.labels.size(); ++i) {
      const double value = alike ? draws.real(0.95, 1.1) : draws.number();
      group.values.push_back(draws.one_in(20) ? kNaN : value);
      group.whiskers.push_back(
          whisker_over({value, value * draws.real(0.5, 1), value * draws.real(1, 2)}));
    }
    chart.groups.push_back(group);
  }
  return chart;
}

[[nodiscard]] Range range_of(double low, double high, bool logarithmic = false) {
  Range range(logarithmic);
  REQUIRE(range.include(low));
  REQUIRE(range.include(high));
  return range;
}

}  // namespace

TEST_CASE("Text is escaped, and what XML forbids is replaced") {
  CHECK(escaped("a < b & \"c\" > 'd'") == "a &lt; b &amp; &quot;c&quot; &gt; &#39;d&#39;");
  CHECK(escaped("\x01\x1F\x7F\n") == "\uFFFD\uFFFD\uFFFD\n");
  CHECK(escaped("h\u00E9 \u20AC \U0001F600") == "h\u00E9 \u20AC \U0001F600");
  CHECK(escaped("a\xC3") == "a\uFFFD");            // cut off
  CHECK(escaped("\xC0\x80z") == "\uFFFD\uFFFDz");  // longer than needed
  CHECK(escaped("\xE0\x80\xAF") == "\uFFFD\uFFFD\uFFFD");
  CHECK(escaped("\xED\xA0\x80") == "\uFFFD\uFFFD\uFFFD");    // a surrogate
  CHECK(escaped("\xEF\xBF\xBF|") == "\uFFFD\uFFFD\uFFFD|");  // no character
}

TEST_CASE("Numbers on axes are short") {
  CHECK(number_text(0) == "0");
  CHECK(number_text(-0.25) == "-0.25");
  CHECK(number_text(1e-6) == "1e-6");
  CHECK(number_text(12500) == "12.5k");
  CHECK(number_text(-3e6) == "-3M");
  CHECK(number_text(2048) == "2048");
  CHECK(number_text(1e20) == "1e20");
  CHECK(label_text(0) == "0");
  CHECK(label_text(1) == "1.00");
  CHECK(label_text(1.1749) == "1.17");
  CHECK(label_text(-9.996) == "-10.0");
  CHECK(label_text(0.98765) == "0.99");
  CHECK(label_text(0.996) == "1.00");
  CHECK(label_text(0.5) == "0.50");
  CHECK(label_text(0.01234) == "0.012");
  CHECK(label_text(0.00999) == "0.010");
  CHECK(label_text(0.001) == "0.0010");
  CHECK(label_text(4.249e-5) == "4.2e-5");
  CHECK(label_text(12.345) == "12.3");
  CHECK(label_text(999.4) == "999");
  CHECK(label_text(999.6) == "1.00k");
  CHECK(label_text(-12345) == "-12.3k");
  CHECK(label_text(3.456e9) == "3.46G");
  CHECK(label_text(1e13) == "1e13");
  CHECK(label_text(3.12449, 0.01) == "3.124");
  CHECK(label_text(1.8244, 0.1) == "1.82");
  CHECK(label_text(0.5083, 0.05) == "0.51");
  CHECK(label_text(0, 0.01) == "0.000");
  CHECK(label_text(0.0042, 1) == "0.0042");
  CHECK(label_text(12345, 0.01) == "12.3k");
  CHECK(coordinate(-0.001) == "0");
  CHECK(coordinate(100) == "100");
  CHECK(coordinate(1.5) == "1.5");
}

TEST_CASE("Ticks are round, rise evenly and cover the range by less than a step") {
  for (const auto& [low, high] :
       {std::pair(0.0, 10.0), std::pair(-3.7, 0.2), std::pair(1.001, 1.002), std::pair(0.0, 1e-12),
        std::pair(-1e300, 1e300), std::pair(5.0, 5.0), std::pair(0.0, 0.0),
        std::pair(1e9, 1e9 + 1e-3), std::pair(0.0, 1e-290)}) {
    CAPTURE(low, high);
    const std::vector<double> ticks = ticks_over(range_of(low, high), 5);
    REQUIRE(ticks.size() >= 2);
    CHECK(ticks.size() <= 9);
    const double step = ticks[1] - ticks[0];
    CHECK(step > 0);
    CHECK(ticks.front() <= low + 1e-6 * step);
    CHECK(ticks.back() >= high - 1e-6 * step);
    for (std::size_t i = 1; i < ticks.size(); ++i) CHECK(ticks[i] - ticks[i - 1] == Approx(step));
    const double digit = step / std::pow(10.0, std::floor(std::log10(step) + 1e-9));
    CHECK((digit == Approx(1) || digit == Approx(2) || digit == Approx(5)));
    if (!(high - low > 1e-8 * std::abs(high) && high > 1e-280)) continue;  // widened
    CHECK(ticks.front() > low - step);
    CHECK(ticks.back() < high + step);
  }
  CHECK(ticks_over(range_of(0, 10), 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  CHECK(ticks_over(Range(), 5).front() == 0);
}

TEST_CASE("Logarithmic ticks cover the range and refuse what is not positive") {
  CHECK(ticks_over(range_of(1, 100, true), 5) == std::vector<double>{1, 2, 5, 10, 20, 50, 100});
  CHECK(ticks_over(range_of(128, 640, true), 5) == std::vector<double>{100, 200, 500, 1000});
  CHECK(ticks_over(range_of(10, 10, true), 5) == std::vector<double>{10, 20});
  CHECK(ticks_over(range_of(0.98, 3.3, true), 5) == std::vector<double>{0.8, 1, 1.5, 2, 3, 4});
  const std::vector<double> close = ticks_over(range_of(1.01, 1.38, true), 5);
  REQUIRE(close.size() == 5);
  for (std::size_t i = 0; i < close.size(); ++i) CHECK(close[i] == Approx(1 + 0.1 * double(i)));
  const std::vector<double> wide = ticks_over(range_of(3e-17, 0.4, true), 5);
  CHECK(wide.size() <= 7);
  CHECK(wide.front() <= 3e-17);
  CHECK(wide.back() >= 0.4);
  Range range(true);
  CHECK_FALSE(range.include(0));
  CHECK_FALSE(range.include(-1));
  CHECK(range.empty());
}

TEST_CASE("A point of a line plot lies where the ticks of its numbers lie") {
  const Xml xml = svg(draw(plot_of({{"a", {0, 4, 10}, {-1, 2, 0.5}}})));
  const std::vector<Point> points = points_of(xml.all("polyline").at(0));
  REQUIRE(points.size() == 3);
  const Element frame = xml.all("rect", "frame").at(0);
  const double left = frame.number("x"), top = frame.number("y");
  CHECK(points[0].x == Approx(left));
  CHECK(points[0].y == Approx(top + frame.number("height")));
  CHECK(points[2].x == Approx(left + frame.number("width")));
  CHECK(points[1].y == Approx(top));
  CHECK(points[1].x == Approx(left + 0.4 * frame.number("width")).margin(0.02));
  CHECK(points[2].y == Approx(top + 0.5 * frame.number("height")).margin(0.02));
  CHECK(xml.text_of("4").number("x") == Approx(points[1].x));
  CHECK(xml.text_of("2").attributes.at("text-anchor") ==
        "middle");  // tick of x, the first in the text
  CHECK(says(xml, "A title"));
  CHECK(says(xml, "loss, nats"));
}

TEST_CASE("An axis that is logarithmic says so") {
  LinePlot plot = plot_of({{"a", {1, 100}, {1, 10}}});
  CHECK_FALSE(says(svg(draw(plot)), "logarithmic"));
  plot.x.logarithmic = true;
  CHECK(says(svg(draw(plot)), "step, logarithmic"));
  CHECK_FALSE(says(svg(draw(plot)), "nats, logarithmic"));
  plot.y.logarithmic = true;
  CHECK(says(svg(draw(plot)), "loss, nats, logarithmic"));
}

TEST_CASE("Whiskers of a line's points reach from their lowest to their highest number") {
  for (const bool logarithmic : {false, true}) {
    LinePlot plot = plot_of({{"a", {0, 1, 2}, {10, 20, 40}}});
    plot.y.logarithmic = logarithmic;
    plot.series[0].whiskers = {whisker_over({8, 10, 50}), whisker_over({20}),
                               whisker_over({40, kNaN})};
    const Xml xml = svg(draw(plot));
    const std::vector<Element> lines = xml.all("line", "l0");
    REQUIRE(lines.size() == 3);  // one whisker and its two ends
    const double ten = xml.text_of("10").number("y") - 4, fifty = xml.text_of("50").number("y") - 4;
    const auto place = [&](double value) {
      const auto along = [&](double v) { return logarithmic ? std::log(v) : v; };
      return ten + (fifty - ten) * (along(value) - along(10)) / (along(50) - along(10));
    };
    CHECK(lines[0].number("y1") == Approx(place(8)).margin(0.03));
    CHECK(lines[0].number("y2") == Approx(place(50)).margin(0.03));
    CHECK(lines[0].number("x1") == lines[0].number("x2"));
    CHECK(lines[1].number("y1") == lines[0].number("y1"));
    CHECK(lines[2].number("y2") == lines[0].number("y2"));
  }
}

TEST_CASE("A decade of a logarithmic axis has the same length everywhere") {
  LinePlot plot = plot_of({{"a", {1, 2, 3}, {1e-6, 1e-3, 1}}});
  plot.y.logarithmic = true;
  const std::vector<Point> points = points_of(svg(draw(plot)).all("polyline").at(0));
  CHECK(points[0].y - points[1].y == Approx(points[1].y - points[2].y).margin(0.02));
  CHECK(points[0].y > points[2].y);
}

TEST_CASE("Values that are no numbers break the line and are counted") {
  const Xml xml = svg(draw(plot_of(
      {{"a", {0, 1, 2, 3, 4, 5}, {1, 2, kNaN, 4, 5, HUGE_VAL}}, {"b", {0, 1, 2}, {1, kNaN, 3}}})));
  CHECK(xml.all("polyline", "line").size() == 2);
  CHECK(xml.all("circle").size() == 2);  // the two of b stand alone
  CHECK(says(xml, "3 values that cannot be drawn are left out."));
  CHECK(says(xml, "b"));
  LinePlot logarithmic = plot_of({{"a", {1, 2}, {1, 0}}});
  logarithmic.y.logarithmic = true;
  CHECK(says(svg(draw(logarithmic)), "1 value that cannot be drawn is left out."));
}

TEST_CASE("Plots of nothing, of one point and of equal values are whole pictures") {
  for (const std::vector<Series>& series : {std::vector<Series>{},
                                            {{"a", {}, {}}},
                                            {{"a", {3}, {7}}},
                                            {{"a", {1, 2, 3}, {5, 5, 5}}},
                                            {{"a", {kNaN}, {kNaN}}},
                                            {{"a", {0, 0}, {0, 0}}}}) {
    const Picture picture = draw(plot_of(series));
    const Xml xml = svg(picture);
    CHECK(xml.all("rect", "frame").size() == 1);
    CHECK(svg_text(picture).find("nan") == std::string::npos);
    CHECK(svg_text(picture).find("inf") == std::string::npos);
    CHECK(picture.height > 200);
  }
  CHECK(svg(draw(plot_of({{"a", {3}, {7}}}))).all("circle").size() == 1);
  for (const Picture& picture : {draw(BarChart{"b", "t", "", "x", {}, {}}),
                                 draw(BarChart{"b", "t", "", "x", {"a"}, {{"", {0}}}}),
                                 draw(BarChart{"b", "t", "", "x", {"a"}, {{"", {kNaN}}}}),
                                 draw(HeatMap{"h", "t", "", "", "", "", 0, 0, {}}),
                                 draw(HeatMap{"h", "t", "", "", "", "", 1, 2, {3, 3}}),
                                 draw(TextStrip{"s", "t", "", "", "", {}, {}, {}})}) {
    CHECK_NOTHROW(svg(picture));
    CHECK(svg_text(picture).find("nan") == std::string::npos);
  }
}

TEST_CASE("Bars begin at zero, on both sides of it, and are as long as their values") {
  const Xml xml =
      svg(draw(BarChart{"b", "t", "", "ratio", {"x", "y"}, {{"f", {2, -1}}, {"g", {4, kNaN}}}}));
  const Element two = xml.all("rect", "f0").at(0), minus = xml.all("rect", "f0").at(1),
                four = xml.all("rect", "f1").at(0);
  const double zero = two.number("x");
  CHECK(xml.text_of("0").number("x") == Approx(zero));
  CHECK(four.number("x") == Approx(zero));
  CHECK(four.number("width") == Approx(2 * two.number("width")).margin(0.03));
  CHECK(minus.number("width") == Approx(two.number("width") / 2).margin(0.03));
  CHECK(minus.number("x") == Approx(zero - minus.number("width")).margin(0.03));
  CHECK(xml.all("rect", "f1").size() == 2);  // a bar and the legend
  CHECK(says(xml, "1 value that cannot be drawn is left out."));
}

TEST_CASE("Whiskers reach from the lowest to the highest number, and mean and unit are right") {
  const std::vector<double> seeds{2.25, 1.5, 2.75, 1.9};
  const Group group{"", {2.1, 3}, {whisker_over(seeds), whisker_over({3})}};
  for (const bool points : {true, false}) {
    BarChart chart{"b", "t", "", "loss", {"x", "y"}, {group}, points};
    chart.reference = 1;
    const Xml xml = svg(draw(chart));
    // The reference stands at 1, the last tick at 3 or above: the unit is measured from two labels of the axis.
    const double one = xml.text_of("1").number("x"), unit = xml.text_of("2").number("x") - one;
    const std::vector<Element> lines = xml.all("line", points ? "l0" : "whisker");
    REQUIRE(lines.size() == 3);  // the whisker and its two ends; a number alone has none
    CHECK(lines[0].number("x1") == Approx(one + 0.5 * unit).margin(0.03));
    CHECK(lines[0].number("x2") == Approx(one + 1.75 * unit).margin(0.03));
    CHECK(lines[1].number("x1") == lines[0].number("x1"));
    CHECK(lines[2].number("x1") == lines[0].number("x2"));
    CHECK(xml.all("line", "mark").at(0).number("x1") == Approx(one).margin(0.03));
    if (points)
      CHECK(xml.all("circle").at(0).number("cx") == Approx(one + 1.1 * unit).margin(0.03));
  }
  CHECK(std::isnan(whisker_over({1, kNaN, 2}).low));
  CHECK(svg(draw(BarChart{"b", "t", "", "", {"x"}, {{"", {1}, {whisker_over({1, HUGE_VAL})}}}}))
            .all("line", "whisker")
            .empty());
}

TEST_CASE("Texts of line plots cover no other and stay inside, and no line crosses one") {
  for (unsigned seed = 1; seed <= 400; ++seed) {
    Draws draws(seed);
    const LinePlot plot = random_plot(draws);
    CAPTURE(seed);
    CHECK(faults_of_texts(draw(plot)) == "");
  }
}

TEST_CASE("Texts of bar charts cover no other, and neither the line at 1 nor another crosses one") {
  for (unsigned seed = 1; seed <= 400; ++seed) {
    Draws draws(seed);
    const BarChart chart = random_chart(draws);
    CAPTURE(seed);
    CHECK(faults_of_texts(draw(chart)) == "");
  }
}

TEST_CASE("Names stand at the ends of their lines, in their order, and the lines lead there") {
  std::vector<Series> series;
  for (int i = 0; i < 14; ++i)
    series.push_back({"line " + std::to_string(i), {0, 1}, {1, 1 + 0.01 * ((i * 5) % 14)}});
  series.push_back({"none", {0}, {kNaN}});
  const Xml xml = svg(draw(plot_of(series)));
  const Element frame = xml.all("rect", "frame").at(0);
  const double right = frame.number("x") + frame.number("width");
  const std::vector<Element> leaders = xml.all("polyline", "leader");
  REQUIRE(leaders.size() == series.size());
  double above = 0;
  for (int rank = 13; rank >= 0; --rank) {
    const int i = rank * 3 % 14;  // line i has rank i * 5 % 14
    const Element name = xml.text_of("line " + std::to_string(i));
    CHECK(name.number("x") > right);
    CHECK(name.number("y") > above);
    above = name.number("y");
    const std::vector<Point> leader = points_of(leaders[std::size_t(i)]);
    CHECK(leader[1].y == Approx(name.number("y") - 4).margin(0.02));
    const std::vector<Point> line = points_of(xml.all("polyline", "line").at(std::size_t(i)));
    CHECK(leader[0].y == Approx(line[1].y).margin(0.02));
    // If there are more lines than colours, lines that end beside each other have different colours.
    const std::string number = std::to_string((13 - rank) % kColours);
    CHECK(leaders[std::size_t(i)].is("l" + number));
  }
  CHECK(xml.text_of("none").number("y") > above);
  // Fewer lines keep their colours wherever they end.
  const Xml few = svg(draw(plot_of({{"a", {0, 1}, {0, 1}}, {"b", {0, 1}, {0, 2}}})));
  CHECK(few.all("polyline", "leader").at(0).is("l0"));
  CHECK(few.text_of("b").number("y") < few.text_of("a").number("y"));
}

TEST_CASE("Labels are spread out with the least squares of their ways") {
  for (unsigned seed = 1; seed <= 200; ++seed) {
    Draws draws(seed);
    const std::size_t count = std::size_t(draws.whole(0, 12));
    const double gap = 10, top = 5, bottom = top + gap * double(count) + draws.real(0, 60);
    std::vector<double> wishes;
    for (std::size_t i = 0; i < count; ++i)
      wishes.push_back(draws.one_in(4) && i > 0 ? wishes[0] : draws.real(top - 20, bottom + 20));
    const std::vector<double> places = spread_out(wishes, gap, top, bottom);
    REQUIRE(places.size() == count);
    std::vector<std::size_t> order(count);
    for (std::size_t i = 0; i < count; ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return wishes[a] < wishes[b]; });
    const auto is_allowed = [&](const std::vector<double>& at) {
      for (std::size_t r = 0; r < count; ++r)
        if (at[order[r]] < top - 1e-9 || at[order[r]] > bottom + 1e-9 ||
            (r > 0 && at[order[r]] < at[order[r - 1]] + gap - 1e-9))
          return false;
      return true;
    };
    const auto cost = [&](const std::vector<double>& at) {
      double sum = 0;
      for (std::size_t i = 0; i < count; ++i) sum += (at[i] - wishes[i]) * (at[i] - wishes[i]);
      return sum;
    };
    CAPTURE(seed, count);
    CHECK(is_allowed(places));
    // No run of labels can move together and come nearer to the wished places.
    for (std::size_t first = 0; first < count; ++first)
      for (std::size_t last = first; last < count; ++last)
        for (const double step : {-0.01, 0.01}) {
          std::vector<double> moved = places;
          for (std::size_t r = first; r <= last; ++r) moved[order[r]] += step;
          if (is_allowed(moved)) CHECK(cost(moved) >= cost(places) - 1e-9);
        }
  }
  CHECK(fitted("short", 150) == "short");
  CHECK(text_width(fitted("\u00E9\u00E9\u00E9\u00E9\u00E9\u00E9\u00E9\u00E9", 30)) <= 30);
  CHECK(fitted("\u00E9\u00E9\u00E9\u00E9\u00E9\u00E9\u00E9\u00E9", 30) ==
        "\u00E9\u00E9\u00E9\u2026");
}

TEST_CASE("Ticks stand at the points where the axis says so") {
  LinePlot plot = plot_of({{"a", {300, 600, 1200}, {1, 2, 3}}});
  plot.x.logarithmic = plot.x.at_points = true;
  const Xml xml = svg(draw(plot));
  const std::vector<Point> points = points_of(xml.all("polyline").at(0));
  for (std::size_t i = 0; i < 3; ++i)
    CHECK(xml.text_of(std::vector<std::string>{"300", "600", "1200"}[i]).number("x") ==
          Approx(points[i].x).margin(0.02));
  plot.series[0] = {"a", {300}, {1}};
  CHECK(svg(draw(plot)).all("circle").size() == 1);
}

TEST_CASE("Cells of a heat map cover it once, and the largest is the lightest") {
  const Xml xml = svg(draw(HeatMap{"h", "t", "", "key", "query", "weight", 2, 2, {0, 1, 0, kNaN}}));
  const std::vector<Element> paths = xml.all("path", "cells");
  REQUIRE(paths.size() == 2);
  CHECK(paths[0].attributes.at("fill") == heat_colour(0));
  CHECK(paths[1].attributes.at("fill") == heat_colour(1));
  const auto boxes = [](const Element& path) {
    const std::string& d = path.attributes.at("d");
    return std::count(d.begin(), d.end(), 'M');
  };
  CHECK(boxes(paths[0]) == 2);
  CHECK(boxes(paths[1]) == 1);
  const Element frame = xml.all("rect", "frame").at(0);
  const std::string right = "M" + coordinate(frame.number("x") + frame.number("width") / 2) + " " +
                            coordinate(frame.number("y")) + "h";
  CHECK(paths[1].attributes.at("d").rfind(right, 0) == 0);
  CHECK(says(xml, "1 value that cannot be drawn is left out."));
}

TEST_CASE("Hidden cells of a heat map are not drawn, not counted and give no colour to others") {
  const Xml xml =
      svg(draw(HeatMap{"h", "t", "", "", "", "", 1, 3, {0, 1, 1e6}, {false, false, true}}));
  CHECK(xml.all("path", "cells").size() == 2);
  CHECK_FALSE(says(xml, "left out"));
}

TEST_CASE("Rows and columns of a heat map stand beside their names, which cover no other text") {
  for (unsigned seed = 1; seed <= 100; ++seed) {
    Draws draws(seed);
    HeatMap map{"h", "A title", "", "task", "variant", "share", 0, 0, {}};
    map.rows = std::size_t(draws.whole(1, 20));
    map.columns = std::size_t(draws.whole(1, 30));
    if (!draws.one_in(4))
      for (std::size_t r = 0; r < map.rows; ++r) map.row_names.push_back(draws.name());
    if (!draws.one_in(4))
      for (std::size_t c = 0; c < map.columns; ++c) map.column_names.push_back(draws.name());
    for (std::size_t i = 0; i < map.rows * map.columns; ++i) map.values.push_back(draws.real(0, 1));
    CAPTURE(seed);
    CHECK(faults_of_texts(draw(map)) == "");
  }
  const Xml xml = svg(draw(HeatMap{"h",
                                   "t",
                                   "",
                                   "",
                                   "",
                                   "",
                                   2,
                                   3,
                                   {0, 0, 0, 0, 1, 0},
                                   {},
                                   {"first", "second"},
                                   {"a", "b", "c"}}));
  std::istringstream lightest(xml.all("path", "cells").at(1).attributes.at("d").substr(1));
  double x = 0, y = 0;
  lightest >> x >> y;
  const Element row = xml.text_of("second"), column = xml.text_of("b");
  CHECK(row.number("y") == Approx(y + 12).margin(0.02));     // in the middle of 16
  CHECK(column.number("x") == Approx(x + 36).margin(0.02));  // in the middle of 64
  CHECK(column.attributes.at("transform").rfind("rotate(-90 ", 0) == 0);
}

TEST_CASE("Named rows of a heat map have their numbers in their cells, in ink that can be read") {
  HeatMap map{"h", "t", "", "task", "variant", "share", 2, 2, {0.25, 1, 0.5, kNaN}};
  map.row_names = {"first", "second"};
  map.column_names = {"a", "b"};
  const Xml wide = svg(draw(map));
  CHECK(wide.text_of("0.25").is("on-dark"));
  CHECK(wide.text_of("1.00").is("on-light"));
  CHECK(wide.text_of("0.25").number("x") == Approx(wide.text_of("0.50").number("x")));
  CHECK(wide.text_of("1.00").number("y") == Approx(wide.text_of("first").number("y")));
  CHECK_FALSE(wide.text_of("1.00").attributes.contains("transform"));
  CHECK(wide.all("text", "on-dark").size() + wide.all("text", "on-light").size() == 3);
  // Names are upright if a cell is as narrow as a name.
  map.columns = 16;
  map.column_names.assign(16, "a");
  map.values.assign(32, 0.25);
  map.values[5] = 0.75;
  const Xml narrow = svg(draw(map));
  CHECK(narrow.text_of("0.75").attributes.at("transform").starts_with("rotate(-90 "));
  CHECK(narrow.text_of("0.75").number("y") == Approx(narrow.text_of("first").number("y") - 4));
  map.columns = 40;
  map.column_names.assign(40, "a");
  map.values.assign(80, 0.25);
  CHECK(svg(draw(map)).all("text", "on-dark").empty());
  CHECK(svg(draw(HeatMap{"h", "t", "", "", "", "", 1, 2, {0, 1}})).all("text", "on-dark").empty());
}

TEST_CASE("A strip shows each character below its column") {
  TextStrip strip{"s", "t", "", "steps", "tension", {}, {}, {}};
  for (int i = 0; i < 40; ++i) {
    strip.characters.push_back(i == 0 ? "<" : "a");
    strip.heights.push_back(i % 4);
    strip.colours.push_back(0.1 * i);
  }
  const Xml xml = svg(draw(strip));
  const std::vector<Element> letters = xml.all("text", "letter");
  REQUIRE(letters.size() == 40);
  CHECK(letters[0].text == "<");
  CHECK(letters[32].number("x") == Approx(letters[0].number("x")));
  CHECK(letters[32].number("y") > letters[31].number("y"));
}

TEST_CASE("A curve keeps few points, each the mean of as many steps") {
  Curve curve(10);
  for (int i = 1; i <= 64; ++i) curve.add(i, 3.0 * i);
  const Series series = curve.series("a");
  CHECK(curve.steps_per_point() == 8);
  REQUIRE(series.x.size() == 8);
  CHECK(series.x[0] == Approx(4.5));
  for (std::size_t i = 0; i < series.x.size(); ++i) CHECK(series.y[i] == Approx(3 * series.x[i]));
}

TEST_CASE("A page is well-formed, carries all pictures and needs nothing else") {
  LinePlot plot = plot_of({{"<a & b>", {0, 1}, {0, 1}}, {"\"c\"", {0, 1}, {1, 0}}});
  plot.title = "Losses <of> \"a\" & 'b'";
  const Page page{"Report <1>", {{"text", "a&b\x02.txt"}}, {draw(plot), draw(plot)}};
  const std::string html = html_text(page);
  const Xml xml(html);
  CHECK(xml.all("div", "beside").empty());
  CHECK(xml.all("svg").size() == 2);
  CHECK(xml.all("h1").at(0).text == "Report <1>");
  CHECK(xml.all("dd").at(0).text == "a&b\uFFFD.txt");
  CHECK(xml.all("svg").at(0).attributes.at("aria-label") == plot.title);
  CHECK(says(xml, "<a & b>"));
  CHECK(html.find("<script") == std::string::npos);
  std::string rest = html;
  for (const std::string own = "http://www.w3.org/2000/svg"; rest.find(own) != std::string::npos;)
    rest.erase(rest.find(own), own.size());
  CHECK(rest.find("http") == std::string::npos);
  CHECK(rest.find("url(") == std::string::npos);
}

TEST_CASE("Tables of a page have a caption, a head and rows; without rows they are not there") {
  Page page{"t", {}, {}, {{"Loss < 1", {"variant", "loss"}, {}}}};
  CHECK(Xml(html_text(page)).all("table").empty());
  page.tables[0].rows = {{"sdpa", "0.5"}, {"dar & co", "0.4"}};
  const Xml xml(html_text(page));
  CHECK(xml.all("caption").at(0).text == "Loss < 1");
  CHECK(xml.all("tr").size() == 3);
  REQUIRE(xml.all("th").size() == 2);
  CHECK(xml.all("th")[1].text == "loss");
  REQUIRE(xml.all("td").size() == 4);
  CHECK(xml.all("td")[2].text == "dar & co");
  CHECK(xml.all("td")[3].text == "0.4");
}

TEST_CASE("On paper pictures stand in columns, as wide as these") {
  const std::string html = html_text(Page{"t", {}, {draw(plot_of({}))}});
  const std::size_t print = html.find("@media print{");
  REQUIRE(print != std::string::npos);
  CHECK(html.find(".pictures{columns:2", print) != std::string::npos);
  CHECK(html.find("figure{width:auto", print) != std::string::npos);
}

TEST_CASE("A picture in a file of its own has colours for light and for dark surroundings") {
  const std::string text = svg_text(draw(plot_of({{"a", {0, 1}, {0, 1}}, {"b", {0, 1}, {1, 0}}})));
  const std::size_t dark = text.find("@media(prefers-color-scheme:dark){");
  REQUIRE(dark != std::string::npos);
  const std::size_t end = text.find("</style>");
  REQUIRE(end > dark);
  const std::string light = text.substr(0, dark), other = text.substr(dark, end - dark);
  for (const std::string name : {"svg text{fill:", "svg .paper{fill:", "svg .grid{stroke:",
                                 "svg .l0{stroke:", "svg .f1{fill:"}) {
    INFO(name);
    const std::size_t first = light.find(name), second = other.find(name);
    REQUIRE(first != std::string::npos);
    REQUIRE(second != std::string::npos);
    CHECK(light.substr(first, light.find('}', first) - first) !=
          other.substr(second, other.find('}', second) - second));
  }
  CHECK(Xml(text).all("rect", "paper").size() == 1);
  CHECK(text.find("var(") == std::string::npos);  // not every viewer of SVG files knows it
}

// Contrast of two colours "#rrggbb" (WCAG 2): 1 for equal ones, 21 for black on white.
[[nodiscard]] double contrast(const std::string& a, const std::string& b) {
  const auto luminance = [](const std::string& colour) {
    const double shares[] = {0.2126, 0.7152, 0.0722};
    double sum = 0;
    for (std::size_t c = 0; c < 3; ++c) {
      const double value = std::stoi(colour.substr(1 + 2 * c, 2), nullptr, 16) / 255.0;
      sum +=
          shares[c] * (value <= 0.04045 ? value / 12.92 : std::pow((value + 0.055) / 1.055, 2.4));
    }
    return sum;
  };
  const double of_a = luminance(a), of_b = luminance(b);
  return (std::max(of_a, of_b) + 0.05) / (std::min(of_a, of_b) + 0.05);
}

TEST_CASE("Lines and texts stand out from the paper, light and dark") {
  const std::string text = svg_text(draw(plot_of({{"a", {0, 1}, {0, 1}}})));
  const std::size_t dark = text.find("@media(prefers-color-scheme:dark){");
  for (const std::string& css : {text.substr(0, dark), text.substr(dark)}) {
    const auto value = [&](const std::string& rule) {
      const std::size_t at = css.find(rule);
      INFO(rule);
      REQUIRE(at != std::string::npos);
      return css.substr(at + rule.size(), 7);
    };
    const std::string paper = value("svg .paper{fill:");
    CHECK(contrast(value("svg text{fill:"), paper) > 12);
    CHECK(contrast(value("svg .note{fill:"), paper) > 4.5);
    for (int i = 0; i < kColours; ++i) {
      const std::string n = std::to_string(i), colour = value("svg .l" + n + "{stroke:");
      CAPTURE(i, colour);
      CHECK(colour == value("svg .f" + n + "{fill:"));
      CHECK(contrast(colour, paper) > 3);
    }
  }
}

TEST_CASE("Pictures that belong together stand in one box, also at the end of a page") {
  Picture picture = draw(plot_of({}));
  Page page{"t", {}, {picture, picture, picture, picture}};
  page.pictures[1].beside_next = true;
  CHECK(Xml(html_text(page)).all("div", "beside").size() == 1);
  page.pictures[3].beside_next = true;
  CHECK(Xml(html_text(page)).all("div", "beside").size() == 2);
  CHECK(Xml(html_text(page)).all("svg").size() == 4);
}

TEST_CASE(
    "Files are written into a new folder, others are left alone, and bad folders are refused") {
  const heed_test::TemporaryFolder folder;
  const fs::path inner = folder.path / "a" / "b";
  prepare_folder(inner);
  CHECK(fs::is_empty(inner));
  std::ofstream(inner / "other.svg") << "mine";
  const Page page{"t", {}, {draw(plot_of({{"a", {0, 1}, {0, 1}}}))}};
  write_page(inner, page);
  write_page(inner, page);
  CHECK(text_in(inner / "report.html") == html_text(page));
  CHECK(text_in(inner / "plot.svg") == svg_text(page.pictures[0]));
  CHECK(text_in(inner / "other.svg") == "mine");
  CHECK(std::distance(fs::directory_iterator(inner), fs::directory_iterator()) == 3);

  CHECK_THROWS_WITH(prepare_folder(inner / "other.svg"), Catch::Contains("cannot be made"));
  CHECK_THROWS_WITH(prepare_folder(inner / "other.svg" / "c"), Catch::Contains("cannot be made"));
  fs::create_directories(folder.path / "c" / "report.html");
  CHECK_THROWS_WITH(prepare_folder(folder.path / "c"), Catch::Contains("not a regular file"));
}

TEST_CASE("Bands of links begin at the reader, end at what it reads, and are as wide as weights") {
  LinkMap map{"reads", "Who reads whom", "", {"a", " ", "<", "\xC3"}, {}};
  map.links = {{2, 0, 0.5}, {3, 1, -0.25}, {3, 3, 1}, {1, 1, kNaN}};
  const Xml xml = svg(draw(map));
  // The letters of a row stand on one line, at both ends of the bands.
  const std::vector<Element> letters = xml.all("text", "letter");
  REQUIRE(letters.size() == 2 * 4);
  CHECK(letters[2].text == "\u2423");
  CHECK(letters[4].text == "<");
  const auto line = [&](std::size_t token) { return letters[2 * token].number("y"); };
  const std::vector<Element> bands = xml.all("polygon");
  REQUIRE(bands.size() == 3);
  const auto corners = [&](std::size_t n) { return points_of(bands[n]); };
  CHECK(bands[0].is("f1"));  // the lightest first, in the colour of weights below 0
  CHECK(bands[1].is("f0"));
  const auto middles = [&](std::size_t n) {
    const std::vector<Point> p = corners(n);
    return Point{(p[0].y + p[3].y) / 2, (p[1].y + p[2].y) / 2};
  };
  CHECK(middles(1).x - middles(1).y == Approx(line(2) - line(0)).margin(0.02));
  CHECK(middles(0).x - middles(0).y == Approx(line(3) - line(1)).margin(0.02));
  CHECK(middles(2).x == Approx(middles(2).y));
  const auto height = [&](std::size_t n) { return corners(n)[3].y - corners(n)[0].y; };
  CHECK(height(1) == Approx(height(2) / 2).margin(0.02));
  CHECK(height(0) == Approx(height(2) / 4).margin(0.02));
  CHECK(height(2) < line(1) - line(0));
  CHECK(says(xml, "weights below 0"));
  CHECK(says(xml, "1 value that cannot be drawn is left out."));
}

TEST_CASE("Of a long text the end is drawn, and links that leave it are counted") {
  LinkMap map{"reads", "t", "", std::vector<std::string>(kMostLinkTokens + 10, "x"), {}};
  map.links = {{4, 1, 0.5}, {20, 9, 0.5}, {20, 10, 0.5}};
  const Xml xml = svg(draw(map));
  CHECK(xml.all("text", "letter").size() == 2 * kMostLinkTokens);
  CHECK(xml.all("polygon").size() == 1);
  CHECK(says(xml, "The last 48 of 58 tokens; 1 link of theirs goes to tokens before."));
  CHECK_NOTHROW(svg(draw(LinkMap{"reads", "t", "", {}, {}})));
}

TEST_CASE("Tokens are shown by signs, and long ones are cut") {
  CHECK(token_sign("a b\n") == "a\u2423b\u21B5");
  CHECK(token_sign(std::string(14, 'x')) == std::string(14, 'x'));
  CHECK(token_sign("xxxxxxxxxxxxxxx") == "xxxxxxxxxxxxxx\u2026");
  CHECK(token_sign("\u00E9\u00E9") == "\u00E9\u00E9");
}
