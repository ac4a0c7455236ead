// SPDX-License-Identifier: Apache-2.0
#include "training_report.hpp"

#include "../heed_compare/report.hpp"
#include "rank_workers.hpp"
#include "training_json.hpp"
#include "training_pictures.hpp"
#include "training_table.hpp"

#include <cstdio>
#include <set>

namespace compare {

namespace {

// Throws std::runtime_error with the names of variants whose loss is not finite.
void require_finite(const TrainingComparison& comparison) {
  std::string names;
  std::set<std::string> named;
  for (const TrainedVariant& v : comparison.variants)
    if (!v.all_finite() && named.insert(v.name).second)
      names += (names.empty() ? "" : ", ") + v.name;
  if (!names.empty()) throw std::runtime_error("the loss is not finite with " + names);
}

}  // namespace

void report_training(const Settings& asked, heed_program::Ranks& ranks) {
  Settings settings = asked;
  ranks.timeout = settings.training.rank_timeout;
  if (!ranks.first()) return serve_cells(Experiment(settings), ranks);
  std::FILE* const to = settings.data_on_stdout() ? stderr : stdout;
  const auto put = [to](const std::string& text) {
    std::fputs(text.c_str(), to);
    std::fflush(to);
  };
  TrainingWatch watch;
  watch.on_plan = [&](const std::string& plan) { put(training_head(settings) + plan); };
  watch.on_task = [&](const Experiment::Task& task) { put(task_head(task)); };
  watch.on_variant = [&](const TrainedVariant& v) { put(variant_lines(v)); };
  watch.on_task_end = [&](const TrainingComparison& c, const Experiment::Task& task) {
    put(answers_line(c, task.spec) + difference_lines(c, task.spec) +
        (c.tasks.size() > 1 ? "\n" : ""));
  };
  const TrainingComparison comparison = compare_training(settings, watch, &ranks);
  dismiss(ranks);
  if (settings.training.only_plan) return;
  put(tasks_table(comparison));
  heed_program::all_of(
      {[&] {
         write_files(settings, training_json(settings, comparison), training_csv(comparison));
       },
       [&] {
         if (!settings.report_folder.empty())
           heed_report::write_page(settings.report_folder, training_page(settings, comparison));
       },
       [&] { require_finite(comparison); }});
}

}  // namespace compare
