// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory of training and evaluation: what cannot suffice is told by the options that ask for it, before it is taken.

#include "commands.hpp"

#include <new>

namespace heed_lm {

// What a step needs at the least, by the options that say so. More is needed, as what each variant adds is not counted.
[[nodiscard]] std::string memory_sentence(const TrainCommand& command, const Run& run,
                                          const heed_program::Ranks& ranks);

// Throw UsageError where a step, or a batch of held-out rows, needs more than this process may use.
void require_memory(const TrainCommand& command, const Run& run, const heed_program::Ranks& ranks);
void require_memory(const EvalCommand& command, const Run& run, const DataSource& data);

// f(), which may say that there is not enough memory, in these words.
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
