// SPDX-License-Identifier: Apache-2.0
#pragma once

// Results of cells as JSON, which carries them from process to process and from run to run. Finite numbers come back bit for
// bit; all others are null and come back as NaN.

#include "cell.hpp"

namespace compare {

// One line.
[[nodiscard]] std::string json_of(const CellResult& result);

// Throws std::runtime_error that says what is wrong.
[[nodiscard]] CellResult cell_result_of(const std::string& json);

}  // namespace compare
