// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

namespace compare {

// The results as text, a piece at a time.

// What is trained, before the first line.
[[nodiscard]] std::string training_head(const Settings& settings);
// The head of a task's table, a variant's lines in it, and the differences to the baseline below it.
[[nodiscard]] std::string task_head(const Experiment::Task& task);
[[nodiscard]] std::string variant_lines(const TrainedVariant& variant);
[[nodiscard]] std::string difference_lines(const TrainingComparison& comparison,
                                           const std::string& task);
// Variants by tasks; empty for one task.
[[nodiscard]] std::string tasks_table(const TrainingComparison& comparison);

}  // namespace compare
