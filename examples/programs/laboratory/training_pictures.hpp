// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "training.hpp"

#include "../report/page.hpp"

namespace compare {

// The page of pictures of a training comparison.
[[nodiscard]] heed_report::Page training_page(const Settings& settings,
                                              const TrainingComparison& comparison);

}  // namespace compare
