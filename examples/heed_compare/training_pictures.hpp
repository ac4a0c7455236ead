// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

#include "../report/page.hpp"

namespace compare {

// What --train found, in pictures.
[[nodiscard]] heed_report::Page training_page(const Settings& settings,
                                              const TrainingComparison& comparison);

}  // namespace compare
