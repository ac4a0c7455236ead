// SPDX-License-Identifier: Apache-2.0
#include "op_runner.hpp"

namespace compare {

Runners make_double_runners(const RunnerSetup& setup, const TextInput& text) {
  return make_runners<double>(setup, text);
}

std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  heed::for_each_variant<double>(baseline_geometry({1, 1, 1, 2}),
                                 [&](const auto& variant) { names.emplace_back(variant.name); });
  return names;
}

}  // namespace compare
