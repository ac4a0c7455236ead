// SPDX-License-Identifier: Apache-2.0
#include "run_memory.hpp"

#include "../program/memory.hpp"
#include "../program/program.hpp"

#include <algorithm>

namespace heed_lm {

namespace {

using heed_program::gib_text;

// Bytes for the tokens that this rank computes in a step; examples of --instructions may be short.
[[nodiscard]] LeastBytes bytes_of_step(const TrainCommand& command, const Run& run,
                                       const heed_program::Ranks& ranks) {
  const Index len = command.data.instructions.empty() ? task_len(command.data) : 1;
  return least_bytes(run.config, double(run.train.batch) * double(len) / ranks.count(), true);
}

// Throws UsageError if the memory is less than `least` bytes; `needs` begins the sentence.
void require(const std::string& needs, double least) {
  const double limit = heed_program::memory_limit();
  if (least > limit)
    throw heed_program::UsageError(needs + ", this process may use " + gib_text(limit));
}

}  // namespace

std::string memory_sentence(const TrainCommand& command, const Run& run,
                            const heed_program::Ranks& ranks) {
  const ModelConfig& c = run.config;
  const LeastBytes least = bytes_of_step(command, run, ranks);
  return heed::detail::sentence(
      "training needs ", gib_text(least.all()), " of memory at the least: ", gib_text(least.tokens),
      " for the tokens of a step (--batch ", run.train.batch, ", --len ", command.data.len,
      ") and ", gib_text(least.weights), " for ", c.variant, " with its moments (--width ", c.width,
      ", --depth ", c.depth, ", ", c.vocabulary, " tokens in the vocabulary)");
}

void require_memory(const TrainCommand& command, const Run& run, const heed_program::Ranks& ranks) {
  require(memory_sentence(command, run, ranks), bytes_of_step(command, run, ranks).all());
}

void require_memory(const EvalCommand& command, const Run& run, const DataSource& data) {
  const double rows = double(std::min(command.batch, data.validation_rows())),
               least = least_bytes(run.config, rows * double(row_len(data)), false).all();
  require(heed::detail::sentence("--batch is ", command.batch, ", which needs ", gib_text(least),
                                 " of memory at the least"),
          least);
}

}  // namespace heed_lm
