// SPDX-License-Identifier: Apache-2.0
#pragma once

// Options of a run that goes on: what its checkpoint has decided, and the command that goes on from one.

#include "commands.hpp"

namespace heed_lm {

// Throws std::invalid_argument with both values where an option of the command line contradicts the checkpoint
// of --resume, or the sizes of --gpt2.
void require_same_settings(const TrainCommand& command, const Run& run);

// For a shell: goes on from command.out.
[[nodiscard]] std::string resuming_command(const TrainCommand& command);

}  // namespace heed_lm
