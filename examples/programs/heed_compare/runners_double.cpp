// SPDX-License-Identifier: Apache-2.0
#include "op_runner.hpp"

namespace compare {

Runners make_double_runners(const RunnerSetup& setup, const TextInput& text) {
  return make_runners<double>(setup, text);
}

std::vector<std::string> variant_names() { return heed::variant_names(); }
std::vector<std::string> zoo_names() { return zoo::variant_names(); }

}  // namespace compare
