// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

#include "../report/page.hpp"

namespace compare {

// The results as text, a piece at a time.

// A description of the training, before the first line.
[[nodiscard]] std::string training_head(const Settings& settings);
// The head of a task's table, a variant's lines in it, and below it the number of answers behind
// its scores and the differences to the baseline.
[[nodiscard]] std::string task_head(const Experiment::Task& task);
[[nodiscard]] std::string variant_lines(const TrainedVariant& variant);
[[nodiscard]] std::string answers_line(const TrainingComparison& comparison,
                                       const std::string& task);
[[nodiscard]] std::string difference_lines(const TrainingComparison& comparison,
                                           const std::string& task);
// A table of variants by tasks; empty for one task.
[[nodiscard]] std::string tasks_table(const TrainingComparison& comparison);

// For pages: each variant's scores, and the differences; no rows if there is nothing to compare.
[[nodiscard]] heed_report::Table score_table(const TrainingComparison& comparison,
                                             const Experiment::Task& task);
[[nodiscard]] heed_report::Table difference_table(const TrainingComparison& comparison,
                                                  const std::string& task);

}  // namespace compare
