// SPDX-License-Identifier: Apache-2.0
#include "pictures.hpp"

#include "../report/page.hpp"
#include "../report/plots.hpp"
#include "inner_view.hpp"
#include "report.hpp"
#include "text_input.hpp"

#include <algorithm>

namespace compare {

namespace {

using heed_report::BarChart;
using heed_report::HeatMap;
using heed_report::LinePlot;
using heed_report::Picture;
using heed_report::Series;
using heed_report::TextStrip;

constexpr Index kMapTokens = 64, kStripTokens = 128;
constexpr int kMostSteps = 12;

[[nodiscard]] std::string counted(Index number, const char* what) {
  return std::to_string(number) + what;
}

// A visible character for a byte of the text: an arrow for a line break, a dot for a byte without a sign.
[[nodiscard]] std::string visible(char c) {
  if (c == '\n') return "\u21B5";
  return c >= ' ' && c <= '~' ? std::string(1, c) : "\u00B7";
}

class Pictures {
 public:
  Pictures(const Settings& settings, const Comparison& comparison)
      : settings_(settings),
        comparison_(comparison),
        text_(settings.text_file.empty() ? default_text() : read_text(settings.text_file)) {}

  [[nodiscard]] std::vector<Picture> all() {
    for (const Dtype dtype : settings_.dtypes) costs(dtype);
    lengths();
    const InnerViews views = inner_views(settings_.variants);
    if (views.resonance) resonance();
    if (views.convergence) convergence();
    if (views.tension) tension();
    return std::move(pictures_);
  }

 private:
  // "4 heads of width 64, 2048 tokens that see all, 1 thread", for the notes of pictures.
  [[nodiscard]] std::string shape_text() const {
    const heed::Shape& s = settings_.shape;
    return (s.batch > 1 ? counted(s.batch, " sequences, ") : "") +
           counted(s.heads, s.heads == 1 ? " head" : " heads") + " of width " +
           std::to_string(s.dim) + ", " + counted(s.len, " tokens ") +
           (settings_.causal ? "that see those before" : "that see all") + ", " +
           counted(settings_.threads, settings_.threads == 1 ? " thread" : " threads");
  }

  void costs(Dtype dtype) {
    const std::string type = dtype_name(dtype);
    BarChart chart{"cost_" + type,
                   "Time relative to plain attention, " + type,
                   shape_text() + "; bars are medians of " +
                       counted(comparison_.rounds.at(dtype), " rounds") +
                       ", whiskers reach from the lowest to the highest round. Less is faster.",
                   "time over that of sdpa",
                   {},
                   {{"forward", {}}, {"backward", {}}}};
    for (const Record& r : comparison_.records) {
      if (r.dtype != dtype) continue;
      if (r.pass == "forward") chart.labels.push_back(r.variant);
      heed_report::Group& group = chart.groups[r.pass == "forward" ? 0 : 1];
      group.values.push_back(r.ratio.median);
      group.whiskers.push_back(heed_report::whisker_over(r.ratios));
    }
    chart.reference = 1;
    pictures_.push_back(draw(chart));
  }

  void lengths() {
    std::vector<LengthTime> times = time_shorter_texts(settings_);
    if (times.empty()) return;
    const Dtype dtype = settings_.dtypes.front();
    for (const Record& r : comparison_.records)
      if (r.dtype == dtype) times.push_back({r.variant, r.pass, settings_.shape.len, r.ratios});
    for (const std::string pass : {"forward", "backward"}) {
      LinePlot plot{
          "length_" + pass,
          "Time relative to plain attention against length, " + pass + ", " + dtype_name(dtype),
          "Medians, the longest text of all rounds, the others of three; whiskers reach from the "
          "lowest to the highest round.",
          {"tokens", true, false, true},
          {"time over that of sdpa", true},
          {}};
      for (const std::string& variant : settings_.variants) {
        Series series{variant, {}, {}, true};
        for (const LengthTime& t : times)
          if (t.variant == variant && t.pass == pass) {
            series.x.push_back(double(t.len));
            series.y.push_back(heed::median_of(t.ratios));
            series.whiskers.push_back(heed_report::whisker_over(t.ratios));
          }
        plot.series.push_back(std::move(series));
      }
      pictures_.push_back(draw(plot));
    }
  }

  [[nodiscard]] std::string untrained() const {
    return "First head on the first " +
           counted(kMapTokens, " tokens; random projections, nothing is trained.");
  }

  void resonance() {
    const ResonanceMaps maps = dar_maps(settings_, text_, kMapTokens);
    const auto len = std::size_t(maps.len);
    pictures_.push_back(
        draw(HeatMap{"dar_weights", "Attention of dar: weight of each pair", untrained(),
                     "key, token of the text", "query, token of the text", "weight", len, len,
                     maps.weights, maps.hidden}));
    pictures_.back().beside_next = true;
    pictures_.push_back(draw(HeatMap{
        "dar_resonance", "Resonance of dar: r of each pair", untrained(), "key, token of the text",
        "query, token of the text", "resonance r", len, len, maps.resonance, maps.hidden}));
  }

  void convergence() {
    Series series{"", {}, ode_residuals(settings_, text_, kMapTokens, kMostSteps), true};
    for (int steps = 1; steps <= kMostSteps; ++steps) series.x.push_back(steps);
    pictures_.push_back(draw(LinePlot{
        "ode_convergence",
        "Convergence of the resonant flow (ode)",
        "Mean over the rows of all heads, first " + counted(kMapTokens, " tokens, double."),
        {"steps", false, true},
        {"largest change of a weight in the last step", true},
        {series}}));
  }

  void tension() {
    const DialecticalRows rows = dialectical_rows(settings_, text_, kStripTokens);
    TextStrip strip{"dialectical",
                    "Steps and tension of dialectical attention",
                    "Here a row halts after " + std::to_string(rows.max_steps) +
                        " steps, or when one moves it by less than " +
                        heed_report::number_text(rows.halt_eps) +
                        " of its length. First head; random weights, " + "nothing is trained.",
                    "steps of each token",
                    "tension of each token",
                    {},
                    rows.steps,
                    rows.tension};
    for (std::size_t i = 0; i < rows.steps.size(); ++i)
      strip.characters.push_back(visible(text_[i % text_.size()]));
    pictures_.push_back(draw(strip));
  }

  const Settings& settings_;
  const Comparison& comparison_;
  std::string text_;
  std::vector<Picture> pictures_;
};

}  // namespace

void write_pictures(const Settings& settings, const Machine& machine,
                    const Comparison& comparison) {
  if (settings.report_folder.empty()) return;
  const heed::Shape& s = settings.shape;
  heed_report::Page page;
  page.title = "Variants of attention compared";
  page.facts = {
      {"machine", machine.name + ", " + machine.kind + ", " + counted(machine.cores, " cores")},
      {"compiled", machine.compiler + ": " + machine.flags},
      {"threads", std::to_string(settings.threads)},
      {"shape", "sequences " + counted(s.batch, ", heads ") + counted(s.heads, ", tokens ") +
                    counted(s.len, ", width ") + std::to_string(s.dim) +
                    (settings.causal ? ", causal" : ", every token sees all")},
      {"text", comparison.text_source + ", " + counted(comparison.text_bytes, " bytes")},
      {"seed", std::to_string(settings.seed)}};
  if (!comparison.records.empty()) page.facts.emplace_back("ratios", movement_text(comparison));
  for (const Dtype dtype : settings.dtypes) page.tables.push_back(cost_table(comparison, dtype));
  page.pictures = Pictures(settings, comparison).all();
  heed_report::write_page(settings.report_folder, page);
}

}  // namespace compare
