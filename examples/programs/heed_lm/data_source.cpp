// SPDX-License-Identifier: Apache-2.0
#include "data_source.hpp"

#include "../tasks/parens.hpp"
#include "../tasks/task_list.hpp"
#include "bpe_tokenizer.hpp"
#include "instructions.hpp"
#include "text_data.hpp"
#include "text_file.hpp"

#include <heed/core/error.hpp>
#include <heed/io/safetensors_types.hpp>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace heed_lm {

namespace {

// The FNV-1a hash of whole numbers.
[[nodiscard]] std::uint64_t hash_of(std::span<const Index> numbers) {
  std::uint64_t hash = 0xCBF29CE484222325u;
  for (const Index n : numbers) hash = (hash ^ std::uint64_t(n)) * 0x100000001B3u;
  return hash;
}

class TextSource final : public DataSource {
 public:
  TextSource(std::vector<Index> tokens, const DataSettings& settings)
      : fingerprint_(hash_of(tokens)), data_(std::move(tokens), settings.len, settings.held_out) {
    fingerprint_ = fingerprint_ * 31 + std::uint64_t(data_.training_tokens());
  }
  [[nodiscard]] Batch training_batch(Index rows, std::uint64_t seed,
                                     std::uint64_t step) const override {
    return data_.training_batch(rows, seed, step);
  }
  [[nodiscard]] Index validation_rows() const override { return data_.validation_windows(); }
  [[nodiscard]] Batch validation_batch(Index first, Index rows) const override {
    return data_.validation_batch(first, rows);
  }
  [[nodiscard]] std::string description() const override {
    std::ostringstream out;
    out << data_.training_tokens() << " tokens for training, " << data_.validation_tokens()
        << " held out";
    return out.str();
  }
  [[nodiscard]] std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  std::uint64_t fingerprint_;
  TextData data_;
};

// Instructions of a file: the last examples are held out, the others are taken in a new order each epoch.
class InstructionSource final : public DataSource {
 public:
  InstructionSource(const std::vector<Instruction>& examples, const Tokenizer& tokenizer,
                    const DataSettings& settings)
      : data_(examples, tokenizer, settings.len,
              end_of_text_named(settings.end_of_text, tokenizer)) {
    const bool holds_out = settings.held_out > 0;
    const Index held =
        holds_out
            ? std::max<Index>(1, Index(std::llround(settings.held_out * double(data_.count()))))
            : 0;
    training_ = data_.count() - held;
    heed::require(!holds_out || data_.count() >= 2, "--instructions ", settings.instructions,
                  ": the file has 1 example, it must have at least 2, one of them held out");
    heed::require(training_ > 0, "--held-out is ", settings.held_out, ", which holds out all ",
                  data_.count(), " examples of --instructions ", settings.instructions,
                  "; at least one must be left");
    fingerprint_ = std::uint64_t(training_);
    for (Index i = 0; i < data_.count(); ++i) {
      const Index one[] = {i};
      const Batch batch = data_.batch(one);
      fingerprint_ = fingerprint_ * 31 + hash_of(batch.inputs);
    }
  }
  [[nodiscard]] Batch training_batch(Index rows, std::uint64_t seed,
                                     std::uint64_t step) const override {
    const std::uint64_t count = std::uint64_t(training_), first = step * std::uint64_t(rows);
    std::vector<Index> chosen, order;
    for (std::uint64_t number = first; number < first + std::uint64_t(rows); ++number) {
      if (order.empty() || number % count == 0)
        order = example_order(training_, seed, number / count);
      chosen.push_back(order[std::size_t(number % count)]);
    }
    return data_.batch(chosen);
  }
  [[nodiscard]] Index validation_rows() const override { return data_.count() - training_; }
  [[nodiscard]] Batch validation_batch(Index first, Index rows) const override {
    std::vector<Index> chosen;
    for (Index r = first; r < std::min(first + rows, validation_rows()); ++r)
      chosen.push_back(training_ + r);
    return data_.batch(chosen);
  }
  [[nodiscard]] std::string description() const override {
    std::ostringstream out;
    out << training_ << " examples for training, " << validation_rows() << " held out, "
        << data_.cut_count() << " cut";
    return out.str();
  }
  [[nodiscard]] std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  InstructionData data_;
  Index training_ = 0;
  std::uint64_t fingerprint_ = 0;
};

// Sequences of a task: training draws new ones at every step.
class TaskSource final : public DataSource {
 public:
  TaskSource(std::shared_ptr<const tasks::Task> task, std::uint64_t seed, tasks::Split split)
      : task_(std::move(task)), seed_(seed), split_(split) {}
  [[nodiscard]] Batch training_batch(Index rows, std::uint64_t seed,
                                     std::uint64_t step) const override {
    return batch_of({seed, tasks::Split::training, step * std::uint64_t(rows)}, rows);
  }
  [[nodiscard]] Index validation_rows() const override { return kTaskRows; }
  [[nodiscard]] Batch validation_batch(Index first, Index rows) const override {
    return batch_of({seed_, split_, std::uint64_t(first)}, std::min(rows, kTaskRows - first));
  }
  [[nodiscard]] std::string description() const override { return "task " + task_->spec(); }
  [[nodiscard]] std::uint64_t fingerprint() const override {
    const std::string spec = task_->spec();
    std::vector<Index> numbers(spec.begin(), spec.end());
    numbers.push_back(Index(seed_));
    return hash_of(numbers);
  }
  [[nodiscard]] std::optional<Index> bottleneck() const override { return task_->bottleneck(); }

