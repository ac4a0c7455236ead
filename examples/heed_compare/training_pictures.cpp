// SPDX-License-Identifier: Apache-2.0
#include "training_pictures.hpp"

#include "../tasks/task_list.hpp"
#include "statistics.hpp"

#include <heed/variants.hpp>

#include <algorithm>

namespace compare {

namespace {

using heed_report::BarChart;
using heed_report::Group;
using heed_report::LinePlot;
using heed_report::Picture;
using Losses = std::vector<double> TrainedVariant::*;

[[nodiscard]] std::vector<std::string> names_of(const TrainingComparison& comparison) {
  std::vector<std::string> names;
  for (const TrainedVariant& v : comparison.variants) names.push_back(v.name);
  return names;
}

// Adds the mean of the seeds of a variant, with a whisker over all of them.
void add_seeds(Group& group, const std::vector<double>& of_seeds) {
  group.values.push_back(mean_of(of_seeds));
  group.whiskers.push_back(heed_report::whisker_over(of_seeds));
}

[[nodiscard]] Group group_of(const TrainingComparison& comparison, const char* name,
                             Losses losses) {
  Group group{name, {}};
  for (const TrainedVariant& v : comparison.variants) add_seeds(group, v.*losses);
  return group;
}

// What points and whiskers are.
[[nodiscard]] std::string seeds_note(const Settings& settings) {
  return settings.seeds > 1 ? "Means of " + std::to_string(settings.seeds) +
                                  " seeds; whiskers reach from the lowest to the highest seed."
                            : "One seed, so that the spread is not known.";
}

// Plain attention, if it was trained; null if not.
[[nodiscard]] const TrainedVariant* baseline_of(const TrainingComparison& c) {
  for (const TrainedVariant& v : c.variants)
    if (v.name == heed::kBaseline) return &v;
  return nullptr;
}

[[nodiscard]] Picture validation(const Settings& settings, const TrainingComparison& c) {
  BarChart chart{"validation_loss",
                 "Validation loss after training",
                 seeds_note(settings),
                 "loss, nats per token",
                 names_of(c),
                 {group_of(c, "", &TrainedVariant::losses)},
                 true};
  const TrainedVariant* baseline = baseline_of(c);
  if (baseline != nullptr && c.variants.size() > 1) {
    chart.reference = mean_of(baseline->losses);
    chart.note += " The line stands at plain attention.";
  }
  return draw(chart);
}

[[nodiscard]] Picture forgetting(const Settings& settings, const TrainingComparison& c) {
  return draw(BarChart{"forgetting",
                       "Loss on the first text before and after the second",
                       seeds_note(settings),
                       "validation loss, nats per token",
                       names_of(c),
                       {group_of(c, "first text", &TrainedVariant::losses),
                        group_of(c, "first text, after the second", &TrainedVariant::forgotten),
                        group_of(c, "second text", &TrainedVariant::second)},
                       true});
}

[[nodiscard]] Picture accuracies(const Settings& settings, const TrainingComparison& c) {
  BarChart chart{"accuracy",
                 "Answers that are right",
                 seeds_note(settings),
                 "share of answers",
                 names_of(c),
                 {},
                 true};
  for (const std::string& test : tests_of(c.variants.front())) {
    Group group{test, {}, {}};
    for (const TrainedVariant& v : c.variants) add_seeds(group, accuracies_of(v, test));
    chart.groups.push_back(std::move(group));
  }
  return draw(chart);
}

// Means over seeds, of held-out sequences.
[[nodiscard]] Picture by_difficulty(const Settings& settings, const TrainingComparison& c) {
  const std::string& counts = tasks::task_entry(tasks::task_name(settings.task)).difficulty;
  LinePlot plot{"accuracy_by_difficulty", "Answers that are right, by difficulty",
                "Means over seeds.",      {counts},
                {"share of answers"},     {}};
  for (const TrainedVariant& v : c.variants) {
    std::map<Index, heed_lm::Score::Part> parts;
    for (const Outcome& outcome : v.outcomes) {
      if (outcome.test != kHeldOut) continue;
      for (const auto& [difficulty, part] : outcome.score.by_difficulty) {
        parts[difficulty].answers += part.answers;
        parts[difficulty].right += part.right;
      }
    }
    heed_report::Series series{v.name, {}, {}, true};
    for (const auto& [difficulty, part] : parts) {
      series.x.push_back(double(difficulty));
      series.y.push_back(double(part.right) / double(part.answers));
    }
    plot.series.push_back(std::move(series));
  }
  return draw(plot);
}

[[nodiscard]] Picture speeds(const TrainingComparison& c) {
  Group group{"", {}};
  for (const TrainedVariant& v : c.variants) group.values.push_back(v.tokens_per_second);
  return draw(BarChart{"speed",
                       "Speed of training",
                       "Median over seeds.",
                       "tokens per second",
                       names_of(c),
                       {group}});
}

[[nodiscard]] std::string points_note(const TrainingComparison& c) {
  const std::size_t each = c.variants.back().curve.steps_per_point();
  return each > 1 ? "Each point is the mean of " + std::to_string(each) + " steps. " : "";
}

[[nodiscard]] Picture curves(const TrainingComparison& c) {
  LinePlot plot{"training_loss", "Training loss of the first seed", points_note(c),
                {"step"},        {"loss, nats per token"},          {}};
  for (const TrainedVariant& v : c.variants) plot.series.push_back(v.curve.series(v.name));
  return draw(plot);
}

// The points of the curve that are means of the same steps as one of the baseline, over that one.
[[nodiscard]] heed_report::Series ratio_to(const heed_report::Series& baseline,
                                           const heed_report::Series& curve) {
  heed_report::Series ratio{curve.name, {}, {}};
  std::size_t at = 0;
  for (std::size_t i = 0; i < curve.x.size(); ++i) {
    while (at < baseline.x.size() && baseline.x[at] < curve.x[i]) ++at;
    if (at == baseline.x.size() || baseline.x[at] != curve.x[i]) continue;
    ratio.x.push_back(curve.x[i]);
    ratio.y.push_back(curve.y[i] / baseline.y[at]);
  }
  return ratio;
}

// All variants see the same batches in the same order, so that the ratio scatters less than either loss.
[[nodiscard]] Picture curves_over(const TrainedVariant& baseline, const TrainingComparison& c) {
  LinePlot plot{"training_loss_ratio",
                "Training loss relative to plain attention",
                points_note(c) + "First seed, the same batches for all.",
                {"step"},
                {"loss over that of " + baseline.name},
                {}};
  const heed_report::Series of_baseline = baseline.curve.series(baseline.name);
  for (const TrainedVariant& v : c.variants)
    plot.series.push_back(ratio_to(of_baseline, v.curve.series(v.name)));
  return draw(plot);
}

// The name of a measure's file: what is no letter or digit becomes "_".
[[nodiscard]] std::string file_name(const std::string& measure) {
  std::string name = "measure_";
  for (const char c : measure)
    name += (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ? c : '_';
  return name;
}

// A chart for each measure, with the variants that have it; none for a measure that is 0 for all of them.
[[nodiscard]] std::vector<Picture> measures(const TrainingComparison& c) {
  std::map<std::string, BarChart> charts;
  for (const TrainedVariant& v : c.variants)
    for (const auto& [name, value] : v.measures) {
      BarChart& chart = charts[name];
      if (chart.groups.empty()) chart.groups.push_back({"", {}});
      chart.labels.push_back(v.name);
      chart.groups[0].values.push_back(value);
    }
  std::vector<Picture> pictures;
  for (auto& [name, chart] : charts) {
    const std::vector<double>& values = chart.groups[0].values;
    if (std::count(values.begin(), values.end(), 0.0) == std::ptrdiff_t(values.size())) continue;
    chart.name = file_name(name);
    chart.title = "After training: " + name;
    chart.axis = name + ", mean over layers";
    pictures.push_back(draw(chart));
  }
  return pictures;
}

}  // namespace

heed_report::Page training_page(const Settings& settings, const TrainingComparison& comparison) {
  const ModelSizes& m = settings.model;
  const auto count = [](auto number, const char* what) { return std::to_string(number) + what; };
  heed_report::Page page;
  page.title =
      "Language models with " + count(comparison.variants.size(), " variants of attention");
  if (comparison.variants.size() == 1)
    page.title = "A language model with " + comparison.variants[0].name;
  page.facts = {
      {"data", comparison.data},
      {"model", "width " + count(m.width, ", heads ") + count(m.heads, ", blocks ") +
                    count(m.depth, ", tokens ") + std::to_string(m.len)},
      {"training", "steps " + count(settings.train_steps, ", sequences per step ") +
                       count(m.batch, ", seeds ") + count(settings.seeds, " from ") +
                       count(settings.seed, ", threads ") + std::to_string(settings.threads)}};
  page.pictures = {validation(settings, comparison), speeds(comparison), curves(comparison)};
  const TrainedVariant* baseline = baseline_of(comparison);
  if (baseline != nullptr && comparison.variants.size() > 1)
    page.pictures.push_back(curves_over(*baseline, comparison));
  if (!settings.task.empty()) {
    page.pictures.push_back(accuracies(settings, comparison));
    if (!tasks::task_entry(tasks::task_name(settings.task)).difficulty.empty())
      page.pictures.push_back(by_difficulty(settings, comparison));
  }
  if (!settings.then_file.empty()) page.pictures.push_back(forgetting(settings, comparison));
  for (Picture& picture : measures(comparison)) page.pictures.push_back(std::move(picture));
  return page;
}

}  // namespace compare
