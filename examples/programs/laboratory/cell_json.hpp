// SPDX-License-Identifier: Apache-2.0
#pragma once

// Results of cells as JSON, for exchange between processes and between runs. Finite numbers come
// back bit for bit; all others are null and come back as NaN.

#include "cell.hpp"

namespace compare {

// The result as one line of JSON.
[[nodiscard]] std::string json_of(const CellResult& result);

// The result from its JSON. Throws std::runtime_error that says what is wrong.
[[nodiscard]] CellResult cell_result_of(const std::string& json);

}  // namespace compare
