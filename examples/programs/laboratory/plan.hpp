// SPDX-License-Identifier: Apache-2.0
#pragma once

// The plan of an experiment: its cells, in the order of tasks, variants and seeds.

#include "cell_runner.hpp"

namespace compare {

// The score of one learning rate on the watched rows, means over the runs of the sweep.
struct RateScore {
  double learning_rate = 0, loss = 0, accuracy = 0;
};

// The cells that choose a learning rate for a variant: each rate with each seed of the sweep. Empty for a single rate.
[[nodiscard]] std::vector<Cell> choosing_cells(const Experiment& experiment,
                                               const std::string& task, const std::string& variant);
// The scores of these cells' rates, in their order.
[[nodiscard]] std::vector<RateScore> rate_scores(const std::vector<Cell>& cells,
                                                 const std::vector<CellResult>& results);
// The rate with the smallest loss; the smallest rate if no loss is finite.
[[nodiscard]] double best_rate(const std::vector<RateScore>& scores);

// The cells that give a variant's reported results, one for each seed.
[[nodiscard]] std::vector<Cell> result_cells(const Experiment& experiment, const std::string& task,
                                             const std::string& variant, double learning_rate);

// The answer whether several jobs are faster than one with all threads, and by which factor the faster way is faster.
struct Gain {
  bool several = false;
  double times = 1, least = 1, most = 1;  // the median of rounds, and their range
};
// Judges by the time of one job over that of several, in rounds of measurements. The median
// decides, so that one disturbed round does not.
[[nodiscard]] Gain gain_of(std::vector<double> gains);

// The amount of work, and the number of cells at a time.
struct Plan {
  // A text for people: the number of cells, how many of them are done, and the time for the others,
  // from measured steps of each variant on each task.
  std::string text;
  // Jobs and threads of the settings. If these leave jobs open: 1 with all threads, or as many as there are threads with
  // one each, whichever does measured steps of one variant of each task in less time (gain_of()).
  int jobs = 1, threads = 1;
};
[[nodiscard]] Plan make_plan(const Experiment& experiment, const CellRunner& runner);

}  // namespace compare
