// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

namespace compare {

// Trains all variants; a table that grows on standard output, JSON and CSV at the end where asked for.
void report_training(const Settings& settings);

}  // namespace compare
