// SPDX-License-Identifier: Apache-2.0
#include "commands.hpp"

#include "finite.hpp"
#include "json_fields.hpp"
#include "open_model.hpp"
#include "resume.hpp"
#include "run_memory.hpp"
#include "run_report.hpp"
#include "shared_batch.hpp"

#include "../program/file_lock.hpp"
#include "../program/program.hpp"
#include "../program/progress.hpp"
#include "../tasks/task_list.hpp"

#include <heed/compiled.hpp>
#include <heed/models/attention_by_name.hpp>
#include <heed/models/weights_file.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <utility>

namespace heed_lm {

namespace {

namespace nn = heed::nn;
using heed_program::as_usage;

std::atomic<bool> interrupted{false};

// While this object lives, Ctrl-C, SIGTERM and SIGHUP ask training to stop, and a Ctrl-C after that ends the program.
// SIGTERM and SIGHUP never end it at once: both come together when a session ends. A SIGHUP that was ignored before,
// as nohup does, stays ignored.
class InterruptGuard {
 public:
  InterruptGuard() {
    interrupted = false;
    for (std::size_t i = 0; i < std::size(kSignals); ++i) {
      old_[i] = std::signal(kSignals[i], [](int number) {
        if (interrupted.exchange(true) && number == SIGINT) std::_Exit(128 + SIGINT);
      });
      if (kSignals[i] == SIGHUP && old_[i] == SIG_IGN) std::signal(SIGHUP, SIG_IGN);
    }
  }
  ~InterruptGuard() {
    for (std::size_t i = 0; i < std::size(kSignals); ++i) std::signal(kSignals[i], old_[i]);
  }
  InterruptGuard(const InterruptGuard&) = delete;

 private:
  static constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
  void (*old_[std::size(kSignals)])(int);
};

[[nodiscard]] std::string duration(double seconds) {
  const long whole = std::lround(std::max(0.0, seconds));
  char text[32];
  std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", whole / 3600, whole / 60 % 60, whole % 60);
  return text;
}

// The accuracy of answers; empty for data whose every token counts.
[[nodiscard]] std::string accuracy_text(const Score& score) {
  if (score.by_difficulty.empty()) return "";
  char text[32];
  std::snprintf(text, sizeof text, "  accuracy %.1f %%", 100 * score.accuracy);
  return text;
}

// Prints a line per validation; on a terminal also a line of progress.
class TrainingLog {
 public:
  void step(const Report& r) {
    last_ = r;
    if (r.skipped) ++skipped_;
    char line[200];
    std::snprintf(line, sizeof line, "step %td/%td  loss %s  %.0f tokens/s  %s left", r.step,
                  r.steps, loss_text(r.loss).c_str(), r.tokens_per_second,
                  duration(r.seconds_left).c_str());
    progress_.show(line);
  }
  void evaluation(Index step, const Score& held_out) {
    progress_.clear();
    const std::string validation =
        held_out.answers > 0 ? "  validation " + loss_text(held_out.loss) + accuracy_text(held_out)
                             : "";
    std::printf("step %td  training %s%s  %.0f tokens/s\n", step, loss_text(last_.loss).c_str(),
                validation.c_str(), last_.tokens_per_second);
    std::fflush(stdout);
  }
  void fault(const std::string& text) {
    progress_.clear();
    std::fprintf(stderr, "heed_lm: %s\n", text.c_str());
  }
  // Says at the end of a run how many of its steps were skipped.
  void skipped_steps() {
    if (skipped_ > 1) fault(std::to_string(skipped_) + " steps were skipped in all");
  }

