// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include "shared_batch.hpp"

#include <heed/nn/schedule.hpp>

#include <nlohmann/json.hpp>

#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed_program::Ranks;

// Matrices decay; biases, norms and the scalars of ops do not.
[[nodiscard]] bool decays(const std::string&, const heed::Param<float>& weight) {
  return weight.shape().size() >= 2;
}

// Takes one step at the optimiser's present rate, or skips it. Returns why it was skipped, or null.
[[nodiscard]] const char* take_step(Run& run, nn::Context<float>& context, const Batch& batch,
                                    double& loss, Ranks& ranks, int context_ranks) {
  Model& model = *run.model;
  nn::clear_gradients<float>(model);
  loss = shared_gradient(model, context, batch, ranks, context_ranks);
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

// Scores as JSON, with the bits of each number: JSON has no place for what is not finite.
[[nodiscard]] std::uint64_t bits_of(double x) { return std::bit_cast<std::uint64_t>(x); }
[[nodiscard]] double number_of(const nlohmann::json& bits) {
  return std::bit_cast<double>(bits.get<std::uint64_t>());
}
[[nodiscard]] nlohmann::json json_of(const Score& score) {
  nlohmann::json parts = nlohmann::json::array();
  for (const auto& [difficulty, part] : score.by_difficulty) {
    nlohmann::json reports = nlohmann::json::object();
    for (const auto& [name, number] : part.reports) reports[name] = bits_of(number);
    parts.push_back({difficulty, part.answers, part.right, reports});
  }
  return {bits_of(score.loss), bits_of(score.accuracy), score.answers, parts};
}
[[nodiscard]] Score score_of(const nlohmann::json& json) {
  Score score{number_of(json[0]), number_of(json[1]), json[2].get<Index>(), {}};
  for (const nlohmann::json& one : json[3]) {
    Score::Part& part = score.by_difficulty[one[0].get<Index>()];
    part.answers = one[1].get<Index>();
    part.right = one[2].get<Index>();
    for (const auto& [name, bits] : one[3].items()) part.reports[name] = number_of(bits);
  }
  return score;
}

// The score of one batch of held-out rows, with sums over its answers in the place of means.
[[nodiscard]] Score score_batch(Model& model, nn::Context<float>& context, const DataSource& data,
                                Index first, Index batch) {
  Score score;
  const Batch drawn = data.validation_batch(first, batch);
  const Packing rows(drawn, model.takes_packed());
  const Packed packed(context, rows);
  const std::vector<Index>& difficulties = drawn.difficulties;
  score.answers = count_targets(rows.targets);
  context.step = std::uint64_t(first);  // each batch has its own random numbers
  std::vector<Index> likeliest(rows.targets.size(), kNoTarget);
  score.loss =
      double(score.answers) * model.loss(context, rows.batch, rows.inputs, rows.targets, likeliest);
  const auto reports = difficulties.empty() ? decltype(reports_of(model)){} : reports_of(model);
  for (std::size_t t = 0; t < likeliest.size(); ++t) {
    if (rows.targets[t] == kNoTarget) continue;
    const bool is_right = likeliest[t] == rows.targets[t];
    score.accuracy += is_right;
    if (difficulties.empty()) continue;
    Score::Part& part = score.by_difficulty[difficulties[t]];
    ++part.answers;
    part.right += is_right;
    for (const auto& [name, of] : reports) part.reports[name] += of[t];
  }
  return score;
}

// Gives each rank the scores of all batches, of which rank r of n has every nth from number r on.
void share_scores(std::vector<Score>& parts, Ranks& ranks) {
  const auto mine = std::size_t(ranks.rank()), count = std::size_t(ranks.count());
  if (count == 1) return;
  nlohmann::json scores;
  for (std::size_t n = mine; n < parts.size(); n += count) scores.push_back(json_of(parts[n]));
  const std::vector<std::string> all = ranks.gather_texts(scores.dump());
  for (std::size_t r = 0; r < count; ++r) {
    const nlohmann::json theirs = nlohmann::json::parse(all[r]);
    for (std::size_t n = r; n < parts.size(); n += count) parts[n] = score_of(theirs[n / count]);
  }
}

}  // namespace

