// SPDX-License-Identifier: Apache-2.0
#pragma once

// Resumed runs: a check that options agree with the checkpoint, and the command that resumes a run.

#include "commands.hpp"

namespace heed_lm {

// Throws std::invalid_argument with both values if an option of the command line contradicts the
// checkpoint of --resume, or the sizes of --gpt2.
void require_same_settings(const TrainCommand& command, const Run& run);

// Replaces a run that has no step yet by the one in the file, if that is a checkpoint of the same run: with the same
// settings, except for the number of steps, and the same tokenizer and data. Returns false if it is not.
[[nodiscard]] bool goes_on(const std::string& file, Run& run);

// A shell command that resumes the run from command.out.
[[nodiscard]] std::string resuming_command(const TrainCommand& command);

}  // namespace heed_lm
