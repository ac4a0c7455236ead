// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include "../heed_lm/text_data.hpp"
#include "../tasks/task_list.hpp"
#include "../zoo/layers.hpp"
#include "progress.hpp"
#include "text_input.hpp"

#include <heed/check/stopwatch.hpp>
#include <heed/compiled.hpp>
#include <heed/mask/visible.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/layer_measures.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace compare {

namespace {

namespace nn = heed::nn;
using heed_lm::ModelConfig;

// The baseline with the usual MLP, four times as wide as the model; the MLPs of all others are matched.
constexpr const char* kUnmatched = "sdpa-4x";

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Reads a text in characters if it is UTF-8, else in bytes.
[[nodiscard]] std::unique_ptr<heed_lm::Tokenizer> tokenizer_for(const std::string& text) {
  try {
    return std::make_unique<heed_lm::CharacterTokenizer>(heed_lm::alphabet_of(text));
  } catch (const std::invalid_argument&) {
    return std::make_unique<heed_lm::ByteTokenizer>();
  }
}

// Of a layer around any variant that programs offer.
[[nodiscard]] std::vector<nn::Measure> layer_measures(const nn::AttentionLayer<float>& layer,
                                                      Index rows) {
  const auto of_zoo = zoo::measures_of(layer, rows);
  return of_zoo ? *of_zoo : nn::measures_of(layer, rows);
}

// Hides what stands before position `at` from all positions behind it.
[[nodiscard]] heed::Mask<float> mask_behind(Index at) {
  return heed::visible<float>([at](auto, auto, auto i, auto j) { return (i <= at) | (j >= at); });
}

// The score of a model that gives no finite loss.
[[nodiscard]] heed_lm::Score no_score() {
  heed_lm::Score score;
  score.loss = score.accuracy = kNone;
  return score;
}

class Trainer {
 public:
  // Throws UsageError where the text cannot be used.
  explicit Trainer(const Settings& settings) : settings_(settings) {
    try {
      if (settings.task.empty())
        open_text(settings);
      else
        open_task(settings);
    } catch (const std::exception& error) {
      throw UsageError(error.what());
    }
  }

  [[nodiscard]] std::string description() const {
    return source_->description() + ", vocabulary " + std::to_string(vocabulary_);
  }

  // The width of the MLP with which a variant comes closest to `wanted` parameters.
  [[nodiscard]] Index matched_hidden(const std::string& name, Index wanted) const {
    ModelConfig config = config_of(name, 1);
    const Index own = parameters(config);
    ++config.hidden;
    const Index each = parameters(config) - own;
    return config.hidden - 1 + (wanted - own + each / 2) / each;
  }
  [[nodiscard]] Index parameters(const ModelConfig& config) const {
    heed_lm::Model model = heed_lm::make_model(config, heed_lm::Naming::options);
    return nn::count_weights<float>(model);
  }
  [[nodiscard]] ModelConfig config_of(const std::string& name, std::uint64_t seed) const {
    ModelConfig config;
    config.variant = name == kUnmatched ? heed::kBaseline : name;
    config.vocabulary = vocabulary_;
    config.width = settings_.model.width;
    config.heads = settings_.model.heads;
    config.depth = settings_.model.depth;
    config.len = settings_.model.len;
    config.hidden = 4 * config.width;
    config.init = settings_.init;
    config.seed = seed;
    return config;
  }

