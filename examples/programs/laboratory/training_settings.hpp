// SPDX-License-Identifier: Apache-2.0
#pragma once

// The options of --train.

#include "../heed_compare/settings.hpp"

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace compare {

// Values of options in the words of the command line.
struct TrainingWords {
  std::string tasks = kText, sweep, lengths, noise;
  double rate = 2e-3;
  Index evaluate_every = 0;

  [[nodiscard]] bool asks_for_help() const { return tasks == "help"; }
};

void declare_training(CLI::App& app, TrainingWords& words, Settings& settings);

// The options that have no effect without training.
[[nodiscard]] std::vector<std::string> training_options();

// Prints all tasks with their numbers.
void print_task_help();

// Sets settings.training from the given options. Throws UsageError.
void take_training(const CLI::App& app, const TrainingWords& words, Settings& settings);

// The specs of "mqar:len=128,pairs=8,parity,text", or of "all". Throws UsageError.
[[nodiscard]] std::vector<std::string> read_tasks(const std::string& text);

}  // namespace compare
