// SPDX-License-Identifier: Apache-2.0
#include "cell_run.hpp"

#include "cell_measures.hpp"
#include "reading_picture.hpp"

#include <heed/check/stopwatch.hpp>
#include <heed/mask/visible.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace compare {

namespace {

namespace nn = heed::nn;
using heed_lm::DataSource;
using heed_lm::Score;

// Hides the tokens before position `at` from all positions behind it.
[[nodiscard]] heed::Mask<float> mask_behind(Index at) {
  return heed::visible<float>([at](auto, auto, auto i, auto j) { return (i <= at) | (j >= at); });
}

// The model of a cell, its data, and the state of its training.
class CellRun {
 public:
  CellRun(const Experiment& experiment, const Cell& cell, int threads, const Say& say)
      : experiment_(experiment),
        task_(experiment.task(cell.task)),
        cell_(cell),
        threads_(threads),
        say_(say) {
    run_.config = experiment.config_of(cell);
    run_.model = std::make_unique<heed_lm::Model>(heed_lm::make_model(run_.config));
    if (const std::optional<Index> at = task_.stages.front()->bottleneck())
      for (auto& block : run_.model->blocks()) block.attention().restrict_to(mask_behind(*at));
    let_memory_learn(cell.variant != kNoMemory);
    result_.parameters = nn::count_weights<float>(*run_.model);
  }

  [[nodiscard]] CellResult run() {
    train_first();
    if (cell_.chooses) {
      (void)add_test({kWatched, task_.watched});
      return std::move(result_);
    }
    for (const Experiment::Test& test : task_.tests) {
      const bool finite = add_test(test);
      if (&test == &task_.tests.front()) sound_ = sound_ && finite;
    }
    if (sound_) {
      nn::Context<float> context = evaluation();
      measure_model(*run_.model, *task_.stages.front(), run_.train.batch, context, result_);
      if (cell_.seed == experiment_.settings().seed) draw_reading(context);
    }
    if (task_.stages.size() > 1) run_stages();
    return std::move(result_);
  }

  [[nodiscard]] double measure(double& step) {
    // Some steps take several times as long as others, while a process first touches its memory.
    constexpr std::size_t least = 5, most = 9;
    constexpr double enough = 0.02;
    std::vector<double> seconds;
    settle(1 + most);
    heed_lm::Watch watch;
    watch.on_step = [&](const heed_lm::Report& report) {
      if (report.step > 1) seconds.push_back(report.step_seconds);
    };
    watch.stop = [&] {
      return seconds.size() >= least &&
             std::accumulate(seconds.begin(), seconds.end(), 0.0) > enough;
    };
    heed_lm::train(run_, *task_.stages.front(), threads_, watch);
    step = heed::median_of(seconds);
    const TrainingSettings& training = experiment_.settings().training;
    double all = step * double(training.steps) * double(task_.stages.size());
    if (task_.evaluate_every > 0)
      all += seconds_to_score(*task_.watched) * double(training.steps / task_.evaluate_every);
    if (cell_.chooses) return all + seconds_to_score(*task_.watched);
    for (const Experiment::Test& test : task_.tests) all += seconds_to_score(*test.source);
    return all;
  }

 private:
  // Sets a fresh optimiser and a fresh schedule of `steps` steps.
  void settle(Index steps) {
    run_.step = run_.skipped = 0;
    run_.optimiser = nn::AdamW<float>();
    run_.train.steps = steps;
    run_.train.warmup = std::min<Index>(100, steps / 10);
    run_.train.batch = experiment_.settings().training.model.batch;
    run_.train.seed = cell_.seed;
    run_.train.learning_rate = cell_.learning_rate;
    const TrainingSettings& training = experiment_.settings().training;
    if (run_.model->counts_steps()) run_.train.ponder = training.ponder;
    run_.train.ponder_prior = training.ponder_prior.value_or(run_.train.ponder_prior);
  }

  // Trains on a stage. Sets sound_ to false if training ended early because numbers were not finite.
  void train_on(const DataSource& source, const std::string& stage,
                const std::function<void(const heed_lm::Report&)>& on_step) {
    settle(experiment_.settings().training.steps);
    heed_lm::Watch watch;
    watch.on_step = [&](const heed_lm::Report& report) {
      say_(name_of(cell_) + stage + ": step " + std::to_string(report.step) + " of " +
           std::to_string(report.steps));
      if (on_step) on_step(report);
    };
    try {
      heed_lm::train(run_, source, threads_, watch);
    } catch (const heed_lm::NotFinite&) {
      sound_ = false;
    }
    result_.skipped += run_.skipped;
  }

