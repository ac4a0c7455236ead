// SPDX-License-Identifier: Apache-2.0
#include "resume.hpp"

#include "bpe_tokenizer.hpp"
#include "finite.hpp"
#include "json_fields.hpp"

#include "../program/program.hpp"

#include <heed/core/error.hpp>

namespace heed_lm {

namespace {

// Compares the options that were given with what a file holds.
class Comparison {
 public:
  Comparison(const TrainCommand& command, const std::string& file, const char* has)
      : command_(command), file_(file), has_(has) {}

  [[nodiscard]] bool given(const char* option) const { return command_.given.contains(option); }
  template <class Value>
  void same(const char* option, const Value& asked, const Value& stored) const {
    heed::require(!given(option) || asked == stored, option, " is ", asked, ", ", file_, has_,
                  stored);
  }
  void flag(const char* option, bool asked, const char* stored) const {
    heed::require(!given(option) || asked, option, " was given, ", file_, has_, stored);
  }

 private:
  const TrainCommand& command_;
  const std::string& file_;
  const char* has_;
};

// Width inside the MLP, with the default of 0 replaced by its meaning.
[[nodiscard]] Index hidden_width(Index hidden, const ModelConfig& config) {
  return hidden > 0 ? hidden : (config.variant == kDialecticalLm ? 2 : 4) * config.width;
}

void same_sizes(const Comparison& is, const ModelConfig& asked, const ModelConfig& stored) {
  is.same("--width", asked.width, stored.width);
  is.same("--heads", asked.heads, stored.heads);
  is.same("--depth", asked.depth, stored.depth);
  is.same("--hidden", hidden_width(asked.hidden, stored), hidden_width(stored.hidden, stored));
  is.flag("--untied", !stored.tied, "the embedding as its head");
}

void same_tokenizer(const TrainCommand& command, const Comparison& is, const Tokenizer& stored) {
  const DataSettings& data = command.data;
  is.same("--tokenizer", data.tokenizer, stored.name());
  if (data.vocab.empty() && data.merges.empty()) return;
  heed::require(stored.name() == "gpt2", data.vocab.empty() ? "--merges" : "--vocab",
                " was given, ", command.resume, " was trained with the tokenizer ", stored.name());
  heed::require(!data.vocab.empty() && !data.merges.empty(), "--vocab and --merges go together; ",
                data.vocab.empty() ? "--vocab" : "--merges", " is missing");
  heed::require(read_bpe_tokenizer(data.vocab, data.merges)->state() == stored.state(), "--vocab ",
                data.vocab, " and --merges ", data.merges, " are not what ", command.resume,
                " was trained with");
}

}  // namespace

void require_same_settings(const TrainCommand& command, const Run& run) {
  const ModelConfig &model = command.model, &stored = run.config;
  if (!command.gpt2.empty()) {
    const Comparison is(command, command.gpt2, " has ");
    is.flag("--init", false, "weights of its own");
    same_sizes(is, model, stored);
    heed::require(!is.given("--len") || command.data.len <= stored.len, "--len is ",
                  command.data.len, ", ", command.gpt2, " has ", stored.len, " positions");
  }
  if (command.resume.empty()) return;
  const Comparison is(command, command.resume, " was trained with ");
  const TrainSettings &train = command.train, &before = run.train;
  is.same("--variant", model.variant, stored.variant);
  same_sizes(is, model, stored);
  is.same("--len", command.data.len, before.len > 0 ? before.len : stored.len);
  is.same("--dropout", model.dropout, stored.dropout);
  is.same("--attention-dropout", model.attention_dropout, stored.attention_dropout);
  is.same("--init", model.init, stored.init);
  is.flag("--no-mask", !stored.causal, "its mask");
  is.same("--batch", train.batch, before.batch);
  is.same("--warmup", train.warmup, before.warmup);
  is.same("--lr", train.learning_rate, before.learning_rate);
  is.same("--weight-decay", train.weight_decay, before.weight_decay);
  is.same("--clip", train.clip, before.clip);
  is.same("--ponder", train.ponder, before.ponder);
  is.same("--ponder-prior", train.ponder_prior, before.ponder_prior);
  is.same("--seed", train.seed, before.seed);
  is.same("--precision", train.precision, before.precision);
  same_tokenizer(command, is, *run.tokenizer);
}

bool goes_on(const std::string& file, Run& run) {
  Run held;
  try {
    held = load_run(file);
    require_finite(held, file);
  } catch (const std::exception&) {
    return false;  // no checkpoint, or a damaged one
  }
  held.train.steps = run.train.steps;
  if (json_of(held.config) != json_of(run.config) || json_of(held.train) != json_of(run.train) ||
      held.tokenizer->state() != run.tokenizer->state() || held.data != run.data)
    return false;
  run = std::move(held);
  return true;
}

std::string resuming_command(const TrainCommand& command) {
  std::string line = heed_program::shell_word(command.program) + " train";
  const auto add = [&](const std::string& option, const std::string& value) {
    // A value that begins with a dash would be read as an option.
    line += " " + option + (value.starts_with("-") ? "=" : " ") + heed_program::shell_word(value);
  };
  add("--resume", command.out);
  // Settings that the checkpoint has, --steps and --seed among them, are left out.
  for (const char* option :
       {"--text", "--instructions", "--task", "--end-of-text", "--held-out", "--report",
        "--eval-every", "--save-every", "--threads", "--context-ranks", "--rank-timeout"})
    if (const auto found = command.given.find(option); found != command.given.end())
      add(option, found->second);
  return line;
}

}  // namespace heed_lm
