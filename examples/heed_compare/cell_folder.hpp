// SPDX-License-Identifier: Apache-2.0
#pragma once

// The folder of --out keeps every cell that is finished, a JSON file each, so that an experiment that was stopped goes on
// with what is missing. settings.json has what all of its cells share; a folder of other settings is refused.

#include "cell.hpp"

#include <filesystem>
#include <optional>
#include <utility>

namespace compare {

// What the results of all cells depend on beside their names: names of settings, and their values as JSON.
using SharedSettings = std::vector<std::pair<std::string, std::string>>;

class CellFolder {
 public:
  // Changes nothing. Throws UsageError where the folder's cells have other settings, in the words of --out.
  CellFolder(std::filesystem::path folder, SharedSettings settings);

  // Makes the folder and its settings.json, where they are not there. Throws std::runtime_error.
  void prepare() const;

  // What came of the cell; none if it is not there. Throws std::runtime_error for a file that cannot be read, or is that of
  // another cell.
  [[nodiscard]] std::optional<CellResult> find(const Cell& cell) const;

  // Writes the cell's file as a whole or not at all; `result` as JSON (cell_json.hpp).
  void keep(const Cell& cell, const std::string& result) const;

 private:
  [[nodiscard]] std::filesystem::path file_of(const Cell& cell) const;

  std::filesystem::path folder_;
  SharedSettings settings_;
};

}  // namespace compare
