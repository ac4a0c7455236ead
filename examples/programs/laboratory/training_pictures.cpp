// SPDX-License-Identifier: Apache-2.0
#include "training_pictures.hpp"

#include "../tasks/task_list.hpp"
#include "statistics.hpp"
#include "training_table.hpp"

#include <heed/variants.hpp>

#include <algorithm>

namespace compare {

namespace {

using heed_report::BarChart;
using heed_report::Group;
using heed_report::LinePlot;
using heed_report::Picture;
using Variants = std::vector<const TrainedVariant*>;

// Pictures of one task; if there are several tasks, names and titles tell which.
class TaskPictures {
 public:
  TaskPictures(const Settings& settings, const TrainingComparison& comparison,
               const Experiment::Task& task)
      : task_(task),
        variants_(variants_of(comparison, task.spec)),
        several_(comparison.tasks.size() > 1),
        name_(tasks::task_name(task.spec)),
        seeds_(settings.training.seeds > 1
                   ? "Means of " + std::to_string(settings.training.seeds) +
                         " seeds; whiskers reach from the lowest to the highest seed."
                   : "One seed, so that the spread is not known."),
        baseline_(baseline_of(comparison, task.spec)) {}

  [[nodiscard]] std::vector<Picture> all() const {
    std::vector<Picture> pictures = {validation(), speeds(), curves()};
    if (baseline_ != nullptr && variants_.size() > 1) pictures.push_back(curves_over_baseline());
    const CellResult& first = variants_.front()->runs.front();
    if (task_.spec != kText) {
      pictures.push_back(accuracies());
      if (!tasks::task_entry(name_).difficulty.empty()) pictures.push_back(by_difficulty());
      if (!first.course.empty()) pictures.push_back(courses());
    }
    if (!first.stages.empty()) pictures.push_back(forgetting());
    for (const TrainedVariant* v : variants_)
      if (const auto& reading = v->runs.front().reading) {
        pictures.push_back(*reading);
        pictures.back().name = file(pictures.back().name);
        pictures.back().title = title(pictures.back().title);
      }
    for (Picture& picture : measures()) pictures.push_back(std::move(picture));
    return pictures;
  }

 private:
  [[nodiscard]] std::string file(const std::string& name) const {
    return several_ ? name + "_" + name_ : name;
  }
  [[nodiscard]] std::string title(const std::string& text) const {
    return several_ ? name_ + ": " + text : text;
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const TrainedVariant* v : variants_) names.push_back(v->name);
    return names;
  }
  template <class F>
  [[nodiscard]] Group group_of(const std::string& name, F&& values) const {
    Group group{name, {}};
    for (const TrainedVariant* v : variants_) {
      const std::vector<double> of_seeds = values(*v);
      group.values.push_back(mean_of(of_seeds));
      group.whiskers.push_back(heed_report::whisker_over(of_seeds));
    }
    return group;
  }