  void train_first() {
    heed_report::Curve curve{100};
    double seconds = 0, tokens = 0;
    train_on(*task_.stages.front(), "", [&](const heed_lm::Report& report) {
      if (!report.skipped) curve.add(double(report.step), report.loss);
      seconds += report.step_seconds;
      tokens += double(report.step_tokens);
      if (task_.evaluate_every == 0 || report.step % task_.evaluate_every != 0) return;
      const Score score = score_on(*task_.watched);
      result_.course.push_back({report.step, score.loss, score.accuracy});
    });
    result_.tokens_per_second = tokens / seconds;
    const heed_report::Series series = curve.series("");
    result_.curve = {series.x, series.y, Index(curve.steps_per_point())};
  }

  // Goes on with the later stages, and scores all of them after each.
  void run_stages() {
    for (Index after = 0; after < Index(task_.stages.size()); ++after) {
      if (after == 1 && cell_.variant == kFrozenMemory) let_memory_learn(false);
      if (after > 0 && sound_)
        train_on(*task_.stages[std::size_t(after)], ", stage " + std::to_string(after + 1), {});
      for (Index on = 0; on < Index(task_.stages.size()); ++on) {
        const Score score = score_on(*task_.stages[std::size_t(on)]);
        result_.stages.push_back({after, on, score.loss, score.accuracy});
      }
    }
  }

  // Draws which tokens the model reads in the first held-out sequence.
  void draw_reading(nn::Context<float>& context) {
    heed_lm::Batch first = task_.stages.front()->validation_batch(0, 1);
    first.inputs.resize(std::min(first.inputs.size(), heed_report::kMostLinkTokens));
    result_.reading =
        reading_picture(*run_.model, context, cell_.variant, first.inputs, task_.token_name);
  }

  // Adds the score; returns whether it is finite.
  bool add_test(const Experiment::Test& test) {
    set_noise(test.noise);
    result_.tests.push_back({test.name, score_on(*test.source)});
    set_noise(0);
    return std::isfinite(result_.tests.back().score.loss);
  }

  void let_memory_learn(bool learns) {
    for (auto& block : run_.model->blocks()) block.attention().set_memory_learning(learns);
  }
  void set_noise(double sigma) {
    std::uint64_t stream = 0;
    for (auto& block : run_.model->blocks()) block.attention().set_noise(sigma, stream++);
  }

  // The score of a model; NaN if the model gives no finite loss.
  [[nodiscard]] Score score_on(const DataSource& source) {
    Score none;
    none.loss = none.accuracy = kNotFinite;
    if (!sound_) return none;
    nn::Context<float> context = evaluation();
    Score score = heed_lm::score(*run_.model, context, source, run_.train.batch);
    return std::isfinite(score.loss) ? score : none;
  }
  [[nodiscard]] nn::Context<float> evaluation() const {
    nn::Context<float> context;
    context.threads = threads_;
    context.seed = cell_.seed;
    return context;
  }

  // Estimates the seconds to score a source, from its first batch.
  [[nodiscard]] double seconds_to_score(const DataSource& source) {
    nn::Context<float> context = evaluation();
    const heed_lm::Batch batch = source.validation_batch(0, run_.train.batch);
    const double one = heed::seconds_of(
        [&] { (void)run_.model->loss(context, batch.rows, batch.inputs, batch.targets); });
    return one * double(source.validation_rows()) / double(batch.rows);
  }

  const Experiment& experiment_;
  const Experiment::Task& task_;
  const Cell& cell_;
  int threads_;
  const Say& say_;
  heed_lm::Run run_;
  bool sound_ = true;
  CellResult result_;
};

}  // namespace

CellResult run_cell(const Experiment& experiment, const Cell& cell, int threads, const Say& say) {
  return CellRun(experiment, cell, threads, say).run();
}

double measure_cell(const Experiment& experiment, const Cell& cell, int threads, double& step) {
  const Say nothing = [](const std::string&) {};
  return CellRun(experiment, cell, threads, nothing).measure(step);
}

}  // namespace compare
