// SPDX-License-Identifier: Apache-2.0
#include "plan.hpp"

#include "../heed_compare/print.hpp"
#include "statistics.hpp"

#include "../tasks/task_list.hpp"

#include <heed/check/stopwatch.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace compare {

namespace {

// Number of rounds of measurements that choose the number of jobs.
constexpr int kRounds = 3;

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
  double step = 0, seconds = 0;  // seconds of one step; seconds of all these cells
};

class Planner {
 public:
  Planner(const Experiment& experiment, const CellRunner& runner)
      : experiment_(experiment),
        runner_(runner),
        jobs_(experiment.settings().training.jobs),
        threads_(experiment.settings().threads) {
    for (const Experiment::Task& task : experiment.tasks())
      for (const std::string& variant : experiment.settings().variants) count(task.spec, variant);
    if (jobs_ == 0) choose();
    measure(missing_, jobs_, threads_, experiment.settings().training.ranks > 1);
  }

  [[nodiscard]] Plan plan() const { return {text(), jobs_, threads_}; }

 private:
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
      text += "  about " + time_text(seconds / (jobs_ * training.ranks)) + " with " +
              (training.ranks > 1 ? number(std::size_t(training.ranks), "rank") + " of " +
                                        number(std::size_t(threads_), "thread")
                                  : division(jobs_, threads_)) +
              why_ + "\n";
    return text + "\n";
  }
  // "2 jobs of 1 thread"
  [[nodiscard]] static std::string division(int jobs, int threads) {
    return print("%d job%s of %d thread%s", jobs, jobs == 1 ? "" : "s", threads,
                 threads == 1 ? "" : "s");
  }

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

  // Sets jobs_ and threads_. The steps of one variant of each task are measured with all threads,
  // and then as many at once as there are threads, with one each, so that they slow each other down
  // as jobs will. Several rounds of both show how sure the choice is.
  void choose() {
    std::size_t cells = 0;
    std::vector<Missing> alone;
    for (const Missing& one : missing_) {
      cells += one.choosing + one.results;
      if (alone.empty() || alone.back().task != one.task) alone.push_back(one);
    }
    const int most = int(std::min<std::size_t>(cells, std::size_t(threads_)));
    jobs_ = 1;
    if (most < 2) return;
    std::vector<Missing> beside;
    while (int(beside.size()) < most || beside.size() < alone.size())
      beside.push_back(alone[beside.size() % alone.size()]);
    const int share = threads_ / most;
    std::vector<double> gains;
    for (int round = 0; round < kRounds; ++round) {
      measure(alone, 1, threads_, true);
      measure(beside, most, share, true);
      double one = 0, several = 0;  // seconds of the steps of each task
      for (std::size_t n = 0; n < alone.size(); ++n) {
        one += alone[n].step;
        several += beside[n].step / most;
      }
      gains.push_back(one / several);
    }
    const Gain gain = gain_of(gains);
    const std::string other = division(gain.several ? 1 : most, gain.several ? threads_ : share);
    why_ = print(", %.2g times as fast as %s by measured steps, %.2g to %.2g in %d rounds",
                 gain.times, other.c_str(), gain.least, gain.most, kRounds);
    if (!gain.several) return;
    jobs_ = most;
    threads_ = share;
  }

  // Sets step and seconds of each item, measuring `at_once` at a time.
  void measure(std::vector<Missing>& of, int at_once, int threads, bool apart) const {
    Jobs jobs;
    jobs.count = of.size();
    jobs.at_once = at_once;
    jobs.apart = apart;
    const auto cell_of = [&](std::size_t n) {
      return result_cells(experiment_, of[n].task, of[n].variant,
                          experiment_.settings().training.rates.front())
          .front();
    };
    jobs.work = [&](std::size_t n, const Say&) {
      Cell cell = cell_of(n);
      double step = 0;
      double seconds = 0;
      if (of[n].results > 0)
        seconds += double(of[n].results) * measure_cell(experiment_, cell, threads, step);
      cell.chooses = true;
      if (of[n].choosing > 0)
        seconds += double(of[n].choosing) * measure_cell(experiment_, cell, threads, step);
      return nlohmann::json({step, seconds}).dump();
    };
    jobs.done = [&](std::size_t n, const std::string& result) {
      const auto json = nlohmann::json::parse(result);
      of[n].step = json.at(0).get<double>();
      of[n].seconds = json.at(1).get<double>();
    };
    jobs.progress = [](std::size_t, const std::string&) {};
    jobs.name = [&](std::size_t n) { return name_of(cell_of(n)); };
    run_jobs(jobs);
  }

  const Experiment& experiment_;
  const CellRunner& runner_;
  int jobs_, threads_;
  std::string why_;  // the reason for both, if they were chosen
  std::size_t all_ = 0, done_ = 0;
  std::vector<Missing> missing_;
};

}  // namespace

Gain gain_of(std::vector<double> gains) {
  Gain gain;
  gain.several = heed::median_of(gains) > 1;
  for (double& one : gains) one = gain.several ? one : 1 / one;
  gain.times = heed::median_of(gains);
  const auto [least, most] = std::ranges::minmax(gains);
  gain.least = least;
  gain.most = most;
  return gain;
}

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
  // Invariant: cells before `first` have their scores; cells from there to `last` have one rate.
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

Plan make_plan(const Experiment& experiment, const CellRunner& runner) {
  return Planner(experiment, runner).plan();
}

}  // namespace compare
