// SPDX-License-Identifier: Apache-2.0
#pragma once

// The common part of commands that use a finished model.

#include "checkpoint.hpp"

#include <string>
#include <vector>

namespace heed_lm {

// The model and tokenizer of a checkpoint, or of a GPT-2 with its vocabulary. Throws std::runtime_error or
// std::invalid_argument, one sentence.
[[nodiscard]] Run open_run(const std::string& checkpoint, const std::string& vocab,
                           const std::string& merges);

// The tokens of --prompt, with the value of --end-of-text. An empty prompt is the end of another text; throws
// std::invalid_argument if the tokenizer has no such token, or lacks characters of the prompt.
[[nodiscard]] std::vector<Index> encode_prompt(const Tokenizer& tokenizer,
                                               const std::string& prompt,
                                               const std::string& end_of_text);

}  // namespace heed_lm
