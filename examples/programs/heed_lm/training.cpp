// SPDX-License-Identifier: Apache-2.0
#include "training.hpp"

#include "shared_batch.hpp"

#include <heed/nn/schedule.hpp>

#include <nlohmann/json.hpp>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
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

// Takes one step at the optimiser's present rate, or skips it. Returns the reason for skipping it, or null.
[[nodiscard]] const char* step_fault(Run& run, nn::Context<float>& context, const Batch& batch,
                                     double& loss, Ranks& ranks, int context_ranks) {
  Model& model = *run.model;
  nn::clear_gradients<float>(model);
  loss = shared_gradient(model, context, batch, ranks, context_ranks);
  if (!std::isfinite(loss)) return "the loss is not finite";
  // The norm is summed in double, which no gradient in float overflows: it is finite if all gradients are.
  const double bound =
      run.train.clip > 0 ? run.train.clip : std::numeric_limits<double>::infinity();
  if (!std::isfinite(nn::clip_gradients<float>(model, bound))) return "the gradient is not finite";
  if (!run.optimiser.step_if_finite(context, model))
    return "the weights would not be finite after it";
  return nullptr;
}

// The loss of the first held-out rows, or of training rows if none are held out: enough to see
// whether the model gives possible numbers.
[[nodiscard]] double short_evaluation(Model& model, nn::Context<float>& context,
                                      const DataSource& data, Index batch) {
  const bool training = std::exchange(context.training, false);
  const Packing rows(data.validation_rows() > 0 ? data.validation_batch(0, batch)
                                                : data.training_batch(batch, context.seed, 0),
                     model.takes_packed());
  const Packed packed(context, rows);
  const double loss = model.loss(context, rows.batch, rows.inputs, rows.targets);
  context.training = training;
  return loss;
}

// The state of layers beside their weights. A memory learns in the forward pass of a step, and must
// forget it if the step is abandoned.
class LayerState {
 public:
  explicit LayerState(Model& model) : model_(model) {
    visit([&](heed::Param<float>& state) {
      kept_.emplace_back(state.data(), state.data() + state.size());
    });
  }
  void restore() const {
    auto from = kept_.begin();
    visit([&](heed::Param<float>& state) { std::ranges::copy(*from++, state.data()); });
  }

 private:
  template <class F>
  void visit(F&& f) const {
    model_.visit_state(
        nn::StateVisitor<float>([&](const std::string&, heed::Param<float>& state) { f(state); }));
  }
  Model& model_;
  std::vector<std::vector<float>> kept_;
};

// Prints a sentence at the first call, and nothing at later ones.
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

// Reports of the blocks on the tokens of the last pass, by name: means over the blocks that report it.
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

// Scores as JSON, with the bits of each number, since JSON cannot hold numbers that are not finite.
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

// The score of one batch of held-out rows, with sums over its answers in place of means.
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

// Gives each rank the scores of all batches; rank r of n has computed every nth from number r on.
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

// A run of training: steps, and the tasks that are due behind each.
class Training {
 public:
  Training(Run& run, const DataSource& data, int threads, const Watch& watch, Ranks& ranks,
           int context_ranks)
      : run_(run), data_(data), watch_(watch), ranks_(ranks), context_ranks_(context_ranks) {
    const TrainSettings& s = run.train;
    context_.threads = threads;
    context_.training = true;
    context_.seed = s.seed;
    context_.precision = *precision_of(s.precision);
    run.optimiser.decays = decays;
    run.optimiser.options.weight_decay = s.weight_decay;
    run.optimiser.options.beta2 = 0.99;
    run.model->set_ponder(s.ponder);
    if (run.model->scores_steps()) run.model->set_ponder_prior(s.ponder_prior);
    run.optimiser.prepare(*run.model);  // also the moments of a run whose steps were all skipped
    require_shareable(run, row_len(data), ranks, context_ranks);
    require_same_run(run, data.fingerprint(), ranks, context_ranks);
  }

