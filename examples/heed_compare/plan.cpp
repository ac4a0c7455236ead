// SPDX-License-Identifier: Apache-2.0
#include "plan.hpp"

#include "print.hpp"
#include "statistics.hpp"

#include "../tasks/task_list.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace compare {

namespace {

// "48 s", "12 min", "3 h 20 min".
[[nodiscard]] std::string time_text(double seconds) {
  if (seconds < 100) return print("%.0f s", std::max(1.0, seconds));
  const long minutes = std::lround(seconds / 60);
  if (minutes < 60) return print("%ld min", minutes);
  return print("%ld h %ld min", minutes / 60, minutes % 60);
}

// The cells of a variant on a task that are not finished.
struct Missing {
  std::string task, variant;
  std::size_t choosing = 0, results = 0;
  double step = 0, seconds = 0;  // of a step; of all these cells
};

class Planner {
 public:
  Planner(const Experiment& experiment, const CellRunner& runner)
      : experiment_(experiment), runner_(runner) {
    for (const Experiment::Task& task : experiment.tasks())
      for (const std::string& variant : experiment.settings().variants) count(task.spec, variant);
    measure();
  }

  [[nodiscard]] std::string text() const {
    const Settings& settings = experiment_.settings();
    const TrainingSettings& training = settings.training;
    const auto number = [](std::size_t n, const char* what) {
      return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
    };
    std::string text = "plan: " + number(all_, "run") + " of " +
                       number(std::size_t(training.steps), "step") + ": " +
                       number(experiment_.tasks().size(), "task") + ", " +
                       number(settings.variants.size(), "variant") + ", " +
                       number(std::size_t(training.seeds), "seed");
    if (training.rates.size() > 1)
      text += ", and " + number(training.rates.size(), "learning rate") + " to choose from with " +
              number(std::size_t(training.sweep_seeds), "seed");
    if (!training.out_folder.empty())
      text += "; " + std::to_string(done_) + (done_ == 1 ? " is" : " are") + " done in " +
              training.out_folder;
    text += "\n";
    double seconds = 0;
    for (const Experiment::Task& task : experiment_.tasks()) {
      const Missing *fastest = nullptr, *slowest = nullptr;
      for (const Missing& one : missing_) {
        if (one.task != task.spec) continue;
        seconds += one.seconds;
        if (fastest == nullptr || one.step < fastest->step) fastest = &one;
        if (slowest == nullptr || one.step > slowest->step) slowest = &one;
      }
      if (fastest == nullptr) continue;
      text += print("  a step of %s takes %.3g ms (%s)", tasks::task_name(task.spec).c_str(),
                    1e3 * fastest->step, fastest->variant.c_str());
      if (slowest != fastest)
        text += print(" to %.3g ms (%s)", 1e3 * slowest->step, slowest->variant.c_str());
      text += "\n";
    }
    if (seconds > 0)
      text += "  about " + time_text(seconds / (training.jobs * training.ranks)) + " with " +
              (training.ranks > 1 ? number(std::size_t(training.ranks), "rank")
                                  : number(std::size_t(training.jobs), "job")) +
              " of " + number(std::size_t(settings.threads), "thread") + "\n";
    return text + "\n";
  }

 private:
  void count(const std::string& task, const std::string& variant) {
    Missing missing{task, variant};
    const std::vector<Cell> choosing = choosing_cells(experiment_, task, variant);
    std::vector<CellResult> chosen;
    for (const Cell& cell : choosing)
      if (auto result = runner_.find(cell)) chosen.push_back(std::move(*result));
    missing.choosing = choosing.size() - chosen.size();
    const TrainingSettings& training = experiment_.settings().training;
    missing.results = std::size_t(training.seeds);
    if (missing.choosing == 0) {
      const double rate =
          choosing.empty() ? training.rates.front() : best_rate(rate_scores(choosing, chosen));
      for (const Cell& cell : result_cells(experiment_, task, variant, rate))
        if (runner_.find(cell)) --missing.results;
    }
    const std::size_t all = choosing.size() + std::size_t(training.seeds);
    all_ += all;
    done_ += all - missing.choosing - missing.results;
    if (missing.choosing + missing.results > 0) missing_.push_back(std::move(missing));
  }

