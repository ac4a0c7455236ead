// SPDX-License-Identifier: Apache-2.0
#pragma once

// The folder of --out keeps every finished cell, a JSON file each, so that a stopped experiment
// goes on with the missing cells. All of its cells have the settings of settings.json, and carry
// them, too; a folder of other settings is refused. Runs of the same settings may use it at once.

#include "cell.hpp"

#include "../program/file_lock.hpp"
#include "../program/program.hpp"

#include <optional>
#include <set>
#include <utility>

namespace compare {

// Settings on which the results of all cells depend: names, and values as JSON.
using SharedSettings = std::vector<std::pair<std::string, std::string>>;

class CellFolder {
 public:
  // Changes nothing. Throws UsageError, in the words of --out, if the folder's cells have other settings.
  CellFolder(std::filesystem::path folder, SharedSettings settings);

  // Makes the folder and its settings.json if needed, and keeps runs of other settings away as long
  // as the object exists. Throws UsageError if such a run uses the folder, and std::runtime_error.
  void open();

  // Throws UsageError if no cell can be written.
  void require_writable() const {
    heed_program::require_output("--out", (folder_ / "settings.json").string());
  }

  // The cell's result; none if it is missing. A file that is damaged, or belongs to another cell, is reported on standard
  // error once, and the cell counts as missing. Throws UsageError for a cell of other settings.
  [[nodiscard]] std::optional<CellResult> find(const Cell& cell) const;

  // Writes the cell's file as a whole or not at all; `result` as JSON (cell_json.hpp).
  void keep(const Cell& cell, const std::string& result) const;

 private:
  // Throws UsageError if the folder has other settings. The settings of a folder in use are in
  // settings.json; else its cells carry them.
  void require_same(bool in_use) const;
  [[nodiscard]] std::filesystem::path file_of(const Cell& cell) const;

  std::filesystem::path folder_;
  SharedSettings settings_;
  std::optional<heed_program::FileLock> lock_;
  mutable std::set<std::filesystem::path> damaged_;  // files already reported
};

}  // namespace compare
