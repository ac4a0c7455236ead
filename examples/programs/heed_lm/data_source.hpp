// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where the batches of training and validation come from: a text, instructions, or a task.

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
  // The number of rows that are held out: training sees none of them. 0 where nothing is held out.
  [[nodiscard]] virtual Index validation_rows() const = 0;
  // At most `rows` of them, from number `first` on.
  [[nodiscard]] virtual Batch validation_batch(Index first, Index rows) const = 0;
  // One line for people.
  [[nodiscard]] virtual std::string description() const = 0;
  // A number that changes with the data and with the part that is held out.
  [[nodiscard]] virtual std::uint64_t fingerprint() const = 0;
  // A position p such that no position behind p may see one before p; none where all may.
  [[nodiscard]] virtual std::optional<Index> bottleneck() const { return std::nullopt; }
};

// The number of tokens of the rows of its batches.
[[nodiscard]] inline Index row_len(const DataSource& data) {
  return data.training_batch(1, 0, 0).len;
}

struct DataSettings {
  std::string text, instructions,
      task;                   // one of them: a file, a file, a spec (tasks/task_list.hpp)
  std::string tokenizer;      // bytes, characters or gpt2; empty: characters, or gpt2 if
                              // files are given
  std::string vocab, merges;  // of gpt2
  std::string end_of_text;    // see end_of_text_named()
  Index len = 256;            // of the longest sequence; of "parens" without numbers, of all
  double held_out = 0.1;      // share of a file; 0: nothing
  std::uint64_t seed = 1;
};

// How a text is encoded, by the value of --end-of-text: token, which is the default, or text. Throws
// std::invalid_argument for another name, and for token where the tokenizer has no such token.
[[nodiscard]] EndOfText end_of_text_named(const std::string& name, const Tokenizer& tokenizer);

// Makes the tokenizer that the settings ask for; that of characters has the alphabet of the text. Tasks have numbers, parens
// characters.
[[nodiscard]] std::unique_ptr<Tokenizer> make_tokenizer(const DataSettings& settings);
// The tokens of the longest sequence of the settings' task, or their `len`, where it is the task that asks.
[[nodiscard]] Index task_len(const DataSettings& settings);
[[nodiscard]] std::unique_ptr<DataSource> open_data(const DataSettings& settings,
                                                    const Tokenizer& tokenizer);

// The source of a text that is encoded already. Of the settings only `len` and `held_out` are read.
[[nodiscard]] std::unique_ptr<DataSource> make_text_source(std::vector<Index> tokens,
                                                           const DataSettings& settings);

// Number of sequences that are held out of a task.
inline constexpr Index kTaskRows = 256;

// The source of a task. Held-out rows are those of `split` and of a seed of their own, the same for each seed of training.
[[nodiscard]] std::unique_ptr<DataSource> make_task_source(
    std::shared_ptr<const tasks::Task> task, std::uint64_t seed,
    tasks::Split split = tasks::Split::validation);

}  // namespace heed_lm