 private:
  static_assert(tasks::kNoAnswer == kNoTarget);

  [[nodiscard]] Batch batch_of(const tasks::Place& place, Index rows) const {
    tasks::Batch drawn = task_->batch(place, rows);
    Batch batch(rows, drawn.len, 0);
    batch.inputs = std::move(drawn.inputs);
    batch.targets = std::move(drawn.targets);
    batch.difficulties.assign(batch.targets.size(), 0);
    batch.sources.ranges.resize(batch.targets.size());
    batch.noise.ranges.resize(std::size_t(rows));
    for (std::size_t row = 0; row < std::size_t(rows); ++row) {
      for (const tasks::Answer& answer : drawn.answers[row]) {
        const std::size_t at = row * std::size_t(batch.len) + std::size_t(answer.position);
        batch.difficulties[at] = answer.difficulty;
        if (answer.source_len > 0)
          batch.sources.ranges[at] = {{answer.source, answer.source + answer.source_len}};
      }
      for (const Index t : drawn.noise[row]) batch.noise.ranges[row].push_back({t, t + 1});
    }
    return batch;
  }

  std::shared_ptr<const tasks::Task> task_;
  std::uint64_t seed_;
  tasks::Split split_;
};

void require_one_source(const DataSettings& s) {
  std::string given;
  int count = 0;
  for (const auto& [option, value] :
       {std::pair{"--text", &s.text}, {"--instructions", &s.instructions}, {"--task", &s.task}})
    if (!value->empty()) given += (count++ > 0 ? " and " : "") + std::string(option);
  heed::require(count == 1, count == 0 ? "no data were given" : given + " were given",
                "; give one of --text, --instructions and --task");
}

constexpr const char* kParens = "parens";

[[nodiscard]] std::shared_ptr<const tasks::Task> task_of(const DataSettings& s) {
  if (s.task == kParens) {
    heed::require(s.len >= 2, "--len is ", s.len, ", --task parens needs at least 2");
    return std::make_shared<tasks::Parens>(tasks::Parens::Options{s.len, 6, 1});
  }
  std::shared_ptr<const tasks::Task> task = tasks::make_task(s.task);
  heed::require(!task->bottleneck(), "--task is ", s.task,
                ", which hides tokens from others as no checkpoint does; heed_compare --train "
                "has it");
  return task;
}

[[nodiscard]] std::string read_some_text(const std::string& path, Content content) {
  std::string text;
  try {
    text = read_text_file(path, content);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("--text " + std::string(error.what()));
  }
  heed::require(!text.empty(), "--text ", path, ": the file is empty");
  return text;
}

// Calls f(). An exception gets the name of the text in front, and `advice` behind.
template <class F>
auto about_text(const std::string& path, const char* advice, F&& f) {
  try {
    return f();
  } catch (const std::invalid_argument& error) {
    heed::fail("--text ", path, ": ", error.what(), advice);
  }
}

}  // namespace

