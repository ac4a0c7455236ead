// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "experiment.hpp"
#include "jobs.hpp"

namespace compare {

// Trains the cell's model and scores it: a function of the experiment and the cell alone, but for the speed. `threads` do
// not change a bit. Numbers that are not finite are results, not errors.
[[nodiscard]] CellResult run_cell(const Experiment& experiment, const Cell& cell, int threads,
                                  const Say& say);

// The seconds that such a cell will take, from a measured step and a batch of each test. `step` gets the seconds of a step.
[[nodiscard]] double measure_cell(const Experiment& experiment, const Cell& cell, int threads,
                                  double& step);

}  // namespace compare
