// SPDX-License-Identifier: Apache-2.0
#pragma once

// Trains the same small language model with each variant, on the same texts or tasks in the same
// order (experiment.hpp), and compares the runs pair by pair, seed by seed.
//
// With several stages, texts or alphabets of a task, it also measures forgetting: each model goes on with the next one for
// as many steps, and is scored on all of them after each.

#include "plan.hpp"
#include "student.hpp"

namespace compare {

// The results of one variant on one task.
struct TrainedVariant {
  std::string task, name;
  Index hidden = 0;  // width of the MLP
  double learning_rate = 0;
  std::vector<RateScore> sweep;  // empty for one learning rate
  std::vector<std::uint64_t> seeds;
  std::vector<CellResult> runs;  // one for each seed

  [[nodiscard]] bool all_finite() const;
};

// The names of a variant's tests, kHeldOut first, and the loss and accuracy of each seed in one of them.
[[nodiscard]] std::vector<std::string> tests_of(const TrainedVariant& variant);
[[nodiscard]] std::vector<double> losses_of(const TrainedVariant& variant,
                                            const std::string& test = kHeldOut);
[[nodiscard]] std::vector<double> accuracies_of(const TrainedVariant& variant,
                                                const std::string& test = kHeldOut);
// With several stages: the loss of each seed on the second stage after it, on the first stage after
// the last, and the effect of later stages on earlier ones. Empty with one stage.
[[nodiscard]] std::vector<double> second_losses_of(const TrainedVariant& variant);
[[nodiscard]] std::vector<double> forgotten_losses_of(const TrainedVariant& variant);
[[nodiscard]] std::vector<double> backward_transfers_of(const TrainedVariant& variant,
                                                        double StageScore::*score);
[[nodiscard]] double tokens_per_second_of(const TrainedVariant& variant);  // median
[[nodiscard]] Index skipped_of(const TrainedVariant& variant);             // sum over all runs
// Means over the runs that have the measure.
[[nodiscard]] Measures means_of(const TrainedVariant& variant, Measures CellResult::*measures);

// The unit of losses: they are means over the answers of a task, or over all tokens of a text.
[[nodiscard]] const char* loss_unit_of(const std::string& task);
// Number of answers over which the variants' scores in a test are means: all seeds and variants
// have the same ones. 0 if none of them has a finite loss.
[[nodiscard]] Index answers_in(const std::vector<const TrainedVariant*>& variants,
                               const std::string& test);

enum class Quantity { loss, accuracy };
[[nodiscard]] const char* name_of(Quantity quantity);
// "higher", "lower", "no difference seen", or "unknown" without an interval.
[[nodiscard]] const char* verdict_of(const std::optional<Difference>& difference);

struct TrainingComparison {
  std::vector<Experiment::Task> tasks;
  std::vector<TrainedVariant> variants;  // variants of the first task, then of the next
};

// The variants of one task.
[[nodiscard]] std::vector<const TrainedVariant*> variants_of(const TrainingComparison& comparison,
                                                             const std::string& task);
// The baseline's runs on a task; null if it did not run.
[[nodiscard]] const TrainedVariant* baseline_of(const TrainingComparison& comparison,
                                                const std::string& task);
// Loss or accuracy of the variant in a test less that of the baseline, paired by seed; none for fewer than two seeds.
[[nodiscard]] std::optional<Difference> difference_of(const TrainedVariant& baseline,
                                                      const TrainedVariant& variant,
                                                      const std::string& test, Quantity quantity);

// Functions that compare_training() calls: on_plan once with the text of the plan, on_task before a
// task's first variant, on_variant after each variant, on_task_end with all variants so far.
struct TrainingWatch {
  std::function<void(const std::string&)> on_plan;
  std::function<void(const Experiment::Task&)> on_task;
  std::function<void(const TrainedVariant&)> on_variant;
  std::function<void(const TrainingComparison&, const Experiment::Task&)> on_task_end;
};

// Trains all variants of the settings on all tasks, or none if only the plan is requested. Sets
// jobs and threads to those of the plan. Other ranks, which serve_cells(), train beside this one.
[[nodiscard]] TrainingComparison compare_training(Settings& settings, const TrainingWatch& watch,
                                                  heed_program::Ranks* ranks = nullptr);

}  // namespace compare