EndOfText end_of_text_named(const std::string& name, const Tokenizer& tokenizer) {
  heed::require(name.empty() || name == "token" || name == "text", "--end-of-text is ",
                heed::io::in_quotes(name), ", it must be token or text");
  heed::require(name != "token" || tokenizer.end_of_text(),
                "--end-of-text is token, the tokenizer ", tokenizer.name(),
                " has no token for the end of a text");
  return name == "text" ? EndOfText::as_text : EndOfText::as_token;
}

std::unique_ptr<Tokenizer> make_tokenizer(const DataSettings& s) {
  require_one_source(s);
  if (!s.task.empty()) {
    const bool parens = tasks::task_name(s.task) == kParens;
    const std::string own = parens ? "characters" : "numbers";
    heed::require(s.tokenizer.empty() || s.tokenizer == own, "--tokenizer is ", s.tokenizer,
                  ", --task ", s.task, " needs ", own);
    for (const auto& [option, value] : {std::pair{"--vocab", &s.vocab}, {"--merges", &s.merges}})
      heed::require(value->empty(), option, " is ", *value, ", --task ", s.task,
                    parens ? " has an alphabet of its own" : " has tokens of its own");
    if (parens) return std::make_unique<CharacterTokenizer>(tasks::kParenthesesAlphabet);
    return std::make_unique<NumberTokenizer>(task_of(s)->vocabulary());
  }
  heed::require(s.vocab.empty() == s.merges.empty(), "--vocab and --merges go together; ",
                s.vocab.empty() ? "--vocab" : "--merges", " is missing");
  const std::string name = !s.tokenizer.empty() ? s.tokenizer
                           : !s.vocab.empty()   ? "gpt2"
                           : s.text.empty()     ? "bytes"
                                                : "characters";
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (name == "characters") {
    heed::require(!s.text.empty(),
                  "--tokenizer is characters, whose alphabet comes from --text; --instructions "
                  "needs bytes or gpt2");
    const std::string text = read_some_text(s.text, Content::text);
    return about_text(s.text, "; --tokenizer bytes reads any file",
                      [&] { return std::make_unique<CharacterTokenizer>(alphabet_of(text)); });
  }
  heed::require(name == "gpt2", "--tokenizer is ", name, ", it must be bytes, characters or gpt2");
  heed::require(!s.vocab.empty(), "--tokenizer is gpt2, which needs --vocab and --merges");
  return read_bpe_tokenizer(s.vocab, s.merges);
}

Index task_len(const DataSettings& s) {
  return s.task.empty() || s.task == kParens ? s.len : task_of(s)->len();
}

std::unique_ptr<DataSource> open_data(const DataSettings& s, const Tokenizer& tokenizer) {
  require_one_source(s);
  if (!s.task.empty()) {
    heed::require(s.end_of_text.empty(), "--end-of-text is ", s.end_of_text, ", --task ", s.task,
                  " has no text");
    std::shared_ptr<const tasks::Task> task = task_of(s);
    heed::require(task->len() <= s.len, "--len is ", s.len, ", --task ", s.task,
                  " has sequences of ", task->len(), " tokens");
    heed::require(task->vocabulary() == tokenizer.vocab_size(), "--task ", s.task, " has ",
                  task->vocabulary(), " tokens, the model has ", tokenizer.vocab_size());
    return make_task_source(std::move(task), s.seed);
  }
  if (!s.instructions.empty())
    return std::make_unique<InstructionSource>(read_instructions(s.instructions), tokenizer, s);
  const std::string text =
      read_some_text(s.text, tokenizer.name() == "bytes" ? Content::bytes : Content::text);
  const EndOfText end = end_of_text_named(s.end_of_text, tokenizer);
  return about_text(s.text, "", [&] { return make_text_source(tokenizer.encode(text, end), s); });
}

std::unique_ptr<DataSource> make_text_source(std::vector<Index> tokens,
                                             const DataSettings& settings) {
  return std::make_unique<TextSource>(std::move(tokens), settings);
}

std::unique_ptr<DataSource> make_task_source(std::shared_ptr<const tasks::Task> task,
                                             std::uint64_t seed, tasks::Split split) {
  return std::make_unique<TaskSource>(std::move(task), seed, split);
}

}  // namespace heed_lm
