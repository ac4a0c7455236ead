// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

namespace compare {

// Trains all variants. Prints a line of the table after each, and writes JSON, CSV and the page at the end where they are
// asked for. Rank 0 does so; the others train cells for it.
void report_training(const Settings& settings, heed_program::Ranks& ranks);

}  // namespace compare
