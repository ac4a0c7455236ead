// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "experiment.hpp"
#include "jobs.hpp"

namespace compare {

// Trains the cell's model and scores it: the result depends on the experiment and the cell alone, except for the speed, and
// no bit of it on `threads`. Numbers that are not finite are results, not errors.
[[nodiscard]] CellResult run_cell(const Experiment& experiment, const Cell& cell, int threads,
                                  const Say& say);

// Estimates the seconds that such a cell will take, from a measured step and a batch of each test.
// `step` gets the seconds of a step.
[[nodiscard]] double measure_cell(const Experiment& experiment, const Cell& cell, int threads,
                                  double& step);

}  // namespace compare
