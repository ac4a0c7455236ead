// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cell_run.hpp"

#include "../program/ranks.hpp"

namespace compare {

// Gets the results of cells: finished ones from the folder of --out, the others by training them, --jobs at a time; each is
// kept as soon as it is finished. Other ranks (serve_cells) train beside this one.
class CellRunner {
 public:
  // Throws UsageError if the folder has other settings.
  explicit CellRunner(const Experiment& experiment, heed_program::Ranks* ranks = nullptr);

  // The result of a finished cell; none for another.
  [[nodiscard]] std::optional<CellResult> find(const Cell& cell) const;

  // The results in the order of the cells. on_first(n, results) is called with n = 1, 2, ..., each time as soon as the
  // first n results exist: in the order of the cells, whatever the order in which they end.
  using OnFirst = std::function<void(std::size_t n, const std::vector<CellResult>& results)>;
  [[nodiscard]] std::vector<CellResult> run(const std::vector<Cell>& cells,
                                            const OnFirst& on_first) const;

 private:
  const Experiment& experiment_;
  heed_program::Ranks* ranks_;
  std::optional<CellFolder> folder_;
};

// Trains the cells that rank 0 gives to this rank, until rank 0 dismisses it.
void serve_cells(const Experiment& experiment, heed_program::Ranks& ranks);

}  // namespace compare
