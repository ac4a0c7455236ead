// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sources of batches for training and validation: a text, instructions, or a task.

#include "../tasks/task.hpp"
#include "text_batch.hpp"
#include "tokenizer.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace heed_lm {

class DataSource {
 public:
  virtual ~DataSource() = default;
  // The batch of a step, a function of seed and step alone.
  [[nodiscard]] virtual Batch training_batch(Index rows, std::uint64_t seed,
                                             std::uint64_t step) const = 0;
  // The number of rows that are held out, which training never sees; 0 if nothing is held out.
  [[nodiscard]] virtual Index validation_rows() const = 0;
  // At most `rows` of the held-out rows, from number `first` on.
  [[nodiscard]] virtual Batch validation_batch(Index first, Index rows) const = 0;
  // One line for people.
  [[nodiscard]] virtual std::string description() const = 0;
  // A number that changes with the data and with the part that is held out.
  [[nodiscard]] virtual std::uint64_t fingerprint() const = 0;
  // A position p such that no position behind p may see one before p; none if all may.
  [[nodiscard]] virtual std::optional<Index> bottleneck() const { return std::nullopt; }
};

// The number of tokens in a row of a source's batches.
[[nodiscard]] inline Index row_len(const DataSource& data) {
  return data.training_batch(1, 0, 0).len;
}

struct DataSettings {
  std::string text, instructions,
      task;  // exactly one of them is set: a file, a file, a spec (tasks/task_list.hpp)
  std::string tokenizer;      // bytes, characters or gpt2; empty: characters, or gpt2 if
                              // files are given
  std::string vocab, merges;  // files for gpt2
  std::string end_of_text;    // see end_of_text_named()
  Index len = 256;            // length of the longest sequence; of every one of plain "parens"
  double held_out = 0.1;      // fraction of a file; 0: nothing
  std::uint64_t seed = 1;
};

// The reading of the end-of-text name in a text, by the value of --end-of-text: token, which is the default, or text.
// Throws std::invalid_argument for another name, and for token if the tokenizer has no such token.
[[nodiscard]] EndOfText end_of_text_named(const std::string& name, const Tokenizer& tokenizer);

// Makes the tokenizer of the settings; a tokenizer of characters has the alphabet of the text.
// Tasks use numbers, parens characters.
[[nodiscard]] std::unique_ptr<Tokenizer> make_tokenizer(const DataSettings& settings);
// Tokens of the longest sequence of the settings' task, or `len` of the settings if the task has no length of its own.
[[nodiscard]] Index task_len(const DataSettings& settings);
[[nodiscard]] std::unique_ptr<DataSource> open_data(const DataSettings& settings,
                                                    const Tokenizer& tokenizer);

// The source of a text that is encoded already. It reads only `len` and `held_out` of the settings.
[[nodiscard]] std::unique_ptr<DataSource> make_text_source(std::vector<Index> tokens,
                                                           const DataSettings& settings);

// Number of held-out sequences of a task.
inline constexpr Index kTaskRows = 256;

// The source of a task. Held-out rows come from `split` and a seed of their own, the same for each seed of training.
[[nodiscard]] std::unique_ptr<DataSource> make_task_source(
    std::shared_ptr<const tasks::Task> task, std::uint64_t seed,
    tasks::Split split = tasks::Split::validation);

}  // namespace heed_lm
