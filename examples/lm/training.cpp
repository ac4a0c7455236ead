// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include <heed/nn/schedule.hpp>

#include <chrono>
#include <cmath>

namespace heed_lm {

namespace {

namespace nn = heed::nn;

[[nodiscard]] Index count_targets(const Batch& batch) {
  return Index(batch.targets.size()) - std::count(batch.targets.begin(), batch.targets.end(), kNoTarget);
}

// Matrices decay; biases, norms and the scalars of ops do not.
[[nodiscard]] bool decays(const std::string&, const heed::Param<float>& weight) {
  return weight.shape().size() >= 2;
}

}  // namespace

double evaluate(Model& model, nn::Context<float>& context, const DataSource& data, Index batch) {
  const bool training = std::exchange(context.training, false);
  double sum = 0;
  Index counted = 0;
  for (Index first = 0; first < data.validation_rows(); first += batch) {
    const Batch rows = data.validation_batch(first, batch);
    const Index targets = count_targets(rows);
    sum += double(targets) * model.loss(context, rows.rows, rows.inputs, rows.targets);
    counted += targets;
  }
  context.training = training;
  return counted > 0 ? sum / double(counted) : 0;
}

void train(Run& run, const DataSource& data, int threads, const Watch& watch) {
  using Clock = std::chrono::steady_clock;
  const TrainSettings& s = run.train;
  nn::Context<float> context;
  context.threads = threads;
  context.training = true;
  context.seed = s.seed;
  run.optimiser.decays = decays;
  run.optimiser.options.weight_decay = s.weight_decay;
  run.optimiser.options.beta2 = 0.99;
  const nn::WarmupCosine schedule{s.warmup, std::max(s.steps, s.warmup), s.learning_rate,
                                  0.1 * s.learning_rate};
  Model& model = *run.model;
  const Clock::time_point start = Clock::now();
  const Index first = run.step;
  double tokens = 0;
  while (run.step < s.steps) {
    const Batch batch = data.training_batch(s.batch, s.seed, std::uint64_t(run.step));
    context.step = std::uint64_t(run.step);
    nn::clear_gradients<float>(model);
    const double loss = model.gradient(context, batch.rows, batch.inputs, batch.targets);
    if (!std::isfinite(loss))
      throw std::runtime_error("training: the loss of step " + std::to_string(run.step) +
                               " is not finite; a smaller --lr may help");
    if (s.clip > 0) nn::clip_gradients<float>(model, s.clip);
    run.optimiser.options.learning_rate = schedule.at(run.step);
    run.optimiser.step(context, model);
    ++run.step;
    tokens += double(batch.inputs.size());

    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (watch.on_step)
      watch.on_step({run.step, s.steps, loss, run.optimiser.options.learning_rate, tokens / seconds,
                     seconds / double(run.step - first) * double(s.steps - run.step)});
    const bool last = run.step == s.steps;
    if (watch.on_evaluation &&
        (last || (watch.evaluate_every > 0 && run.step % watch.evaluate_every == 0)))
      watch.on_evaluation(run.step, evaluate(model, context, data, s.batch));
    const bool stop = watch.stop && watch.stop();
    if (watch.on_save && (last || stop || (watch.save_every > 0 && run.step % watch.save_every == 0)))
      watch.on_save();
    if (stop) return;
  }
}

}  // namespace heed_lm