  // Goes on to the last step or to a stop.
  void go_on() {
    for (bool stop = false; !stop && run_.step < run_.train.steps;) {
      std::optional<double> held_out;
      stop = !take_step() || !evaluate(held_out) || ranks_.any(watch_.stop && watch_.stop());
      save(stop, held_out);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  // Runs pass(). Returns false if it was abandoned because the run is to stop, on all ranks or on none.
  template <class Pass>
  [[nodiscard]] bool unless_stopped(bool may_stop, Pass&& pass) {
    if (may_stop && watch_.stop_now)
      context_.before_product = [this] {
        if (watch_.stop_now()) throw PassStopped();
      };
    bool done = true;
    try {
      pass();
    } catch (const PassStopped&) {
      done = false;
    }
    context_.before_product = {};
    return done;
  }

  // Returns false if the step was abandoned; nothing of it remains.
  [[nodiscard]] bool take_step() {
    const Clock::time_point start = Clock::now();
    const TrainSettings& s = run_.train;
    const Batch batch = data_.training_batch(s.batch, s.seed, std::uint64_t(run_.step));
    context_.step = std::uint64_t(run_.step);
    run_.optimiser.options.learning_rate = schedule_.at(run_.step);
    double loss = 0;
    const char* fault = nullptr;
    const LayerState before(*run_.model);
    if (!unless_stopped(context_ranks_ == 1, [&] {
          fault = step_fault(run_, context_, batch, loss, ranks_, context_ranks_);
        })) {
      before.restore();
      return false;
    }
    const Clock::time_point now = Clock::now();
    ++run_.step;
    faults_ = fault != nullptr ? faults_ + 1 : 0;
    if (fault != nullptr) {
      ++run_.skipped;
      say_skip_(place() + fault + "; the step is skipped, " + std::to_string(kMostFaults) +
                " of them in a row end training");
    }
    tokens_ += double(batch.tokens());
    const double seconds = std::chrono::duration<double>(now - start_).count();
    if (watch_.on_step)
      watch_.on_step(
          {run_.step, s.steps, loss, run_.optimiser.options.learning_rate, tokens_ / seconds,
           seconds / double(run_.step - first_) * double(s.steps - run_.step), batch.tokens(),
           std::chrono::duration<double>(now - start).count(), fault != nullptr});
    if (faults_ == kMostFaults)
      throw NotFinite(place() + std::to_string(faults_) +
                      " steps in a row met numbers that are not finite" + kAdvice);
    return true;
  }

  // Scores the model if that is due, and sets `held_out` if rows are held out. Returns false if it was abandoned.
  [[nodiscard]] bool evaluate(std::optional<double>& held_out) {
    if (!watch_.on_evaluation || !due(watch_.evaluate_every)) return true;
    return unless_stopped(true, [&] {
      const Score all = score(*run_.model, context_, data_, run_.train.batch, &ranks_);
      if (all.answers > 0) held_out = all.loss;
      watch_.on_evaluation(run_.step, all);
    });
  }

  void save(bool stop, std::optional<double> held_out) {
    const bool saves = watch_.on_save && (stop || due(watch_.save_every));
    if (saves && !held_out)
      held_out = short_evaluation(*run_.model, context_, data_, stop ? 1 : run_.train.batch);
    if (held_out && !is_possible_loss(*held_out)) {
      const std::string fault = place() + "the loss of held-out rows " + loss_fault(*held_out);
      if (stop || run_.step == run_.train.steps) throw NotFinite(fault + kAdvice);
      if (saves) say_unsaved_(fault + "; nothing is saved");
    } else if (saves) {
      require_same_run(run_, data_.fingerprint(), ranks_, context_ranks_);
      watch_.on_save();
      ranks_.meet();  // behind this, every rank knows that the run is saved
    }
  }

  // True every so many steps, and after the last.
  [[nodiscard]] bool due(Index every) const {
    return run_.step == run_.train.steps || (every > 0 && run_.step % every == 0);
  }
  [[nodiscard]] std::string place() const { return "step " + std::to_string(run_.step) + ": "; }

  Run& run_;
  const DataSource& data_;
  const Watch& watch_;
  Ranks& ranks_;
  const int context_ranks_;
  nn::Context<float> context_;
  const nn::WarmupCosine schedule_{run_.train.warmup, std::max(run_.train.steps, run_.train.warmup),
                                   run_.train.learning_rate, 0.1 * run_.train.learning_rate};
  const Clock::time_point start_ = Clock::now();
  const Index first_ = run_.step;
  double tokens_ = 0;
  Index faults_ = 0;  // skipped steps in a row
  Once say_skip_{watch_.on_fault}, say_unsaved_{watch_.on_fault};
};

}  // namespace

std::string loss_fault(double loss) {
  if (!std::isfinite(loss)) return "is not finite";
  char text[96];
  std::snprintf(text, sizeof text, "is %.4g nats per token, more than a sound model can have, %g",
                loss, kLargestLoss);
  return text;
}

Score score(Model& model, nn::Context<float>& context, const DataSource& data, Index batch,
            Ranks* ranks) {
  const bool training = std::exchange(context.training, false);
  const std::uint64_t step = context.step;
  std::vector<Score> parts(std::size_t((data.validation_rows() + batch - 1) / batch));
  const auto first = std::size_t(ranks ? ranks->rank() : 0),
             stride = std::size_t(ranks ? ranks->count() : 1);
  bool stopped = false;
  try {
    for (std::size_t n = first; n < parts.size(); n += stride)
      parts[n] = score_batch(model, context, data, Index(n) * batch, batch);
  } catch (const PassStopped&) {
    stopped = true;
  }
  context.training = training;
  context.step = step;
  if (ranks ? ranks->any(stopped) : stopped) throw PassStopped();
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
  Ranks alone;
  Training(run, data, threads, watch, shared_by ? *shared_by : alone, context_ranks).go_on();
}

}  // namespace heed_lm
