// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

namespace compare {

// Trains all variants. Prints a line of the table after each, and at the end writes the requested
// JSON, CSV and page. Rank 0 does this; the others train cells for it.
void report_training(const Settings& settings, heed_program::Ranks& ranks);

}  // namespace compare