  void measure() {
    const Settings& settings = experiment_.settings();
    Jobs jobs;
    jobs.count = missing_.size();
    jobs.at_once = settings.training.jobs;
    const auto cell_of = [&](std::size_t n) {
      return result_cells(experiment_, missing_[n].task, missing_[n].variant,
                          settings.training.rates.front())
          .front();
    };
    jobs.work = [&](std::size_t n, const Say&) {
      Cell cell = cell_of(n);
      double step = 0;
      double seconds = 0;
      if (missing_[n].results > 0)
        seconds +=
            double(missing_[n].results) * measure_cell(experiment_, cell, settings.threads, step);
      cell.chooses = true;
      if (missing_[n].choosing > 0)
        seconds +=
            double(missing_[n].choosing) * measure_cell(experiment_, cell, settings.threads, step);
      return nlohmann::json({step, seconds}).dump();
    };
    jobs.done = [&](std::size_t n, const std::string& result) {
      const auto json = nlohmann::json::parse(result);
      missing_[n].step = json.at(0).get<double>();
      missing_[n].seconds = json.at(1).get<double>();
    };
    jobs.progress = [](std::size_t, const std::string&) {};
    jobs.name = [&](std::size_t n) { return name_of(cell_of(n)); };
    run_jobs(jobs);
  }

  const Experiment& experiment_;
  const CellRunner& runner_;
  std::size_t all_ = 0, done_ = 0;
  std::vector<Missing> missing_;
};

}  // namespace

std::vector<Cell> choosing_cells(const Experiment& experiment, const std::string& task,
                                 const std::string& variant) {
  const Settings& settings = experiment.settings();
  std::vector<Cell> cells;
  if (settings.training.rates.size() < 2) return cells;
  for (const double rate : settings.training.rates)
    for (int seed = 0; seed < settings.training.sweep_seeds; ++seed)
      cells.push_back({task, variant, experiment.hidden_of(variant), rate,
                       settings.seed + kSweepSeed + std::uint64_t(seed), true});
  return cells;
}

std::vector<RateScore> rate_scores(const std::vector<Cell>& cells,
                                   const std::vector<CellResult>& results) {
  std::vector<RateScore> scores;
  // Invariant: cells before `first` have their scores; those from there to `last` are of one rate.
  for (std::size_t first = 0, last = 0; first < cells.size(); first = last) {
    std::vector<double> losses, accuracies;
    for (; last < cells.size() && cells[last].learning_rate == cells[first].learning_rate; ++last) {
      const heed_lm::Score& score = score_of(results[last], kWatched);
      losses.push_back(score.loss);
      accuracies.push_back(score.accuracy);
    }
    scores.push_back({cells[first].learning_rate, mean_of(losses), mean_of(accuracies)});
  }
  return scores;
}

double best_rate(const std::vector<RateScore>& scores) {
  const RateScore* best = nullptr;
  double smallest = std::numeric_limits<double>::infinity();
  for (const RateScore& score : scores) {
    smallest = std::min(smallest, score.learning_rate);
    if (std::isfinite(score.loss) && (best == nullptr || score.loss < best->loss)) best = &score;
  }
  return best != nullptr ? best->learning_rate : smallest;
}

std::vector<Cell> result_cells(const Experiment& experiment, const std::string& task,
                               const std::string& variant, double learning_rate) {
  const Settings& settings = experiment.settings();
  std::vector<Cell> cells;
  for (int seed = 0; seed < settings.training.seeds; ++seed)
    cells.push_back({task, variant, experiment.hidden_of(variant), learning_rate,
                     settings.seed + std::uint64_t(seed), false});
  return cells;
}

std::string plan_text(const Experiment& experiment, const CellRunner& runner) {
  return Planner(experiment, runner).text();
}

}  // namespace compare
