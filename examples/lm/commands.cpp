// SPDX-License-Identifier: Apache-2.0
#include "commands.hpp"

#include "bpe_tokenizer.hpp"
#include "run_report.hpp"

#include "../program/program.hpp"

#include <heed/compiled.hpp>
#include <heed/models/weights_file.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <optional>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed_program::as_usage;

std::atomic<bool> interrupted{false};

// While it lives, Ctrl-C asks training to stop; the second one ends the program.
class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = false;
    old_ = std::signal(SIGINT, [](int) {
      if (interrupted.exchange(true)) std::_Exit(130);
    });
  }
  ~InterruptGuard() { std::signal(SIGINT, old_); }
  InterruptGuard(const InterruptGuard&) = delete;

 private:
  void (*old_)(int);
};

[[nodiscard]] std::string duration(double seconds) {
  const long whole = std::lround(std::max(0.0, seconds));
  char text[32];
  std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
  return text;
}

// A line per validation; on a terminal one more that is drawn again ten times a second.
class TrainingLog {
 public:
  TrainingLog() = default;
  TrainingLog(const TrainingLog&) = delete;
  ~TrainingLog() { clear(); }

  void step(const Report& r) {
    last_ = r;
    const auto now = Clock::now();
    if (terminal_ && now - drawn_ >= std::chrono::milliseconds(100)) {
      std::fprintf(stderr, "\r\033[Kstep %td/%td  loss %.4f  %.0f tokens/s  %s left", r.step, r.steps,
                   r.loss, r.tokens_per_second, duration(r.seconds_left).c_str());
      std::fflush(stderr);
      drawn_ = now;
      dirty_ = true;
    }
  }
  void evaluation(Index step, double loss) {
    clear();
    std::printf("step %td  training %.4f  validation %.4f  %.0f tokens/s\n", step, last_.loss, loss,
                last_.tokens_per_second);
    std::fflush(stdout);
  }

 private:
  using Clock = std::chrono::steady_clock;
  void clear() {
    if (dirty_) std::fputs("\r\033[K", stderr);
    dirty_ = false;
  }
  bool terminal_ = heed_program::draws(STDERR_FILENO), dirty_ = false;
  Report last_;
  Clock::time_point drawn_;
};

// Nothing without --report.
[[nodiscard]] std::optional<RunReport> open_report(const TrainCommand& command) {
  if (command.report.empty()) return {};
  return as_usage([&] { return RunReport(command.report, "Training of a language model"); });
}

void describe(RunReport& report, const Run& run, const DataSource& data) {
  const ModelConfig& c = run.config;
  report.fact("model", c.variant + ", " + std::to_string(nn::count_weights<float>(*run.model)) +
                           " parameters");
  report.fact("shape", "width " + std::to_string(c.width) + ", heads " + std::to_string(c.heads) +
                           ", blocks " + std::to_string(c.depth) + ", tokens " + std::to_string(c.len));
  report.fact("training", "sequences per step " + std::to_string(run.train.batch) + ", seed " +
                              std::to_string(run.train.seed));
  report.fact("data", data.description());
}

// The run that the command starts or goes on with, and the data that fit its tokenizer.
struct Prepared {
  Run run;
  std::unique_ptr<DataSource> data;
};

[[nodiscard]] Prepared prepare(TrainCommand& command) {
  heed::require(command.resume.empty() || command.gpt2.empty(),
                "--resume and --gpt2 were given; it must be one of them");
  Prepared p;
  if (!command.resume.empty()) {
    p.run = load_run(command.resume);
    if (command.steps_given) p.run.train.steps = command.train.steps;
  } else if (!command.gpt2.empty()) {
    p.run = run_from_gpt2(command.gpt2, command.model, make_tokenizer(command.data));
    p.run.train = command.train;
  } else {
    p.run.tokenizer = make_tokenizer(command.data);
    p.run.config = command.model;
    p.run.config.vocabulary = p.run.tokenizer->vocab_size();
    p.run.config.len = command.data.len;
    p.run.train = command.train;
    p.run.model = std::make_unique<Model>(make_model(p.run.config));
  }
  command.data.len = std::min(command.data.len, p.run.config.len);
  p.data = open_data(command.data, *p.run.tokenizer);
  heed::require(command.resume.empty() || p.run.data == p.data->fingerprint(), command.resume,
                ": it was trained on other data than this, or another part was held out");
  heed::require(p.run.step < p.run.train.steps, command.resume, ": step ", p.run.step, " of ",
                p.run.train.steps, " is done; --steps must be more to go on");
  p.run.data = p.data->fingerprint();
  return p;
}

// A model's config and tokenizer, from a checkpoint or from a GPT-2 with its vocabulary.
[[nodiscard]] Run open_run(const std::string& checkpoint, const std::string& vocab,
                           const std::string& merges) {
  if (!is_gpt2_file(checkpoint)) return load_run(checkpoint);
  heed::require(!vocab.empty() && !merges.empty(), checkpoint,
                ": a GPT-2 of Hugging Face needs --vocab and --merges");
  return run_from_gpt2(checkpoint, {}, read_bpe_tokenizer(vocab, merges));
}

