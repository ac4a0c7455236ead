// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

namespace compare {

// The results in the JSON and CSV formats of bench/FORMATS.md.
[[nodiscard]] std::string training_json(const Settings& settings, const TrainingComparison& c);
[[nodiscard]] std::string training_csv(const TrainingComparison& c);

}  // namespace compare