  [[nodiscard]] Picture validation() const {
    BarChart chart{file("validation_loss"),
                   title("Validation loss after training"),
                   seeds_,
                   std::string("loss, ") + loss_unit_of(task_.spec),
                   names(),
                   {group_of("", [](const TrainedVariant& v) { return losses_of(v); })},
                   true};
    if (baseline_ != nullptr && variants_.size() > 1) {
      chart.reference = mean_of(losses_of(*baseline_));
      chart.note += " The line stands at plain attention.";
    }
    return draw(chart);
  }
  [[nodiscard]] Picture forgetting() const {
    return draw(
        BarChart{file("forgetting"),
                 title("Loss on the first stage before and after the later ones"),
                 seeds_,
                 std::string("validation loss, ") + loss_unit_of(task_.spec),
                 names(),
                 {group_of("first stage", [](const TrainedVariant& v) { return losses_of(v); }),
                  group_of("first stage, after the last", forgotten_losses_of),
                  group_of("second stage", second_losses_of)},
                 true});
  }
  [[nodiscard]] Picture accuracies() const {
    BarChart chart{file("accuracy"),
                   title("Answers that are right"),
                   seeds_ + " " + answers_note(),
                   "share of answers",
                   names(),
                   {},
                   true};
    for (const std::string& test : tests_of(*variants_.front()))
      chart.groups.push_back(
          group_of(test, [&](const TrainedVariant& v) { return accuracies_of(v, test); }));
    return draw(chart);
  }
  // "Of 256 answers held out, 1024 sparse; the same ones for all seeds and variants."
  [[nodiscard]] std::string answers_note() const {
    std::string note;
    for (const std::string& test : tests_of(*variants_.front()))
      note += (note.empty() ? "Of " : ", ") + std::to_string(answers_in(variants_, test)) +
              (note.empty() ? " answers " : " ") + test;
    return note + "; the same ones for all seeds and variants.";
  }
  // Accuracy on held-out rows, by the task's difficulty.
  [[nodiscard]] Picture by_difficulty() const {
    return course_of("accuracy_by_difficulty", "Answers that are right, by difficulty", seeds_,
                     tasks::task_entry(name_).difficulty, [](const CellResult& run) {
                       std::map<double, double> accuracies;
                       for (const auto& [difficulty, part] : score_of(run, kHeldOut).by_difficulty)
                         accuracies[double(difficulty)] = double(part.right) / double(part.answers);
                       return accuracies;
                     });
  }
  // Accuracy over steps. Seeds have the same steps, except those that ended early.
  [[nodiscard]] Picture courses() const {
    return course_of("accuracy_course", "Answers that are right, in the course of training",
                     seeds_ + " On rows that no other figure is about.", "step",
                     [](const CellResult& run) {
                       std::map<double, double> accuracies;
                       for (const Evaluation& one : run.course)
                         accuracies[double(one.step)] = one.accuracy;
                       return accuracies;
                     });
  }
  // The share of right answers over the difficulties that accuracies(run) lists.
  template <class F>
  [[nodiscard]] Picture course_of(const char* name, const char* named, const std::string& note,
                                  const std::string& x, F&& accuracies) const {
    LinePlot plot{file(name), title(named), note, {x}, {"share of answers"}, {}};
    for (const TrainedVariant* v : variants_) {
      std::map<double, std::vector<double>> of_seeds;
      for (const CellResult& run : v->runs)
        for (const auto& [at, accuracy] : accuracies(run)) of_seeds[at].push_back(accuracy);
      heed_report::Series series{v->name, {}, {}, true};
      for (const auto& [at, values] : of_seeds) {
        series.x.push_back(at);
        series.y.push_back(mean_of(values));
        series.whiskers.push_back(heed_report::whisker_over(values));
      }
      plot.series.push_back(std::move(series));
    }
    return draw(plot);
  }
  [[nodiscard]] Picture speeds() const {
    Group group{"", {}};
    for (const TrainedVariant* v : variants_) {
      std::vector<double> of_seeds;
      for (const CellResult& run : v->runs) of_seeds.push_back(run.tokens_per_second);
      group.values.push_back(tokens_per_second_of(*v));
      group.whiskers.push_back(heed_report::whisker_over(of_seeds));
    }
    return draw(BarChart{file("speed"),
                         title("Speed of training"),
                         "Medians over seeds; whiskers reach from the lowest to the highest seed.",
                         "tokens per second",
                         names(),
                         {group}});
  }
  [[nodiscard]] std::string points_note() const {
    const Index each = variants_.back()->runs.front().curve.steps_per_point;
    return each > 1 ? "Each point is the mean of " + std::to_string(each) + " steps. " : "";
  }
  [[nodiscard]] Picture curves() const {
    LinePlot plot{file("training_loss"),
                  title("Training loss of the first seed"),
                  points_note(),
                  {"step"},
                  {std::string("loss, ") + loss_unit_of(task_.spec)},
                  {}};
    for (const TrainedVariant* v : variants_) {
      const TrainingCurve& curve = v->runs.front().curve;
      plot.series.push_back({v->name, curve.step, curve.loss});
    }
    return draw(plot);
  }
  // Losses over the baseline's. All variants see the same batches in the same order, so that the
  // ratio scatters less than either loss.
  [[nodiscard]] Picture curves_over_baseline() const {
    LinePlot plot{file("training_loss_ratio"),
                  title("Training loss relative to plain attention"),
                  points_note() + "First seed, the same batches for all.",
                  {"step"},
                  {"loss over that of " + baseline_->name},
                  {}};
    for (const TrainedVariant* v : variants_)
      plot.series.push_back(
          ratio_to(baseline_->runs.front().curve, v->runs.front().curve, v->name));
    return draw(plot);
  }
  // The ratios of those points of the curve that are means over the same steps as a point of the baseline.
  [[nodiscard]] static heed_report::Series ratio_to(const TrainingCurve& baseline,
                                                    const TrainingCurve& curve,
                                                    const std::string& name) {
    heed_report::Series ratio{name, {}, {}};
    std::size_t at = 0;
    for (std::size_t i = 0; i < curve.step.size(); ++i) {
      while (at < baseline.step.size() && baseline.step[at] < curve.step[i]) ++at;
      if (at == baseline.step.size() || baseline.step[at] != curve.step[i]) continue;
      ratio.x.push_back(curve.step[i]);
      ratio.y.push_back(curve.loss[i] / baseline.loss[at]);
    }
    return ratio;
  }
  [[nodiscard]] std::vector<Picture> measures() const;

