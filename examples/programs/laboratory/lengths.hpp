// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

#include <optional>
#include <string>

namespace compare {

// The spec of the same task with sequences `factor` times as long, for tests beyond the length of training; what is asked
// for stays. None for a task where another length is another question, where `len` would leave its range, and for a text.
// Of tasks whose sequences differ in length, those of the longer task are longer than half of its `len`.
[[nodiscard]] std::optional<std::string> longer_spec(const std::string& spec, heed::Index factor);

}  // namespace compare
