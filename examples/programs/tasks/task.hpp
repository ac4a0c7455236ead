// SPDX-License-Identifier: Apache-2.0
#pragma once

// A task: sequences of tokens in which some positions ask for an answer that the tokens up to there determine. The loss
// and the accuracy count these answers alone, however a task's source trained on the other tokens.
//
// A sequence is a function of (seed, split, index): the same on every machine, in any order and for any number of threads.
// The three splits draw from streams of their own, so that no model is tested on sequences of its training; if this needs
// more than other random numbers (modular addition), the task's header says what it does.
//
// task_list.hpp makes tasks by their names.

#include <heed/core/config.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tasks {

using heed::Index;

enum class Split : std::uint64_t { training = 0, validation = 1, test = 2 };

// The place of a sequence.
struct Place {
  std::uint64_t seed = 1;
  Split split = Split::training;
  std::uint64_t index = 0;
};

// The question at a position, after the token that stands there was read.
struct Answer {
  Index position = 0;
  Index token = 0;       // the only right one
  Index difficulty = 0;  // a gap, a depth or a length: Entry::difficulty describes it
  // The input tokens that hold the answer are [source, source + source_len); none if no tokens alone hold it.
  Index source = 0, source_len = 0;

  [[nodiscard]] bool operator==(const Answer&) const = default;
};

struct Sequence {
  std::vector<Index> inputs;
  std::vector<Answer> answers;  // in the order of their positions
  // Positions, ascending, of tokens on which no answer depends; empty if a task has no such tokens.
  std::vector<Index> noise = {};

  [[nodiscard]] bool operator==(const Sequence&) const = default;
};

// The positions of [begin, end) that are not in `others`, ascending.
[[nodiscard]] std::vector<Index> positions_without(Index begin, Index end,
                                                   std::vector<Index> others);

// The target of a position without a question, the same number as heed::nn::kIgnoreIndex.
inline constexpr Index kNoAnswer = -100;

// Sequences as rows, padded to the longest of them.
struct Batch {
  Index rows = 0, len = 0;
  std::vector<Index> inputs, targets;        // (rows, len)
  std::vector<std::vector<Answer>> answers;  // answers of each row
  std::vector<std::vector<Index>> noise;     // noise of each row
};

class Task {
 public:
  virtual ~Task() = default;

  // The name and every parameter, as make_task() reads them: "induction:len=30,vocabulary=20".
  [[nodiscard]] const std::string& spec() const { return spec_; }
  // Tokens are numbers from 0 to vocabulary() - 1.
  [[nodiscard]] virtual Index vocabulary() const = 0;
  // Tokens of the longest possible sequence.
  [[nodiscard]] virtual Index len() const = 0;
  [[nodiscard]] virtual Sequence sequence(const Place& place) const = 0;

  // A task with the same tokens that tests sequences unlike those of training: longer or deeper ones, or another mixture.
  struct Test {
    std::string name;
    std::unique_ptr<Task> task;
  };
  [[nodiscard]] virtual std::vector<Test> tests() const { return {}; }

  // The token behind the end of a row, and its target there.
  [[nodiscard]] virtual Index padding() const { return 0; }
  [[nodiscard]] virtual Index padding_target() const { return kNoAnswer; }

  // A position p such that no position behind p may see one before p. A model has to be told; none
  // if a position sees all before it.
  [[nodiscard]] virtual std::optional<Index> bottleneck() const { return std::nullopt; }

  // The sequences place.index, place.index + 1, ... as rows.
  [[nodiscard]] Batch batch(Place place, Index rows) const;

 protected:
  explicit Task(std::string spec) : spec_(std::move(spec)) {}

 private:
  std::string spec_;
};

}  // namespace tasks