  const Experiment::Task& task_;
  Variants variants_;
  bool several_;
  std::string name_, seeds_;
  const TrainedVariant* baseline_;
};

// The name of a measure's file: characters that are no letters or digits become "_".
[[nodiscard]] std::string file_name(const std::string& measure) {
  std::string name = "measure_";
  for (const char c : measure)
    name += (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ? c : '_';
  return name;
}

// A chart for each measure, with the variants that have it; no chart for a measure that is 0 for all of them.
std::vector<Picture> TaskPictures::measures() const {
  std::map<std::string, BarChart> charts;
  for (const TrainedVariant* v : variants_)
    for (const auto& [name, value] : means_of(*v, &CellResult::measures)) {
      BarChart& chart = charts[name];
      if (chart.groups.empty()) chart.groups.push_back({"", {}});
      chart.labels.push_back(v->name);
      chart.groups[0].values.push_back(value);
      std::vector<double> of_seeds;
      for (const CellResult& run : v->runs)
        if (const auto at = run.measures.find(name); at != run.measures.end())
          of_seeds.push_back(at->second);
      chart.groups[0].whiskers.push_back(heed_report::whisker_over(of_seeds));
    }
  std::vector<Picture> pictures;
  for (auto& [name, chart] : charts) {
    const std::vector<double>& values = chart.groups[0].values;
    if (std::count(values.begin(), values.end(), 0.0) == std::ptrdiff_t(values.size())) continue;
    chart.name = file(file_name(name));
    chart.title = title("After training: " + name);
    chart.axis = name + ", mean over layers and seeds";
    pictures.push_back(draw(chart));
  }
  return pictures;
}

// Accuracy of all variants on all tasks except the text.
[[nodiscard]] Picture accuracy_table(const TrainingComparison& comparison) {
  heed_report::HeatMap map{"accuracy_by_task",
                           "Answers that are right, by task",
                           "Means over seeds.",
                           "task",
                           "variant",
                           "share of answers",
                           0,
                           0,
                           {}};
  for (const Experiment::Task& task : comparison.tasks)
    if (task.spec != kText) map.column_names.push_back(tasks::task_name(task.spec));
  for (const TrainedVariant* row : variants_of(comparison, comparison.tasks.front().spec)) {
    map.row_names.push_back(row->name);
    for (const Experiment::Task& task : comparison.tasks)
      for (const TrainedVariant* v : variants_of(comparison, task.spec))
        if (task.spec != kText && v->name == row->name)
          map.values.push_back(mean_of(accuracies_of(*v)));
  }
  map.rows = map.row_names.size();
  map.columns = map.column_names.size();
  return draw(map);
}

}  // namespace

heed_report::Page training_page(const Settings& settings, const TrainingComparison& comparison) {
  const TrainingSettings& training = settings.training;
  const ModelSizes& m = training.model;
  const std::size_t variants = settings.variants.size();
  const auto count = [](auto number, const char* what) { return std::to_string(number) + what; };
  heed_report::Page page;
  page.title = "Language models with " + count(variants, " variants of attention");
  if (variants == 1) page.title = "A language model with " + comparison.variants[0].name;
  for (const Experiment::Task& task : comparison.tasks) page.facts.emplace_back("data", task.data);
  page.facts.emplace_back("model", "width " + count(m.width, ", heads ") +
                                       count(m.heads, ", blocks ") + std::to_string(m.depth));
  page.facts.emplace_back(
      "training", "steps " + count(training.steps, ", sequences per step ") +
                      count(m.batch, ", seeds ") + count(training.seeds, " from ") +
                      count(settings.seed, ", threads ") + std::to_string(settings.threads));
  for (const Experiment::Task& task : comparison.tasks) {
    page.tables.push_back(score_table(comparison, task));
    page.tables.push_back(difference_table(comparison, task.spec));
    if (!page.tables.back().rows.empty() && comparison.tasks.size() > 1)
      page.tables.back().title = tasks::task_name(task.spec) + ": " + page.tables.back().title;
  }
  std::size_t answering = 0;
  for (const Experiment::Task& task : comparison.tasks) answering += task.spec != kText;
  if (answering > 1) page.pictures.push_back(accuracy_table(comparison));
  for (const Experiment::Task& task : comparison.tasks)
    for (Picture& picture : TaskPictures(settings, comparison, task).all())
      page.pictures.push_back(std::move(picture));
  return page;
}

}  // namespace compare
