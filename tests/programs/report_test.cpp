// SPDX-License-Identifier: Apache-2.0

// The pictures of --report: well-formed, complete, and each number where its axis says.

#include "catch.hpp"
#include "temporary.hpp"

#include "report/links.hpp"
#include "report/page.hpp"
#include "report/plots.hpp"
#include "report/scale.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
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

// All elements of an XML text; throws where it is not well-formed. Knows what the writers use: elements,
// attributes in double quotes, five entities, and one document type.
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
  CHECK(ticks_over(range_of(128, 512, true), 5) == std::vector<double>{100, 200, 500, 1000});
  CHECK(ticks_over(range_of(10, 10, true), 5) == std::vector<double>{10, 20});
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
        "middle");  // of x: the first one in the text
  CHECK(says(xml, "A title"));
  CHECK(says(xml, "loss, nats"));
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
  CHECK(xml.all("polyline").size() == 2);
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

TEST_CASE(
    "Error bars reach as far as the spread says, and equal values without spread stand alone") {
  const Xml xml =
      svg(draw(BarChart{"b", "t", "", "loss", {"x", "y"}, {{"", {2, 3}, {0.5, 0}}}, true}));
  const Element point = xml.all("circle").at(0), whisker = xml.all("line", "l0").at(0);
  const double unit = xml.all("circle").at(1).number("cx") - point.number("cx");
  CHECK(point.number("cx") - whisker.number("x1") == Approx(0.5 * unit).margin(0.03));
  CHECK(whisker.number("x2") - point.number("cx") == Approx(0.5 * unit).margin(0.03));
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
  CHECK(token_sign(std::string(15, 'x')) == std::string(14, 'x') + "\u2026");
  CHECK(token_sign("\u00E9\u00E9") == "\u00E9\u00E9");
}