Score score(Model& model, nn::Context<float>& context, const DataSource& data, Index batch,
            Ranks* ranks) {
  const bool training = std::exchange(context.training, false);
  const std::uint64_t step = context.step;
  std::vector<Score> parts(std::size_t((data.validation_rows() + batch - 1) / batch));
  const auto first = std::size_t(ranks ? ranks->rank() : 0),
             stride = std::size_t(ranks ? ranks->count() : 1);
  for (std::size_t n = first; n < parts.size(); n += stride)
    parts[n] = score_batch(model, context, data, Index(n) * batch, batch);
  context.training = training;
  context.step = step;
  if (ranks) share_scores(parts, *ranks);
  Score all;
  double sum = 0, right = 0;
  for (const Score& part : parts) {
    sum += part.loss;
    right += part.accuracy;
    all.answers += part.answers;
    for (const auto& [difficulty, of] : part.by_difficulty) {
      Score::Part& to = all.by_difficulty[difficulty];
      to.answers += of.answers;
      to.right += of.right;
      for (const auto& [name, number] : of.reports) to.reports[name] += number;
    }
  }
  if (all.answers > 0) {
    all.loss = sum / double(all.answers);
    all.accuracy = right / double(all.answers);
  }
  return all;
}

void train(Run& run, const DataSource& data, int threads, const Watch& watch, Ranks* shared_by,
           int context_ranks) {
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
  Ranks alone;
  Ranks& ranks = shared_by ? *shared_by : alone;
  if (model.scores_steps()) model.set_ponder_prior(s.ponder_prior);
  run.optimiser.prepare(model);  // a run whose steps were all skipped has its moments, too
  require_shareable(run, row_len(data), ranks, context_ranks);
  require_same_run(run, data.fingerprint(), ranks, context_ranks);
  const Clock::time_point start = Clock::now();
  const Index first = run.step;
  double tokens = 0;
  Index faults = 0;  // skipped steps in a row
  Once say_skip(watch.on_fault), say_unsaved(watch.on_fault);
  while (run.step < s.steps) {
    const Clock::time_point step_start = Clock::now();
    const Batch batch = data.training_batch(s.batch, s.seed, std::uint64_t(run.step));
    context.step = std::uint64_t(run.step);
    run.optimiser.options.learning_rate = schedule.at(run.step);
    double loss = 0;
    const char* const fault = take_step(run, context, batch, loss, ranks, context_ranks);
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
    tokens += double(batch.tokens());

    const double seconds = std::chrono::duration<double>(now - start).count();
    if (watch.on_step)
      watch.on_step({run.step, s.steps, loss, run.optimiser.options.learning_rate, tokens / seconds,
                     seconds / double(run.step - first) * double(s.steps - run.step),
                     batch.tokens(), std::chrono::duration<double>(now - step_start).count(),
                     fault != nullptr});
    if (faults == kMostFaults)
      throw NotFinite(place + std::to_string(faults) +
                      " steps in a row met numbers that are not finite" + kAdvice);
    const bool last = run.step == s.steps;
    std::optional<double> held_out;
    if (watch.on_evaluation &&
        (last || (watch.evaluate_every > 0 && run.step % watch.evaluate_every == 0))) {
      const Score all = score(model, context, data, s.batch, &ranks);
      held_out = all.loss;
      watch.on_evaluation(run.step, all);
    }
    const bool stop = ranks.any(watch.stop && watch.stop());
    const bool saves = watch.on_save &&
                       (last || stop || (watch.save_every > 0 && run.step % watch.save_every == 0));
    if (saves && !held_out) held_out = short_evaluation(model, context, data, s.batch);
    const bool sound = !held_out || std::isfinite(*held_out);
    if (!sound && (last || stop))
      throw NotFinite(place + "the loss of held-out rows is not finite" + kAdvice);
    if (saves && sound) {
      require_same_run(run, data.fingerprint(), ranks, context_ranks);
      watch.on_save();
      ranks.meet();  // what is said to be saved is
    }
    if (saves && !sound)
      say_unsaved(place + "the loss of held-out rows is not finite; nothing is saved");
    if (stop) return;
  }
}

}  // namespace heed_lm
