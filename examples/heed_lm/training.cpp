// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include <heed/nn/not_finite.hpp>
#include <heed/nn/schedule.hpp>

#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

[[nodiscard]] Index count_targets(const Packing& batch) {
  return Index(batch.targets.size()) -
         std::count(batch.targets.begin(), batch.targets.end(), kNoTarget);
}

// The context's sequences are those of `batch` as long as this lives.
class Packed {
 public:
  Packed(nn::Context<float>& context, const Packing& batch) : context_(context) {
    context.packed = batch.packed();
  }
  ~Packed() { context_.packed = nullptr; }
  Packed(const Packed&) = delete;

 private:
  nn::Context<float>& context_;
};

// Matrices decay; biases, norms and the scalars of ops do not.
[[nodiscard]] bool decays(const std::string&, const heed::Param<float>& weight) {
  return weight.shape().size() >= 2;
}

// Takes one step at the optimiser's present rate, or skips it. Returns why it was skipped, or null.
[[nodiscard]] const char* take_step(Run& run, nn::Context<float>& context, const Packing& batch,
                                    double& loss) {
  Model& model = *run.model;
  nn::clear_gradients<float>(model);
  const Packed packed(context, batch);
  try {
    loss = model.gradient(context, batch.batch, batch.inputs, batch.targets);
  } catch (
      const nn::NotFinite&) {  // keys that a memory is to learn; the rows behind them have no loss
    loss = std::numeric_limits<double>::quiet_NaN();
  }
  if (!std::isfinite(loss)) return "the loss is not finite";
  // The norm is summed in double, which no gradient in float overflows: it is finite if all of them are.
  const double bound =
      run.train.clip > 0 ? run.train.clip : std::numeric_limits<double>::infinity();
  if (!std::isfinite(nn::clip_gradients<float>(model, bound))) return "the gradient is not finite";
  if (!run.optimiser.step_if_finite(context, model))
    return "the weights would not be finite after it";
  return nullptr;
}

// The loss of the first rows that are held out: enough to see whether the model gives finite numbers.
[[nodiscard]] double short_evaluation(Model& model, nn::Context<float>& context,
                                      const DataSource& data, Index batch) {
  const bool training = std::exchange(context.training, false);
  const Packing rows(data.validation_batch(0, batch), model.takes_packed());
  const Packed packed(context, rows);
  const double loss = model.loss(context, rows.batch, rows.inputs, rows.targets);
  context.training = training;
  return loss;
}

// Says a sentence the first time that it is called, and nothing later.
class Once {
 public:
  explicit Once(const std::function<void(const std::string&)>& say) : say_(say) {}
  void operator()(const std::string& text) {
    if (say_ && !std::exchange(said_, true)) say_(text);
  }

 private:
  const std::function<void(const std::string&)>& say_;
  bool said_ = false;
};

constexpr const char* kAdvice = "; a smaller --lr may help";

// What the blocks report of the tokens of the last pass, by name: means over the blocks that report it.
[[nodiscard]] std::map<std::string, std::vector<double>> reports_of(Model& model) {
  std::map<std::string, std::vector<double>> sums;
  std::map<std::string, double> blocks;
  for (const auto& block : model.blocks())
    for (const nn::TokenNumbers& numbers : block.attention().token_diagnostics()) {
      std::vector<double>& sum = sums[numbers.name];
      sum.resize(numbers.of.size());
      for (std::size_t t = 0; t < sum.size(); ++t) sum[t] += numbers.of[t];
      ++blocks[numbers.name];
    }
  for (auto& [name, sum] : sums)
    for (double& x : sum) x /= blocks[name];
  return sums;
}

}  // namespace

