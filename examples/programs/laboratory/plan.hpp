// SPDX-License-Identifier: Apache-2.0
#pragma once

// What an experiment runs: its cells, in the order of tasks, variants and seeds.

#include "cell_runner.hpp"

namespace compare {

// The score of one learning rate on the watched rows, means over the runs of the sweep.
struct RateScore {
  double learning_rate = 0, loss = 0, accuracy = 0;
};

// The cells that choose a learning rate for a variant: each rate with each seed of the sweep. None for one rate.
[[nodiscard]] std::vector<Cell> choosing_cells(const Experiment& experiment,
                                               const std::string& task, const std::string& variant);
// What came of them, in their order.
[[nodiscard]] std::vector<RateScore> rate_scores(const std::vector<Cell>& cells,
                                                 const std::vector<CellResult>& results);
// The rate with the smallest loss; the smallest rate where no loss is finite.
[[nodiscard]] double best_rate(const std::vector<RateScore>& scores);

// The cells whose results are reported of a variant, one for each seed.
[[nodiscard]] std::vector<Cell> result_cells(const Experiment& experiment, const std::string& task,
                                             const std::string& variant, double learning_rate);

// Whether several jobs are faster than one with all threads, and how many times as fast the faster of both is.
struct Gain {
  bool several = false;
  double times = 1, least = 1, most = 1;  // the median of rounds, and their range
};
// By the time of one job over that of several in rounds of measurements. The median decides: one round that something
// disturbed does not.
[[nodiscard]] Gain gain_of(std::vector<double> gains);

// How much is to do, and with how many cells at a time.
struct Plan {
  // For people: the number of cells, how many of them are done, and the time that the others will take, from measured steps
  // of each variant on each task.
  std::string text;
  // Those of the settings. Where these leave jobs open: 1 with all threads, or as many as there are threads with one each,
  // by which of both does measured steps of one variant of each task in less time (gain_of()).
  int jobs = 1, threads = 1;
};
[[nodiscard]] Plan make_plan(const Experiment& experiment, const CellRunner& runner);

}  // namespace compare
