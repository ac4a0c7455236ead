// SPDX-License-Identifier: Apache-2.0
#include "op_runner.hpp"

namespace compare {

Runners make_double_runners(const RunnerSetup& setup, const TextInput& text) {
  return make_runners<double>(setup, text);
}

}  // namespace compare