  // Trains the model with one seed and adds what came of it to `result`.
  void run(const ModelConfig& config, TrainedVariant& result, std::vector<double>& speeds,
           Progress& progress) const {
    heed_lm::Run run;
    run.config = config;
    run.model = std::make_unique<heed_lm::Model>(heed_lm::make_model(config));
    if (const std::optional<Index> at = source_->bottleneck())
      for (auto& block : run.model->blocks()) block.attention().restrict_to(mask_behind(*at));
    heed_report::Curve* curve = result.losses.empty() ? &result.curve : nullptr;
    double speed = 0;
    bool sound = train_on(*source_, run, result.name, progress, curve, speed);
    speeds.push_back(speed);
    result.skipped += run.skipped;
    const auto add_outcome = [&](const std::string& test, const heed_lm::DataSource& source) {
      heed_lm::Score score = sound ? score_on(source, run) : no_score();
      if (!std::isfinite(score.loss)) score = no_score();
      result.outcomes.push_back({config.seed, test, std::move(score)});
      return result.outcomes.back().score.loss;
    };
    result.losses.push_back(add_outcome(kHeldOut, *source_));
    sound = sound && std::isfinite(result.losses.back());
    for (const Test& test : tests_) (void)add_outcome(test.name, *test.source);
    result.measures.clear();
    if (sound) result.measures = measures_of(*run.model);
    if (!second_) return;
    if (sound) {
      sound = train_on(*second_, run, result.name + ", second text", progress, nullptr, speed);
      result.skipped += run.skipped;
    }
    result.second.push_back(sound ? score_on(*second_, run).loss : kNone);
    result.forgotten.push_back(sound ? score_on(*source_, run).loss : kNone);
  }

 private:
  void open_task(const Settings& settings) {
    const std::shared_ptr<const tasks::Task> task = tasks::make_task(settings.task);
    vocabulary_ = task->vocabulary();
    source_ = heed_lm::make_task_source(task, settings.seed);
    for (tasks::Task::Test& test : task->tests())
      tests_.push_back({test.name, heed_lm::make_task_source(std::move(test.task), settings.seed,
                                                             tasks::Split::test)});
  }
  void open_text(const Settings& settings) {
    const std::string text =
        settings.text_file.empty() ? default_text() : read_text(settings.text_file);
    const std::string then =
        settings.then_file.empty() ? "" : read_text(settings.then_file, "--then");
    const auto tokenizer = tokenizer_for(text + then);
    vocabulary_ = tokenizer->vocab_size();
    heed_lm::DataSettings data;
    data.len = settings.model.len;
    const auto source = [&](const std::string& whose, const std::string& from) {
      try {
        return heed_lm::make_text_source(tokenizer->encode(from), data);
      } catch (const std::invalid_argument& error) {
        throw UsageError(whose + ": " + error.what());
      }
    };
    source_ = source(
        settings.text_file.empty() ? "the text inside the program" : "--text " + settings.text_file,
        text);
    if (!then.empty()) second_ = source("--then " + settings.then_file, then);
  }

  // Trains the model of `run` on a text, with fresh moments of the optimiser and a fresh schedule. Returns false where
  // training ended early because numbers were not finite. Sets `speed` to tokens per second; adds the losses to
  // `curve` unless that is null.
  [[nodiscard]] bool train_on(const heed_lm::DataSource& source, heed_lm::Run& run,
                              const std::string& name, Progress& progress,
                              heed_report::Curve* curve, double& speed) const {
    run.step = run.skipped = 0;
    run.optimiser = heed::nn::AdamW<float>();
    run.train.steps = settings_.train_steps;
    run.train.warmup = std::min<Index>(100, settings_.train_steps / 10);
    run.train.batch = settings_.model.batch;
    run.train.seed = run.config.seed;
    run.train.learning_rate = settings_.learning_rate;
    heed_lm::Watch watch;
    watch.on_step = [&](const heed_lm::Report& r) {
      speed = r.tokens_per_second;
      if (curve != nullptr && !r.skipped) curve->add(double(r.step), r.loss);
      progress.show(name + ", seed " + std::to_string(run.config.seed) + ": step " +
                    std::to_string(r.step) + " of " + std::to_string(r.steps));
    };
    try {
      heed_lm::train(run, source, settings_.threads, watch);
      return true;
    } catch (const heed_lm::NotFinite&) {
      return false;
    }
  }
  [[nodiscard]] heed_lm::Score score_on(const heed_lm::DataSource& source,
                                        heed_lm::Run& run) const {
    nn::Context<float> context = evaluation();
    return heed_lm::score(*run.model, context, source, run.train.batch);
  }
  [[nodiscard]] nn::Context<float> evaluation() const {
    nn::Context<float> context;
    context.threads = settings_.threads;
    return context;
  }