// Files of GPT-2 may have masks beside the weights, and the embedding once more as the head.
[[nodiscard]] bool is_parameter(const std::string& name, const std::optional<nn::GptOptions>& gpt2) {
  if (!gpt2) return !name.starts_with("adamw.");
  return !name.ends_with(".attn.bias") && !name.ends_with(".attn.masked_bias") &&
         !(gpt2->tied && name == "lm_head.weight");
}

// What the attention layers say of the last rows they saw: steps, tension, residual, ...
void print_reports(Model& model) {
  Index number = 0;
  for (auto& block : model.blocks()) {
    std::string line;
    char part[64];
    for (const auto& [name, mean] : block.attention().diagnostics()) {
      std::snprintf(part, sizeof part, "  %s %.4g", name.c_str(), mean);
      line += part;
    }
    if (!line.empty()) std::printf("block %td%s\n", number, line.c_str());
    ++number;
  }
}

}  // namespace

int run_train(TrainCommand command) {
  const bool known = std::ranges::count(model_names(), command.model.variant) > 0;
  heed::require(known, "--variant is ", command.model.variant, "; --help lists the variants");
  if (command.out.empty()) command.out = command.resume;
  Prepared p = as_usage([&] { return prepare(command); });
  Run& run = p.run;
  if (!command.out.empty()) heed_program::require_output("--out", command.out);
  std::optional<RunReport> report = open_report(command);
  if (report) describe(*report, run, *p.data);
  std::printf("%s, %td parameters; %s\n", run.config.variant.c_str(), nn::count_weights<float>(*run.model),
              p.data->description().c_str());
  std::fflush(stdout);
  const InterruptGuard guard;
  TrainingLog log;
  Watch watch;
  watch.evaluate_every = command.evaluate_every;
  watch.save_every = command.save_every;
  watch.on_step = [&](const Report& r) {
    log.step(r);
    if (report) report->step(r);
  };
  watch.on_evaluation = [&](Index step, double loss) {
    log.evaluation(step, loss);
    if (!report) return;
    report->evaluation(step, loss);
    report->write();
  };
  watch.stop = [] { return interrupted.load(); };
  if (!command.out.empty()) watch.on_save = [&] { save_run(run, command.out); };
  train(run, *p.data, command.threads, watch);
  if (report) report->write();
  if (interrupted && run.step < run.train.steps)
    std::printf("stopped after step %td of %td%s\n", run.step, run.train.steps,
                command.out.empty() ? "; nothing was saved" : ("; --resume " + command.out +
                                                               " goes on from here").c_str());
  return report && report->failed() ? 1 : 0;
}

int run_eval(const EvalCommand& command) {
  const Run run =
      as_usage([&] { return open_run(command.checkpoint, command.data.vocab, command.data.merges); });
  DataSettings settings = command.data;
  settings.len = run.config.len;
  const auto data = as_usage([&] { return open_data(settings, *run.tokenizer); });
  nn::Context<float> context;
  context.threads = command.threads;
  const double loss = evaluate(*run.model, context, *data, command.batch);
  std::printf("%s\nvalidation %.4f nats per token, perplexity %.2f\n", data->description().c_str(), loss,
              std::exp(loss));
  if (run.data != 0 && run.data != data->fingerprint())
    std::puts("not the data that it was trained on, or another part of it was held out");
  print_reports(*run.model);
  return 0;
}

int run_generate(const GenerateCommand& command) {
  require_sampling(command.sampling);
  const Run run = as_usage([&] { return open_run(command.checkpoint, command.vocab, command.merges); });
  Sampling sampling = command.sampling;
  sampling.window = run.config.len;
  const std::vector<Index> prompt = run.tokenizer->encode(command.prompt);
  heed::require(!prompt.empty(), "--prompt is \"\", it must hold a token at least");
  nn::Context<float> context;
  context.threads = command.threads;
  StreamDecoder decoder(*run.tokenizer);
  const auto say = [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  (void)say(command.prompt);
  generate(*run.model, context, prompt, command.tokens, sampling, [&](Index id) {
    if (id == run.tokenizer->end_of_text()) return false;
    return say(decoder.push(id));
  });
  (void)say(decoder.finish() + "\n");
  return 0;
}

int run_info(const std::string& path) {
  using heed::printable;
  const auto file = as_usage([&] { return heed::io::SafetensorsIndex::read(path); });
  for (const auto& [key, value] : file.metadata())
    std::printf("%s: %s%s\n", printable(key).c_str(), printable(value.substr(0, 300)).c_str(),
                value.size() > 300 ? " ..." : "");
  std::optional<nn::GptOptions> gpt2;
  if (nn::Gpt2File::is_gpt2(file)) gpt2 = as_usage([&] { return nn::Gpt2File(path).options(); });
  Index total = 0;
  for (const auto& [name, info] : file.tensors()) {
    if (is_parameter(name, gpt2))
      total += Index((info.end - info.begin) / heed::io::dtype_width(info.dtype));
    std::printf("%-4s %-44s %s\n", info.dtype.c_str(), printable(name).c_str(),
                nn::detail::shape_text(info.shape).c_str());
  }
  std::printf("%td parameters\n", total);
  if (gpt2)
    std::printf("GPT-2: vocabulary %td, width %td, heads %td, depth %td, positions %td\n", gpt2->vocabulary,
                gpt2->width, gpt2->heads, gpt2->depth, gpt2->max_len);
  return 0;
}

}  // namespace heed_lm
