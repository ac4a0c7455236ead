// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include "statistics.hpp"

#include <heed/check/stopwatch.hpp>
#include <heed/variants.hpp>

#include <algorithm>
#include <cmath>

namespace compare {

namespace {

// Calls f(run) for each run and collects the results.
template <class F>
[[nodiscard]] std::vector<double> of_runs(const TrainedVariant& variant, F&& f) {
  std::vector<double> numbers;
  for (const CellResult& run : variant.runs) numbers.push_back(f(run));
  return numbers;
}

[[nodiscard]] std::vector<double> stage_losses(const TrainedVariant& variant, Index after,
                                               Index on) {
  if (variant.runs.empty() || variant.runs.front().stages.empty()) return {};
  return of_runs(variant, [&](const CellResult& run) { return stage_of(run, after, on).loss; });
}

// The cells of all variants on all tasks in one list, and the variant of each.
struct Batches {
  std::vector<Cell> cells;
  std::vector<std::size_t> ends;  // end of each variant's cells

  void add(const std::vector<Cell>& more) {
    cells.insert(cells.end(), more.begin(), more.end());
    ends.push_back(cells.size());
  }
  [[nodiscard]] std::size_t begin(std::size_t n) const { return n == 0 ? 0 : ends[n - 1]; }
  template <class Item>
  [[nodiscard]] std::vector<Item> part(std::size_t n, const std::vector<Item>& all) const {
    return {all.begin() + std::ptrdiff_t(begin(n)), all.begin() + std::ptrdiff_t(ends[n])};
  }
};

// Sets rate and sweep of each variant.
void choose_rates(const Experiment& experiment, const CellRunner& runner,
                  std::vector<TrainedVariant>& variants) {
  const std::vector<double>& rates = experiment.settings().training.rates;
  for (TrainedVariant& variant : variants) variant.learning_rate = rates.front();
  if (rates.size() < 2) return;
  Batches batches;
  for (const TrainedVariant& variant : variants)
    batches.add(choosing_cells(experiment, variant.task, variant.name));
  const std::vector<CellResult> results =
      runner.run(batches.cells, [](std::size_t, const std::vector<CellResult>&) {});
  for (std::size_t n = 0; n < variants.size(); ++n) {
    variants[n].sweep = rate_scores(batches.part(n, batches.cells), batches.part(n, results));
    variants[n].learning_rate = best_rate(variants[n].sweep);
  }
}

}  // namespace

bool TrainedVariant::all_finite() const {
  const auto finite = [](const std::vector<double>& x) {
    return std::all_of(x.begin(), x.end(), [](double loss) { return std::isfinite(loss); });
  };
  return finite(losses_of(*this)) && finite(second_losses_of(*this)) &&
         finite(forgotten_losses_of(*this));
}

std::vector<std::string> tests_of(const TrainedVariant& variant) {
  std::vector<std::string> names;
  for (const TestScore& one : variant.runs.front().tests) names.push_back(one.test);
  return names;
}
std::vector<double> losses_of(const TrainedVariant& variant, const std::string& test) {
  return of_runs(variant, [&](const CellResult& run) { return score_of(run, test).loss; });
}
std::vector<double> accuracies_of(const TrainedVariant& variant, const std::string& test) {
  return of_runs(variant, [&](const CellResult& run) { return score_of(run, test).accuracy; });
}
std::vector<double> second_losses_of(const TrainedVariant& variant) {
  return stage_losses(variant, 1, 1);
}
std::vector<double> forgotten_losses_of(const TrainedVariant& variant) {
  if (variant.runs.empty() || variant.runs.front().stages.empty()) return {};
  return stage_losses(variant, variant.runs.front().stages.back().after, 0);
}
std::vector<double> backward_transfers_of(const TrainedVariant& variant,
                                          double StageScore::*score) {
  if (variant.runs.empty() || variant.runs.front().stages.empty()) return {};
  return of_runs(variant, [&](const CellResult& run) { return backward_transfer(run, score); });
}
double tokens_per_second_of(const TrainedVariant& variant) {
  return heed::median_of(
      of_runs(variant, [](const CellResult& run) { return run.tokens_per_second; }));
}
Index skipped_of(const TrainedVariant& variant) {
  Index skipped = 0;
  for (const CellResult& run : variant.runs) skipped += run.skipped;
  return skipped;
}
Measures means_of(const TrainedVariant& variant, Measures CellResult::*measures) {
  std::map<std::string, std::vector<double>> values;
  for (const CellResult& run : variant.runs)
    for (const auto& [name, value] : run.*measures) values[name].push_back(value);
  Measures means;
  for (const auto& [name, of_runs] : values) means[name] = mean_of(of_runs);
  return means;
}

const char* loss_unit_of(const std::string& task) {
  return task == kText ? "nats per token" : "nats per answer";
}

Index answers_in(const std::vector<const TrainedVariant*>& variants, const std::string& test) {
  Index most = 0;  // a run that ended early has none
  for (const TrainedVariant* variant : variants)
    for (const CellResult& run : variant->runs) most = std::max(most, score_of(run, test).answers);
  return most;
}

const char* name_of(Quantity quantity) { return quantity == Quantity::loss ? "loss" : "accuracy"; }

const char* verdict_of(const std::optional<Difference>& difference) {
  if (!difference) return "unknown";
  if (difference->may_be_none()) return "no difference seen";
  return difference->mean > 0 ? "higher" : "lower";
}

std::vector<const TrainedVariant*> variants_of(const TrainingComparison& comparison,
                                               const std::string& task) {
  std::vector<const TrainedVariant*> of_task;
  for (const TrainedVariant& variant : comparison.variants)
    if (variant.task == task) of_task.push_back(&variant);
  return of_task;
}

const TrainedVariant* baseline_of(const TrainingComparison& comparison, const std::string& task) {
  for (const TrainedVariant* variant : variants_of(comparison, task))
    if (variant->name == heed::kBaseline) return variant;
  return nullptr;
}

std::optional<Difference> difference_of(const TrainedVariant& baseline,
                                        const TrainedVariant& variant, const std::string& test,
                                        Quantity quantity) {
  const auto values = quantity == Quantity::loss ? losses_of : accuracies_of;
  return paired_difference(values(baseline, test), values(variant, test));
}

TrainingComparison compare_training(Settings& settings, const TrainingWatch& watch,
                                    heed_program::Ranks* ranks) {
  const Experiment experiment(settings);
  const CellRunner runner(experiment, ranks);
  const Plan plan = make_plan(experiment, runner);
  settings.training.jobs = plan.jobs;
  settings.threads = plan.threads;
  watch.on_plan(plan.text);
  TrainingComparison comparison;
  comparison.tasks = experiment.tasks();
  if (settings.training.only_plan) return comparison;

  std::vector<TrainedVariant> variants;
  for (const Experiment::Task& task : experiment.tasks())
    for (const std::string& name : settings.variants) {
      TrainedVariant& variant = variants.emplace_back();
      variant.task = task.spec;
      variant.name = name;
      variant.hidden = experiment.hidden_of(name);
    }
  choose_rates(experiment, runner, variants);

  Batches batches;
  for (const TrainedVariant& variant : variants)
    batches.add(result_cells(experiment, variant.task, variant.name, variant.learning_rate));
  const std::size_t per_task = settings.variants.size();
  std::size_t next = 0;  // first variant whose runs are not complete
  const auto on_first = [&](std::size_t n, const std::vector<CellResult>& results) {
    if (n < batches.ends[next]) return;
    TrainedVariant& variant = variants[next];
    for (const Cell& cell : batches.part(next, batches.cells)) variant.seeds.push_back(cell.seed);
    variant.runs = batches.part(next, results);
    const Experiment::Task& task = comparison.tasks[next / per_task];
    if (next % per_task == 0) watch.on_task(task);
    comparison.variants.push_back(variant);
    watch.on_variant(comparison.variants.back());
    if (++next % per_task == 0) watch.on_task_end(comparison, task);
  };
  (void)runner.run(batches.cells, on_first);
  return comparison;
}

}  // namespace compare
