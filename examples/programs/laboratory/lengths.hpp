// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

#include <optional>
#include <string>

namespace compare {

// The spec of the same task with sequences `factor` times as long, for tests beyond the length of training; the questions
// stay the same. None for a task whose question depends on the length, for a `len` out of its range, and for a text. If
// sequences of a task differ in length, those of the longer task are longer than half of its `len`.
[[nodiscard]] std::optional<std::string> longer_spec(const std::string& spec, heed::Index factor);

}  // namespace compare