Score score(Model& model, nn::Context<float>& context, const DataSource& data, Index batch) {
  const bool training = std::exchange(context.training, false);
  const std::uint64_t step = context.step;
  Score score;
  double sum = 0;
  Index right = 0;
  for (Index first = 0; first < data.validation_rows(); first += batch) {
    const Batch drawn = data.validation_batch(first, batch);
    const Packing rows(drawn, model.takes_packed());
    const std::vector<Index>& difficulties = drawn.difficulties;
    const Packed packed(context, rows);
    const Index targets = count_targets(rows);
    context.step = std::uint64_t(first);  // each batch has its own random numbers
    std::vector<Index> likeliest(rows.targets.size(), kNoTarget);
    sum += double(targets) * model.loss(context, rows.batch, rows.inputs, rows.targets, likeliest);
    score.answers += targets;
    const auto reports = difficulties.empty() ? decltype(reports_of(model)){} : reports_of(model);
    for (std::size_t t = 0; t < likeliest.size(); ++t) {
      if (rows.targets[t] == kNoTarget) continue;
      const bool is_right = likeliest[t] == rows.targets[t];
      right += is_right;
      if (difficulties.empty()) continue;
      Score::Part& part = score.by_difficulty[difficulties[t]];
      ++part.answers;
      part.right += is_right;
      for (const auto& [name, of] : reports) part.reports[name] += of[t];
    }
  }
  context.training = training;
  context.step = step;
  if (score.answers > 0) {
    score.loss = sum / double(score.answers);
    score.accuracy = double(right) / double(score.answers);
  }
  return score;
}

void train(Run& run, const DataSource& data, int threads, const Watch& watch) {
  using Clock = std::chrono::steady_clock;
  const TrainSettings& s = run.train;
  nn::Context<float> context;
  context.threads = threads;
  context.training = true;
  context.seed = s.seed;
  context.precision = *precision_of(s.precision);
  run.optimiser.decays = decays;
  run.optimiser.options.weight_decay = s.weight_decay;
  run.optimiser.options.beta2 = 0.99;
  const nn::WarmupCosine schedule{s.warmup, std::max(s.steps, s.warmup), s.learning_rate,
                                  0.1 * s.learning_rate};
  Model& model = *run.model;
  model.set_ponder(s.ponder);
  if (model.scores_steps()) model.set_ponder_prior(s.ponder_prior);
  run.optimiser.prepare(model);  // a run whose steps were all skipped has its moments, too
  const Clock::time_point start = Clock::now();
  const Index first = run.step;
  double tokens = 0;
  Index faults = 0;  // skipped steps in a row
  Once say_skip(watch.on_fault), say_unsaved(watch.on_fault);
  while (run.step < s.steps) {
    const Clock::time_point step_start = Clock::now();
    const Packing batch(data.training_batch(s.batch, s.seed, std::uint64_t(run.step)),
                        model.takes_packed());
    context.step = std::uint64_t(run.step);
    run.optimiser.options.learning_rate = schedule.at(run.step);
    double loss = 0;
    const char* const fault = take_step(run, context, batch, loss);
    const Clock::time_point now = Clock::now();
    ++run.step;
    const std::string place = "step " + std::to_string(run.step) + ": ";
    if (fault != nullptr) {
      ++run.skipped;
      ++faults;
      say_skip(place + fault + "; the step is skipped, " + std::to_string(kMostFaults) +
               " of them in a row end training");
    } else {
      faults = 0;
    }
    tokens += double(batch.inputs.size());

    const double seconds = std::chrono::duration<double>(now - start).count();
    if (watch.on_step)
      watch.on_step({run.step, s.steps, loss, run.optimiser.options.learning_rate, tokens / seconds,
                     seconds / double(run.step - first) * double(s.steps - run.step),
                     Index(batch.inputs.size()),
                     std::chrono::duration<double>(now - step_start).count(), fault != nullptr});
    if (faults == kMostFaults)
      throw NotFinite(place + std::to_string(faults) +
                      " steps in a row met numbers that are not finite" + kAdvice);
    const bool last = run.step == s.steps;
    std::optional<double> held_out;
    if (watch.on_evaluation &&
        (last || (watch.evaluate_every > 0 && run.step % watch.evaluate_every == 0))) {
      const Score all = score(model, context, data, s.batch);
      held_out = all.loss;
      watch.on_evaluation(run.step, all);
    }
    const bool stop = watch.stop && watch.stop();
    const bool saves = watch.on_save &&
                       (last || stop || (watch.save_every > 0 && run.step % watch.save_every == 0));
    if (saves && !held_out) held_out = short_evaluation(model, context, data, s.batch);
    const bool sound = !held_out || std::isfinite(*held_out);
    if (!sound && (last || stop))
      throw NotFinite(place + "the loss of held-out rows is not finite" + kAdvice);
    if (saves && sound) watch.on_save();
    if (saves && !sound)
      say_unsaved(place + "the loss of held-out rows is not finite; nothing is saved");
    if (stop) return;
  }
}

}  // namespace heed_lm
