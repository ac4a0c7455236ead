// SPDX-License-Identifier: Apache-2.0
#pragma once

// The folder of --out keeps every cell that is finished, a JSON file each, so that an experiment that was stopped goes on
// with what is missing. All of its cells have the settings of settings.json, and carry them, too; a folder of other settings
// is refused. Runs of the same settings may use it at once.

#include "cell.hpp"

#include "../program/file_lock.hpp"
#include "../program/program.hpp"

#include <optional>
#include <set>
#include <utility>

namespace compare {

// What the results of all cells depend on beside their names: names of settings, and their values as JSON.
using SharedSettings = std::vector<std::pair<std::string, std::string>>;

class CellFolder {
 public:
  // Changes nothing. Throws UsageError where the folder's cells have other settings, in the words of --out.
  CellFolder(std::filesystem::path folder, SharedSettings settings);

  // Makes the folder and its settings.json, where they are not there, and keeps runs of other settings away as long as the
  // object is there. Throws UsageError where such a run uses the folder, and std::runtime_error.
  void open();

  // Throws UsageError where no cell can be kept.
  void require_writable() const {
    heed_program::require_output("--out", (folder_ / "settings.json").string());
  }

  // What came of the cell; none if it is not there. Of a file that is damaged, or is that of another cell, it says so on
  // standard error, once, and the cell counts as not there. Throws UsageError for a cell of other settings.
  [[nodiscard]] std::optional<CellResult> find(const Cell& cell) const;

  // Writes the cell's file as a whole or not at all; `result` as JSON (cell_json.hpp).
  void keep(const Cell& cell, const std::string& result) const;

 private:
  // Throws UsageError where the folder's settings are others. Those of a folder in use are in settings.json; those of another
  // one are what its cells carry.
  void require_same(bool in_use) const;
  [[nodiscard]] std::filesystem::path file_of(const Cell& cell) const;

  std::filesystem::path folder_;
  SharedSettings settings_;
  std::optional<heed_program::FileLock> lock_;
  mutable std::set<std::filesystem::path> damaged_;  // files that were complained of
};

}  // namespace compare
