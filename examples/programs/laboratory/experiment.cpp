// SPDX-License-Identifier: Apache-2.0
#include "experiment.hpp"

#include "../heed_compare/print.hpp"
#include "../heed_compare/text_input.hpp"
#include "lengths.hpp"

#include "../heed_lm/text_data.hpp"
#include "../tasks/task_list.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <set>

namespace compare {

namespace {

namespace nn = heed::nn;
using heed_lm::DataSource;
using heed_lm::ModelConfig;

// Added to the seed of a task's held-out rows for those that are watched.
constexpr std::uint64_t kWatchedSeed = 1000003;

// Reads texts in characters if all are UTF-8, else in bytes; `why` then names a text that is not.
[[nodiscard]] std::unique_ptr<heed_lm::Tokenizer> tokenizer_for(
    const std::vector<std::pair<std::string, std::string>>& texts, std::string& why) {
  std::string all;
  for (const auto& [name, text] : texts) {
    try {
      (void)heed_lm::alphabet_of(text);
    } catch (const std::invalid_argument& error) {
      why = name + ": " + error.what();
      return std::make_unique<heed_lm::ByteTokenizer>();
    }
    all += text;
  }
  return std::make_unique<heed_lm::CharacterTokenizer>(heed_lm::alphabet_of(all));
}

// A source with every other held-out row of another source, from number `first` on. All rows have one length.
class EveryOtherRow final : public DataSource {
 public:
  EveryOtherRow(Experiment::Source from, Index first) : from_(std::move(from)), first_(first) {}
  [[nodiscard]] heed_lm::Batch training_batch(Index rows, std::uint64_t seed,
                                              std::uint64_t step) const override {
    return from_->training_batch(rows, seed, step);
  }
  [[nodiscard]] Index validation_rows() const override {
    return (from_->validation_rows() - first_ + 1) / 2;
  }
  [[nodiscard]] heed_lm::Batch validation_batch(Index first, Index rows) const override {
    const auto row = [&](Index r) { return from_->validation_batch(first_ + 2 * r, 1); };
    heed_lm::Batch batch = row(first);
    for (Index r = first + 1; r < std::min(first + rows, validation_rows()); ++r) {
      const heed_lm::Batch one = row(r);
      batch.inputs.insert(batch.inputs.end(), one.inputs.begin(), one.inputs.end());
      batch.targets.insert(batch.targets.end(), one.targets.begin(), one.targets.end());
      ++batch.rows;
    }
    return batch;
  }
  [[nodiscard]] std::string description() const override { return from_->description(); }
  [[nodiscard]] std::uint64_t fingerprint() const override {
    return from_->fingerprint() * 31 + std::uint64_t(first_);
  }

 private:
  Experiment::Source from_;
  Index first_;
};

// A source of a task with all tokens moved up: an alphabet of its own.
class OtherAlphabet final : public DataSource {
 public:
  OtherAlphabet(Experiment::Source from, Index up) : from_(std::move(from)), up_(up) {}
  [[nodiscard]] heed_lm::Batch training_batch(Index rows, std::uint64_t seed,
                                              std::uint64_t step) const override {
    return moved(from_->training_batch(rows, seed, step));
  }
  [[nodiscard]] Index validation_rows() const override { return from_->validation_rows(); }
  [[nodiscard]] heed_lm::Batch validation_batch(Index first, Index rows) const override {
    return moved(from_->validation_batch(first, rows));
  }
  [[nodiscard]] std::string description() const override { return from_->description(); }
  [[nodiscard]] std::uint64_t fingerprint() const override {
    return from_->fingerprint() * 31 + std::uint64_t(up_);
  }
  [[nodiscard]] std::optional<Index> bottleneck() const override { return from_->bottleneck(); }

 private:
  [[nodiscard]] heed_lm::Batch moved(heed_lm::Batch batch) const {
    for (Index& token : batch.inputs) token += up_;
    for (Index& token : batch.targets)
      if (token != heed_lm::kNoTarget) token += up_;
    return batch;
  }

