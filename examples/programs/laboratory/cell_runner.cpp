// SPDX-License-Identifier: Apache-2.0
#include "cell_runner.hpp"

#include "cell_json.hpp"
#include "rank_workers.hpp"

#include "../heed_lm/json_fields.hpp"
#include "../program/progress.hpp"

namespace compare {

CellRunner::CellRunner(const Experiment& experiment, heed_program::Ranks* ranks)
    : experiment_(experiment), ranks_(ranks) {
  const TrainingSettings& training = experiment.settings().training;
  if (training.out_folder.empty()) return;
  folder_.emplace(training.out_folder, experiment.shared_settings());
  if (!training.only_plan) folder_->open();
}

std::optional<CellResult> CellRunner::find(const Cell& cell) const {
  return folder_ ? folder_->find(cell) : std::nullopt;
}

std::vector<CellResult> CellRunner::run(const std::vector<Cell>& cells,
                                        const OnFirst& on_first) const {
  std::vector<CellResult> results(cells.size());
  std::vector<bool> there(cells.size(), false);
  std::vector<std::size_t> missing;
  std::size_t first = 0;
  // Invariant: the first `first` results exist and have been passed on.
  const auto take = [&](std::size_t at, CellResult result) {
    results[at] = std::move(result);
    there[at] = true;
    while (first < cells.size() && there[first]) on_first(++first, results);
  };
  for (std::size_t at = 0; at < cells.size(); ++at) {
    if (std::optional<CellResult> result = find(cells[at]))
      take(at, std::move(*result));
    else
      missing.push_back(at);
  }
  if (folder_ && !missing.empty()) folder_->require_writable();
  heed_program::Progress progress;
  std::size_t ended = 0;
  const Settings& settings = experiment_.settings();
  Jobs jobs;
  jobs.count = missing.size();
  jobs.at_once = settings.training.jobs;
  jobs.work = [&](std::size_t n, const Say& say) {
    return json_of(run_cell(experiment_, cells[missing[n]], settings.threads, say));
  };
  jobs.done = [&](std::size_t n, const std::string& json) {
    const Cell& cell = cells[missing[n]];
    CellResult result = cell_result_of(json);
    if (folder_) folder_->keep(cell, json);
    ++ended;
    progress.clear();
    take(missing[n], std::move(result));
  };
  jobs.progress = [&](std::size_t, const std::string& text) {
    progress.show(std::to_string(cells.size() - missing.size() + ended) + " of " +
                  std::to_string(cells.size()) + " runs done; " + text);
  };
  jobs.name = [&](std::size_t n) { return name_of(cells[missing[n]]); };
  if (ranks_ != nullptr && ranks_->count() > 1) jobs.ranks = ranks_;
  jobs.order = [&](std::size_t n) { return heed_lm::json_of(cells[missing[n]]); };
  run_jobs(jobs);
  return results;
}

void serve_cells(const Experiment& experiment, heed_program::Ranks& ranks) {
  serve(ranks, [&](const std::string& order, const Say& say) {
    const Cell cell = heed_lm::from_json<Cell>(order, "an order of rank 0");
    return json_of(run_cell(experiment, cell, experiment.settings().threads, say));
  });
}

}  // namespace compare
