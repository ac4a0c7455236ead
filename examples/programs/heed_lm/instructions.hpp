// SPDX-License-Identifier: Apache-2.0
#pragma once

// Instructions with answers, one JSON object per line, flat or nested:
//
//   {"instruction": "...", "input": "...", "output": "..."}              input may be absent
//   {"instruction": "...", "instances": [{"input": "...", "output": "..."}, ...]}
//
// as a text to go on with; the second line stands only where the input is not blank:
//
//   ### Prompt:\n<instruction>\n
//   Input: <input>\n
//   ### Response: <output><end of text>
//
// The loss counts the tokens behind "### Response:", and the end of text, if the tokenizer has one.
//
// Differs from the demo of GPT-2ART in the end of text, without which a model never learns to stop,
// and in long examples: the demo cuts their end, and with it the whole answer to a long prompt.

#include "text_batch.hpp"
#include "tokenizer.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace heed_lm {

struct Instruction {
  std::string instruction, input, output;
};

// All examples of JSON lines, each instance an example; blank lines are skipped. `name` is for
// messages: std::invalid_argument `<name> line <n>: <what is wrong>`.
[[nodiscard]] std::vector<Instruction> parse_instructions(std::string_view lines,
                                                          const std::string& name);
[[nodiscard]] std::vector<Instruction> read_instructions(const std::string& path);

// The text up to "### Response:", which a model is to continue.
[[nodiscard]] std::string prompt_of(const Instruction& example);

// The numbers 0 to count - 1 in the order of one epoch, a function of seed and epoch.
[[nodiscard]] std::vector<Index> example_order(Index count, std::uint64_t seed,
                                               std::uint64_t epoch);

class InstructionData {
 public:
  // An example of more than len + 1 tokens loses the beginning of its prompt, until it fits or half
  // of these tokens (or fewer, if the prompt is shorter) are prompt; then the end of its response,
  // and with it the end of text. `marks`: how the end-of-text token's name in an example is read.
  InstructionData(const std::vector<Instruction>& examples, const Tokenizer& tokenizer, Index len,
                  EndOfText marks = EndOfText::as_text);

  [[nodiscard]] Index count() const { return Index(examples_.size()); }
  // The number of examples that were cut.
  [[nodiscard]] Index cut_count() const { return cut_; }

  // These examples as rows of a batch as long as the longest of them, at most len. Padding has no targets.
  [[nodiscard]] Batch batch(std::span<const Index> examples) const;

 private:
  struct Example {
    std::vector<Index> tokens;
    Index prompt;  // number of tokens that belong to the prompt
  };
  [[nodiscard]] Example fit(std::vector<Index> prompt, std::vector<Index> response, Index room);

  std::vector<Example> examples_;
  Index padding_, cut_ = 0;
};

}  // namespace heed_lm