  Experiment::Source from_;
  Index up_;
};

[[nodiscard]] std::string number_text(std::uint64_t x) {
  return print("%016llx", static_cast<unsigned long long>(x));
}

}  // namespace

std::vector<std::string> training_controls() { return nn::extra_attention_names(); }

Experiment::Experiment(const Settings& settings) : settings_(settings) {
  if (settings.training.ponder_prior &&
      std::ranges::count(settings.variants, nn::kDialecticalPonderNet) == 0)
    throw UsageError(
        print("--ponder-prior is %g, none of --variants is %s, which alone has a prior",
              *settings.training.ponder_prior, nn::kDialecticalPonderNet));
  try {
    for (const std::string& spec : settings.training.tasks)
      tasks_.push_back(spec == kText ? open_text() : open_task(spec));
    match_parameters();
  } catch (const std::exception& error) {
    throw UsageError(error.what());
  }
}

const Experiment::Task& Experiment::task(const std::string& spec) const {
  for (const Task& task : tasks_)
    if (task.spec == spec) return task;
  throw std::out_of_range("the experiment has no task " + spec);
}

Experiment::Task Experiment::open_task(const std::string& spec) {
  const TrainingSettings& training = settings_.training;
  const std::shared_ptr<const tasks::Task> own = tasks::make_task(spec);
  Task task;
  task.spec = spec;
  task.vocabulary = own->vocabulary() * training.alphabets;
  task.token_name = [](Index id) { return std::to_string(id); };
  task.positions = own->len();
  const Source source = heed_lm::make_task_source(own, settings_.seed);
  task.stages = {source};
  for (int n = 1; n < training.alphabets; ++n)
    task.stages.push_back(std::make_shared<OtherAlphabet>(source, n * own->vocabulary()));
  task.watched =
      heed_lm::make_task_source(own, settings_.seed + kWatchedSeed, tasks::Split::validation);
  task.evaluate_every = training.evaluate_every.value_or(std::max<Index>(1, training.steps / 20));
  task.data = source->description() + ", vocabulary " + std::to_string(task.vocabulary);
  task.tests.push_back({kHeldOut, source});
  std::set<std::string> names;
  const auto add_test = [&](const std::string& name, std::shared_ptr<const tasks::Task> test) {
    if (!names.insert(name).second) return;
    task.positions = std::max(task.positions, test->len());
    task.tests.push_back(
        {name, heed_lm::make_task_source(std::move(test), settings_.seed, tasks::Split::test)});
  };
  for (tasks::Task::Test& test : own->tests()) add_test(test.name, std::move(test.task));
  for (const Index factor : training.lengths)
    if (const auto longer = longer_spec(spec, factor))
      add_test(std::to_string(factor) + "x", tasks::make_task(*longer));
  for (const double noise : training.noise)
    task.tests.push_back({print("noise %g", noise), source, noise});
  return task;
}

Experiment::Task Experiment::open_text() {
  const std::string name =
      settings_.text_file.empty() ? "the text inside the program" : "--text " + settings_.text_file;
  std::vector<std::pair<std::string, std::string>> texts = {
      {name, settings_.text_file.empty() ? default_text() : read_text(settings_.text_file)}};
  for (const std::string& file : settings_.training.then_files)
    texts.emplace_back("--then " + file, read_text(file, "--then"));
  std::string why_bytes;
  const std::shared_ptr<const heed_lm::Tokenizer> tokenizer = tokenizer_for(texts, why_bytes);
  heed_lm::DataSettings data;
  data.len = settings_.training.model.len;
  Task task;
  task.spec = kText;
  task.vocabulary = tokenizer->vocab_size();
  task.token_name = [tokenizer](Index id) { return tokenizer->token(id); };
  task.positions = data.len;
  for (const auto& [whose, text] : texts) {
    try {
      task.stages.push_back(heed_lm::make_text_source(tokenizer->encode(text), data));
    } catch (const std::invalid_argument& error) {
      throw UsageError(whose + ": " + error.what());
    }
  }
  const Source first = task.stages.front();
  for (const Source& stage : task.stages) texts_.push_back(number_text(stage->fingerprint()));
  task.data = first->description() + ", vocabulary " + std::to_string(task.vocabulary);
  if (!why_bytes.empty()) task.data += ", bytes (" + why_bytes + ")";
  task.evaluate_every = settings_.training.evaluate_every.value_or(0);
  task.watched = std::make_shared<EveryOtherRow>(first, 0);
  Source held_out = first;
  if (settings_.training.rates.size() > 1) {  // rows that choose a rate are no test of it
    if (first->validation_rows() < 2)
      throw UsageError(name + " holds out " + std::to_string(first->validation_rows()) +
                       " sequence; --sweep needs two, one to choose with and one to report");
    held_out = std::make_shared<EveryOtherRow>(first, 1);
  }
  task.tests.push_back({kHeldOut, held_out});
  for (const double noise : settings_.training.noise)
    task.tests.push_back({print("noise %g", noise), held_out, noise});
  return task;
}

ModelConfig Experiment::config_of(const Cell& cell) const {
  const Task& of = task(cell.task);
  const ModelSizes& sizes = settings_.training.model;
  ModelConfig config;
  config.variant = cell.variant;
  if (cell.variant == kFrozenMemory || cell.variant == kNoMemory)
    config.variant = nn::kPrototypeArt;
  config.vocabulary = of.vocabulary;
  config.width = sizes.width;
  config.heads = sizes.heads;
  config.depth = sizes.depth;
  config.len = of.positions;
  config.hidden = cell.hidden;
  config.init = settings_.training.init;
  config.seed = cell.seed;
  return config;
}

void Experiment::match_parameters() {
  // A task adds tokens and positions to all models alike, so that any task shows by how much variants differ.
  Cell cell{tasks_.front().spec, "", 0, 0, 1, false};
  const auto parameters = [&](const std::string& variant, Index hidden) {
    cell.variant = variant;
    cell.hidden = hidden;
    heed_lm::Model model = heed_lm::make_model(config_of(cell), heed_lm::Naming::options);
    return nn::count_weights<float>(model);
  };
  const Index usual = 4 * settings_.training.model.width, most = parameters(heed::kBaseline, usual);
  for (const std::string& variant : settings_.variants) {
    const Index own = parameters(variant, usual), each = parameters(variant, usual + 1) - own;
    const Index hidden = usual + std::lround(double(most - own) / double(each));
    if (hidden < 1)
      throw std::invalid_argument(
          print("--width is %td, with which %s without an MLP has %td parameters, %s with its own "
                "%td; it must be larger",
                settings_.training.model.width, variant.c_str(), own - usual * each,
                heed::kBaseline, most));
    hidden_[variant] = hidden;
  }
}

SharedSettings Experiment::shared_settings() const {
  const TrainingSettings& training = settings_.training;
  const ModelSizes& sizes = training.model;
  SharedSettings shared;
  const auto add = [&](const char* name, const auto& value) {
    shared.emplace_back(name, nlohmann::json(value).dump());
  };
  add("steps", training.steps);
  add("batch", sizes.batch);
  add("width", sizes.width);
  add("heads", sizes.heads);
  add("depth", sizes.depth);
  add("seed", settings_.seed);
  add("init", training.init);
  add("ponder", training.ponder);
  if (training.ponder_prior) add("ponder_prior", *training.ponder_prior);
  add("eval_every", training.evaluate_every.value_or(-1));
  add("lengths", training.lengths);
  add("noise", training.noise);
  add("sweep", training.rates.size() > 1);
  add("alphabets", training.alphabets);
  if (!texts_.empty()) {
    add("len", sizes.len);
    add("texts", texts_);
  }
  return shared;
}

}  // namespace compare