  // The scalars that the ops have learnt, and what the layers do with the first held-out rows; means over layers.
  [[nodiscard]] std::map<std::string, double> measures_of(heed_lm::Model& model) const {
    std::map<std::string, std::pair<double, int>> sums;
    const auto note = [&](const std::string& name, double value) {
      sums[name].first += value;
      ++sums[name].second;
    };
    model.visit(nn::Visitor<float>(
        [&](const std::string& name, heed::Param<float>& value, heed::Param<float>&) {
          if (value.size() == 1) note(name.substr(name.rfind('.') + 1), double(value[0]));
        }));
    nn::Context<float> context = evaluation();
    const heed_lm::Batch rows = source_->validation_batch(0, settings_.model.batch);
    (void)model.loss(context, rows.rows, rows.inputs, rows.targets);
    for (auto& block : model.blocks())
      for (const auto& [name, value] : layer_measures(block.attention(), rows.rows))
        note(name, value);
    std::map<std::string, double> means;
    for (const auto& [name, sum] : sums) means[name] = sum.first / sum.second;
    return means;
  }

  const Settings& settings_;
  Index vocabulary_ = 0;
  std::unique_ptr<heed_lm::DataSource> source_, second_;
  struct Test {
    std::string name;
    std::unique_ptr<heed_lm::DataSource> source;
  };
  std::vector<Test> tests_;  // of a task
};

}  // namespace

bool TrainedVariant::all_finite() const {
  const auto finite = [](const std::vector<double>& x) {
    return std::all_of(x.begin(), x.end(), [](double loss) { return std::isfinite(loss); });
  };
  return finite(losses) && finite(second) && finite(forgotten);
}

std::vector<std::string> tests_of(const TrainedVariant& variant) {
  std::vector<std::string> names;
  for (const Outcome& outcome : variant.outcomes)
    if (outcome.seed == variant.outcomes.front().seed) names.push_back(outcome.test);
  return names;
}

std::vector<double> accuracies_of(const TrainedVariant& variant, const std::string& test) {
  std::vector<double> accuracies;
  for (const Outcome& outcome : variant.outcomes)
    if (outcome.test == test) accuracies.push_back(outcome.score.accuracy);
  return accuracies;
}

std::vector<std::string> training_controls() {
  std::vector<std::string> names = {kUnmatched};
  for (std::string& name : nn::extra_attention_names()) names.push_back(std::move(name));
  return names;
}

TrainingComparison compare_training(const Settings& settings,
                                    const std::function<void(const std::string&)>& on_start,
                                    const std::function<void(const TrainedVariant&)>& on_variant) {
  const Trainer trainer(settings);
  Index largest = 0;
  for (const std::string& name : settings.variants)
    largest = std::max(largest, trainer.parameters(trainer.config_of(name, 1)));
  TrainingComparison comparison;
  comparison.data = trainer.description();
  on_start(comparison.data);
  for (const std::string& name : settings.variants) {
    TrainedVariant result;
    result.name = name;
    ModelConfig config = trainer.config_of(name, 1);
    if (name != kUnmatched) config.hidden = trainer.matched_hidden(name, largest);
    result.hidden = config.hidden;
    result.parameters = trainer.parameters(config);
    std::vector<double> speeds;
    {
      Progress progress;
      for (int seed = 0; seed < settings.seeds; ++seed) {
        config.seed = settings.seed + std::uint64_t(seed);
        trainer.run(config, result, speeds, progress);
      }
    }
    result.tokens_per_second = heed::median_of(speeds);
    on_variant(result);
    comparison.variants.push_back(std::move(result));
  }
  return comparison;
}

}  // namespace compare