 private:
  heed_program::Progress progress_;
  Index skipped_ = 0;
  Report last_;
};

// The page of --report, if the option is given.
[[nodiscard]] std::optional<RunReport> open_report(const TrainCommand& command) {
  if (command.report.empty()) return {};
  return as_usage([&] { return RunReport(command.report, "Training of a language model"); });
}

void describe(RunReport& report, const Run& run, const DataSource& data) {
  const ModelConfig& c = run.config;
  report.fact("model", c.variant + ", " + std::to_string(nn::count_weights<float>(*run.model)) +
                           " parameters");
  report.fact("shape", "width " + std::to_string(c.width) + ", heads " + std::to_string(c.heads) +
                           ", blocks " + std::to_string(c.depth) + ", tokens " +
                           std::to_string(c.len));
  report.fact("training", "sequences per step " + std::to_string(run.train.batch) + ", seed " +
                              std::to_string(run.train.seed));
  report.fact("data", data.description());
}

// Throws UsageError unless all outputs can be written, and none of them replaces an input.
void require_outputs(const TrainCommand& command) {
  const DataSettings& d = command.data;
  std::vector<heed_program::NamedFile> files = {{"--text", d.text},
                                                {"--instructions", d.instructions},
                                                {"--vocab", d.vocab},
                                                {"--merges", d.merges},
                                                {"--gpt2", command.gpt2}};
  // Without --out the run is saved where it was resumed from.
  const heed_program::NamedFile out{
      command.out == command.resume && !command.given.contains("--out") ? "--resume" : "--out",
      command.out};
  heed_program::require_apart(out, files);
  if (!out.path.empty()) heed_program::require_output(out.option, out.path);
  if (out.path != command.resume) files.push_back({"--resume", command.resume});
  files.push_back(out);
  heed_program::require_pages_apart({"--report", command.report}, files);
}

// Two runs that save into one file would undo each other's work.
void take_alone(heed_program::FileLock& lock, const std::string& out) {
  as_usage([&] {
    if (!lock.try_alone())
      throw heed_program::UsageError("--out " + out + ": another run writes it, " + lock.holder());
    return 0;
  });
}

// The run that the command starts or continues, and its data in tokens.
struct Prepared {
  Run run;
  std::unique_ptr<DataSource> data;
};

[[nodiscard]] Prepared resumed(TrainCommand& command, const heed_program::Ranks& ranks) {
  Prepared p{load_run(command.resume), nullptr};
  require_finite(p.run, command.resume);
  require_same_settings(command, p.run);
  const Index before =
      std::exchange(p.run.train.steps,
                    command.given.contains("--steps") ? command.train.steps : p.run.train.steps);
  command.data.seed = p.run.train.seed;
  command.data.len = p.run.train.len > 0 ? p.run.train.len : p.run.config.len;
  p.data = open_data(command.data, *p.run.tokenizer);
  heed::require(p.run.data == p.data->fingerprint(), command.resume,
                ": the run was trained on other data than these, or with another part held out");
  heed::require(p.run.step < p.run.train.steps, command.resume, ": step ", p.run.step, " of ",
                before, " is done; --steps is ", p.run.train.steps, ", it must be more than ",
                p.run.step, " to go on");
  require_memory(command, p.run, ranks);
  return p;
}

[[nodiscard]] Prepared from_gpt2(TrainCommand& command, const heed_program::Ranks& ranks) {
  Prepared p{run_from_gpt2(command.gpt2, command.model, make_tokenizer(command.data)), nullptr};
  require_finite(p.run, command.gpt2);
  require_same_settings(command, p.run);
  p.run.train = command.train;
  command.data.len = p.run.train.len = std::min(command.data.len, p.run.config.len);
  p.data = open_data(command.data, *p.run.tokenizer);
  require_memory(command, p.run, ranks);
  return p;
}

// A new run, or the run in the file of --out if that is the same.
[[nodiscard]] Prepared begun(TrainCommand& command, const heed_program::Ranks& ranks) {
  Prepared p;
  p.run.tokenizer = make_tokenizer(command.data);
  if (!command.given.contains("--len")) command.data.len = task_len(command.data);
  p.run.config = command.model;
  p.run.config.vocabulary = p.run.tokenizer->vocab_size();
  p.run.config.len = command.data.len;
  p.run.train = command.train;
  require_usable(p.run.config, Naming::options);
  require_memory(command, p.run, ranks);
  p.data = open_data(command.data, *p.run.tokenizer);
  p.run.data = p.data->fingerprint();
  if (std::filesystem::exists(command.out) && !command.overwrite && goes_on(command.out, p.run)) {
    heed::require(p.run.step < p.run.train.steps, "--out ", command.out, ": step ", p.run.step,
                  " of this run is done, --steps is ", p.run.train.steps,
                  "; more of them go on, --overwrite begins anew");
    if (ranks.first())
      std::fprintf(stderr, "heed_lm: %s holds step %td of this run, which goes on from there\n",
                   heed::printable(command.out).c_str(), p.run.step);
    command.resume = command.out;
    return p;
  }
  p.run.model = within_memory(command, p.run, ranks, [&] {
    return std::make_unique<Model>(make_model(p.run.config, Naming::options));
  });
  return p;
}

[[nodiscard]] Prepared prepare(TrainCommand& command, const heed_program::Ranks& ranks) {
  Prepared p = !command.resume.empty() ? resumed(command, ranks)
               : !command.gpt2.empty() ? from_gpt2(command, ranks)
                                       : begun(command, ranks);
  Run& run = p.run;
  heed::require(run.train.ponder == 0 || run.model->counts_steps(), "--ponder is ",
                run.train.ponder, ", ", run.config.variant, " counts no steps; it must be 0");
  heed::require(!command.given.contains("--ponder-prior") || run.model->scores_steps(),
                "--ponder-prior is ", run.train.ponder_prior, ", ", run.config.variant,
                " has no prior, which ", nn::kDialecticalPonderNet, " alone has");
  run.data = p.data->fingerprint();
  heed::require(command.overwrite || !std::filesystem::exists(command.out) ||
                    heed_program::same_file(command.out, command.resume),
                "--out ", command.out,
                ": the file is there, and is no checkpoint of this run; --overwrite replaces it");
  return p;
}

// A value of the metadata as info shows it: the settings of a checkpoint without those that its
// variant does not read. Values of other or damaged files are shown unchanged.
[[nodiscard]] std::string shown(const heed::io::SafetensorsIndex& file, const std::string& key) {
  const std::string& value = file.metadata().at(key);
  if (key != "model" && key != "training") return value;
  try {
    nlohmann::json settings = nlohmann::json::parse(value);
    for (const std::string& name :
         idle_settings(from_json<ModelConfig>(file.metadata().at("model"), "model")))
      settings.erase(name);
    return settings.dump();
  } catch (const std::exception&) {
    return value;
  }
}

// Files of GPT-2 may have masks beside the weights, and the embedding a second time as the head.
[[nodiscard]] bool is_parameter(const std::string& name,
                                const std::optional<nn::GptOptions>& gpt2) {
  if (!gpt2) return !name.starts_with("adamw.");
  return !name.ends_with(".attn.bias") && !name.ends_with(".attn.masked_bias") &&
         !(gpt2->tied && name.ends_with("lm_head.weight"));
}

// Prints the reports of each attention layer on the last rows that it saw: steps, tension, residual, ...
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

// The number of processes that train together, as the end of a line; empty for one process.
[[nodiscard]] std::string ranks_text(int count, int context_ranks) {
  if (count == 1) return "";
  return "; " + std::to_string(count) + " ranks" +
         (context_ranks > 1 ? ", each sequence on " + std::to_string(context_ranks) : "");
}

// The contents of the file of a run that was cut off, as the end of a sentence. The file holds a
// whole checkpoint, or was not touched.
[[nodiscard]] std::string left_behind(const std::string& out) {
  if (out.empty()) return "nothing was saved";
  try {
    const auto file = heed::io::SafetensorsIndex::read(out);
    return out + " holds step " + file.metadata().at("step");
  } catch (const std::exception&) {
    return out + " was not written";
  }
}

}  // namespace

int run_train(TrainCommand command, heed_program::Ranks& ranks) {
  if (command.data.task == "help") return std::fputs(tasks::help_text().c_str(), stdout) < 0;
  ranks.timeout = command.rank_timeout;
  require_variant(command.model.variant, Naming::options);
  heed::require(precision_of(command.train.precision).has_value(), "--precision is ",
                heed::io::in_quotes(command.train.precision), ", it must be ", kFloat, " or ",
                kMixed);
  heed::require(command.resume.empty() || command.gpt2.empty(),
                "--resume and --gpt2 were given, it must be one of them");
  if (command.out.empty()) command.out = command.resume;
  const int context_ranks = int(command.context_ranks);
  std::optional<heed_program::FileLock> lock;  // for the checkpoint, while the run may write it
  if (ranks.first()) {
    require_outputs(command);
    if (!command.out.empty()) take_alone(lock.emplace(command.out + ".lock"), command.out);
  }
  ranks.meet();  // no rank begins if another one finds fault with the options
  Prepared p = as_usage([&] { return prepare(command, ranks); });
  Run& run = p.run;
  require_shareable(run, row_len(*p.data), ranks, context_ranks);
  std::optional<RunReport> report;
  if (ranks.first()) report = open_report(command);
  if (report) describe(*report, run, *p.data);
  const InterruptGuard guard;
  std::printf("%s, %td parameters; %s%s\n", run.config.variant.c_str(),
              nn::count_weights<float>(*run.model), p.data->description().c_str(),
              ranks_text(ranks.count(), context_ranks).c_str());
  std::fflush(stdout);
  // A run that leaves files continues when nobody reads its output any more; main() reports the lost output at the end.
  if (!command.out.empty() || report) std::signal(SIGPIPE, SIG_IGN);
  TrainingLog log;
  Index saved = -1;  // step of the last checkpoint
  Watch watch;
  watch.evaluate_every = command.evaluate_every;
  watch.save_every = command.save_every;
  watch.on_step = [&](const Report& r) {
    if (!ranks.first()) return;
    log.step(r);
    if (report) report->step(r);
  };
  watch.on_evaluation = [&](Index step, const Score& held_out) {
    log.evaluation(step, held_out);
    if (!report) return;
    if (held_out.answers > 0) report->evaluation(step, held_out.loss);
    report->write();
  };
  watch.on_fault = [&](const std::string& text) {
    if (ranks.first()) log.fault(text);
  };
  watch.stop = watch.stop_now = [] { return interrupted.load(); };
  if (!command.out.empty())
    watch.on_save = [&] {
      if (ranks.first()) save_run(run, command.out);
      saved = run.step;
    };
  try {
    within_memory(command, run, ranks,
                  [&] { train(run, *p.data, command.threads, watch, &ranks, context_ranks); });
  } catch (const heed_program::LostRank& error) {
    throw heed_program::LostRank(error.what() + ("; " + left_behind(command.out)));
  } catch (const NotFinite& error) {
    if (report) report->write();
    const std::string file = saved >= 0 ? command.out + " holds step " + std::to_string(saved)
                             : command.out.empty() || command.out != command.resume
                                 ? "nothing was saved"
                                 : command.out + " is as it was";
    throw NotFinite(error.what() + ("; " + file));
  }
  if (ranks.first()) log.skipped_steps();
  if (report) report->write();
  if (run.step < run.train.steps) {  // a signal came, to this rank or to another one
    std::printf("stopped after step %td of %td; ", run.step, run.train.steps);
    if (command.out.empty())
      std::puts("nothing was saved");
    else
      std::printf("--resume %s goes on from here:\n%s\n",
                  heed_program::shell_word(command.out).c_str(), resuming_command(command).c_str());
  }
  return report && report->failed() ? 1 : 0;
}

int run_eval(const EvalCommand& command) {
  const Run run = as_usage(
      [&] { return open_run(command.checkpoint, command.data.vocab, command.data.merges); });
  DataSettings settings = command.data;
  settings.len = run.config.len;
  heed::require(settings.tokenizer.empty() || settings.tokenizer == run.tokenizer->name(),
                "--tokenizer is ", settings.tokenizer, ", ", command.checkpoint, " has ",
                run.tokenizer->name());
  const auto data = as_usage([&] { return open_data(settings, *run.tokenizer); });
  heed::require(data->validation_rows() > 0,
                "--held-out is 0, which leaves nothing to compute a loss on; it must be above 0");
  require_memory(command, run, *data);
  nn::Context<float> context;
  context.threads = command.threads;
  const Score held_out = score(*run.model, context, *data, command.batch);
  const double loss = held_out.loss;
  if (!is_possible_loss(loss))
    throw std::runtime_error(command.checkpoint + ": the loss " + loss_fault(loss));
  std::printf("%s\nvalidation %.4f nats per token, perplexity %.2f%s\n",
              data->description().c_str(), loss, std::exp(loss), accuracy_text(held_out).c_str());
  if (run.data != 0 && run.data != data->fingerprint())
    std::puts("not the data that it was trained on, or another part of it was held out");
  print_reports(*run.model);
  return 0;
}

int run_generate(const GenerateCommand& command) {
  require_sampling(command.sampling);
  const Run run =
      as_usage([&] { return open_run(command.checkpoint, command.vocab, command.merges); });
  Sampling sampling = command.sampling;
  sampling.window = run.config.len;
  sampling.vocabulary = run.tokenizer->vocab_size();
  const std::optional<Index> end = run.tokenizer->end_of_text();
  heed::require(!command.stop_at_end || end, "--stop-at-end was given, the tokenizer ",
                run.tokenizer->name(), " has no token for the end of a text");
  heed::require(command.prompt || command.end_of_text.empty(), "--end-of-text is ",
                command.end_of_text, ", without --prompt there is no text");
  const std::vector<Index> prompt =
      command.prompt ? encode_prompt(*run.tokenizer, *command.prompt, command.end_of_text)
                     : std::vector<Index>{text_start(*run.tokenizer)};
  const Index context_len = longest_context(*run.model, sampling);
  if (Index(prompt.size()) > context_len)
    std::fprintf(stderr, "heed_lm: --prompt has %zu tokens, the model reads its last %td\n",
                 prompt.size(), context_len);
  nn::Context<float> context;
  context.threads = command.threads;
  StreamDecoder decoder(*run.tokenizer);
  const auto say = [](const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    return std::fflush(stdout) == 0;
  };
  if (prompt != std::vector<Index>{end.value_or(-1)}) (void)say(run.tokenizer->decode(prompt));
  generate(*run.model, context, prompt, command.tokens, sampling, [&](Index id) {
    if (command.stop_at_end && id == end) return false;
    return say(decoder.push(id));
  });
  (void)say(decoder.finish() + "\n");
  return 0;
}

int run_info(const std::string& path) {
  using heed::printable;
  const auto file = as_usage([&] { return heed::io::SafetensorsIndex::read(path); });
  for (const auto& entry : file.metadata()) {
    const std::string value = shown(file, entry.first);
    std::printf("%s: %s%s\n", printable(entry.first).c_str(),
                printable(value.substr(0, 300)).c_str(), value.size() > 300 ? " ..." : "");
  }
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
    std::printf("GPT-2: vocabulary %td, width %td, heads %td, depth %td, positions %td\n",
                gpt2->vocabulary, gpt2->width, gpt2->heads, gpt2->depth, gpt2->max_len);
  return 0;
}

}  // namespace heed_lm
