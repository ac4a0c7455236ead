// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks the memory of training and evaluation before it is taken: an error names the options that ask for too much.

#include "commands.hpp"

#include <new>

namespace heed_lm {

// The least memory that a step needs, as a sentence with the options that cause it. The variant's
// own memory is not counted.
[[nodiscard]] std::string memory_sentence(const TrainCommand& command, const Run& run,
                                          const heed_program::Ranks& ranks);

// Throw UsageError if a step, or a batch of held-out rows, needs more than this process may use.
void require_memory(const TrainCommand& command, const Run& run, const heed_program::Ranks& ranks);
void require_memory(const EvalCommand& command, const Run& run, const DataSource& data);

// Calls f(). If there is not enough memory, the error says so in these words.
template <class F>
auto within_memory(const TrainCommand& command, const Run& run, const heed_program::Ranks& ranks,
                   F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("there is not enough memory; " + memory_sentence(command, run, ranks));
  }
}

}  // namespace heed_lm
