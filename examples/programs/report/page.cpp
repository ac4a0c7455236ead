// SPDX-License-Identifier: Apache-2.0
#include "page.hpp"

#include <heed/io/atomic_file.hpp>

#include <array>

namespace heed_report {

namespace {

constexpr const char* kPageName = "report.html";

struct Colour {
  const char *light, *dark;
};

// Colours of series: blue, orange, green, pink, brown, sky, black; on dark paper blue, orange, mint, mauve, yellow, pale
// blue, olive. Each has a contrast of at least 3 to the paper. They differ in lightness as well as in hue: by at least 22
// units of CIELAB, also for readers who lack the receptors of red or of green.
constexpr std::array<Colour, std::size_t(kColours)> kSeries{{{"#0068a8", "#4a9fe0"},
                                                             {"#e0600f", "#e87722"},
                                                             {"#23703f", "#63f0b0"},
                                                             {"#cc6e98", "#b5659a"},
                                                             {"#6b1f00", "#ffde4a"},
                                                             {"#2894ec", "#c8e4ff"},
                                                             {"#2e2b33", "#8d8a5a"}}};
constexpr Colour kGrid{"#d9dde2", "#3a4048"}, kSoft{"#565d66", "#a9b1ba"},
    kInk{"#1b1f24", "#e6e9ec"}, kPaper{"#ffffff", "#16191d"};

// The place of a picture: on the page, whose variables name the colours, or in a file of its own,
// which spells them for light and for dark surroundings.
enum class Look { page, light, dark };

[[nodiscard]] std::string value_of(const std::string& name, const Colour& colour, Look look) {
  return look == Look::page    ? "var(--" + name + ")"
         : look == Look::light ? colour.light
                               : colour.dark;
}

[[nodiscard]] std::string variables(bool dark) {
  std::string css;
  const auto put = [&](const std::string& name, const Colour& c) {
    css += "--" + name + ":" + (dark ? c.dark : c.light) + ";";
  };
  for (std::size_t i = 0; i < kSeries.size(); ++i) put("c" + std::to_string(i), kSeries[i]);
  put("grid", kGrid);
  put("soft", kSoft);
  put("ink", kInk);
  put("paper", kPaper);
  return ":root{" + css + "}";
}

[[nodiscard]] std::string colour_style(Look look) {
  const std::string ink = look == Look::page ? "currentColor" : value_of("ink", kInk, look),
                    soft = value_of("soft", kSoft, look), grid = value_of("grid", kGrid, look);
  std::string css = "svg text{fill:" + ink + "}svg .note{fill:" + soft +
                    "}svg .frame,svg .mark,svg .whisker{stroke:" + ink +
                    "}svg .grid{stroke:" + grid + "}svg .column{stroke:" + soft +
                    "}svg .paper{fill:" + value_of("paper", kPaper, look) + "}";
  for (std::size_t i = 0; i < kSeries.size(); ++i) {
    const std::string n = std::to_string(i), value = value_of("c" + n, kSeries[i], look);
    css += "svg .l" + n + "{stroke:" + value + "}svg .f" + n + "{fill:" + value + "}";
  }
  return css;
}

[[nodiscard]] std::string picture_style() {
  return "svg text{font:12px system-ui,'DejaVu Sans',Arial,sans-serif}"
         "svg .title{font-size:14px;font-weight:600}"
         "svg .letter{font-family:ui-monospace,'DejaVu Sans Mono',monospace}"
         "svg .frame{fill:none}svg .mark,svg .whisker{stroke-width:1.2}"
         "svg .bar{opacity:.75}svg .band{opacity:.6}"
         "svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}"
         "svg .leader{fill:none;stroke-width:1}"
         "svg .dash1{stroke-dasharray:7 3}svg .dash2{stroke-dasharray:2 2.5}"
         "svg .on-dark{fill:#fff}svg .on-light{fill:#000}"
         "svg .cells{shape-rendering:crispEdges}svg .column{stroke-width:.6}";
}

[[nodiscard]] std::string page_style() {
  return variables(false) + "@media(prefers-color-scheme:dark){" + variables(true) + "}" +
         ":root{color-scheme:light dark}"
         "body{margin:0;padding:8px;background:var(--paper);color:var(--ink);"
         "font:15px/1.45 system-ui,'DejaVu Sans',Arial,sans-serif}"
         "main{max-width:1248px;margin:0 auto}h1{font-size:22px;margin:8px 0}"
         "dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 12px;margin:0 0 16px}"
         "dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}"
         ".tables{display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 "
         "32px}tr{break-inside:avoid}"
         "table{border-collapse:collapse;margin:0 0 16px;font-size:13px;"
         "font-variant-numeric:tabular-nums}"
         "caption{text-align:left;font-weight:600}"
         "th,td{text-align:left;white-space:nowrap;padding:1px 12px 1px 0;border-bottom:1px solid "
         "var(--grid)}"
         "th{color:var(--soft);font-weight:400}"
         ".pictures{columns:3 400px;column-gap:24px}"
         ".beside{column-span:all;display:flex;flex-wrap:wrap;gap:0 24px;padding-top:8px}"
         // All pictures have one width, so that their texts are equally large.
         "figure{margin:0 0 28px;width:400px;max-width:100%;break-inside:avoid}"
         "svg{display:block;width:100%;max-width:100%;height:auto}"
         "@page{margin:12mm}@media print{body{padding:0}table{font-size:11px;break-inside:avoid}"
         ".pictures{columns:2;column-gap:16px}"
         "figure{width:auto;margin:0 0 16px}.beside figure{width:48%}}" +
         picture_style() + colour_style(Look::page);
}

// `inside` comes before the body.
[[nodiscard]] std::string svg_element(const Picture& picture, const std::string& attributes,
                                      const std::string& inside) {
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + coordinate(kWidth) + " " +
         coordinate(picture.height) + "\" role=\"img\" aria-label=\"" + escaped(picture.title) +
         "\"" + attributes + ">\n" + inside + picture.body + "</svg>\n";
}

[[nodiscard]] std::string table_element(const Table& table) {
  if (table.rows.empty()) return "";
  const auto row_of = [](const std::vector<std::string>& cells, const std::string& kind) {
    std::string row = "<tr>";
    for (const std::string& cell : cells)
      row += "<" + kind + ">" + escaped(cell) + "</" + kind + ">";
    return row + "</tr>\n";
  };
  std::string text =
      "<table>\n<caption>" + escaped(table.title) + "</caption>\n" + row_of(table.head, "th");
  for (const std::vector<std::string>& row : table.rows) text += row_of(row, "td");
  return text + "</table>\n";
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  const std::span<const std::byte> piece = std::as_bytes(std::span(text));
  heed::io::write_file_atomically(path, std::span(&piece, 1));
}

}  // namespace

std::string svg_text(const Picture& picture) {
  const std::string size = " width=\"" + coordinate(1.5 * kWidth) + "\" height=\"" +
                           coordinate(1.5 * picture.height) + "\"";
  const std::string style = picture_style() + colour_style(Look::light) +
                            "@media(prefers-color-scheme:dark){" + colour_style(Look::dark) + "}";
  return svg_element(picture, size,
                     "<style>" + style + "</style>\n" +
                         "<rect width=\"100%\" height=\"100%\" class=\"paper\"/>\n");
}

std::string html_text(const Page& page) {
  std::string text =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>" +
      escaped(page.title) + "</title>\n<style>" + page_style() +
      "</style>\n</head>\n<body>\n<main>\n<h1>" + escaped(page.title) + "</h1>\n";
  if (!page.facts.empty()) {
    text += "<dl>\n";
    for (const auto& [name, value] : page.facts)
      text += "<dt>" + escaped(name) + "</dt><dd>" + escaped(value) + "</dd>\n";
    text += "</dl>\n";
  }
  text += "<div class=\"tables\">\n";
  for (const Table& table : page.tables) text += table_element(table);
  text += "</div>\n";
  text += "<div class=\"pictures\">\n";
  bool beside = false;
  for (const Picture& picture : page.pictures) {
    if (picture.beside_next && !beside) text += "<div class=\"beside\">\n";
    text += "<figure>\n" + svg_element(picture, "", "") + "</figure>\n";
    if (beside && !picture.beside_next) text += "</div>\n";
    beside = picture.beside_next;
  }
  if (beside) text += "</div>\n";
  return text + "</div>\n</main>\n</body>\n</html>\n";
}

void prepare_folder(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    throw std::runtime_error("--report " + folder.string() + ": the folder cannot be made (" +
                             (error ? error.message() : "there is a file of that name") + ")");
  const std::filesystem::path page = folder / kPageName;
  if (std::filesystem::exists(page, ignored) && !std::filesystem::is_regular_file(page, ignored))
    throw std::runtime_error("--report " + folder.string() + ": " + page.string() +
                             " exists and is not a regular file");
  try {
    const heed::io::TemporaryFile attempt(folder, folder);
  } catch (const std::runtime_error&) {
    throw std::runtime_error("--report " + folder.string() +
                             ": no file can be written in the folder");
  }
}

void write_page(const std::filesystem::path& folder, const Page& page) {
  for (const Picture& picture : page.pictures)
    write_text(folder / (picture.name + ".svg"), svg_text(picture));
  write_text(folder / kPageName, html_text(page));
}

}  // namespace heed_report
