// SPDX-License-Identifier: Apache-2.0
#include "op_runner.hpp"

namespace compare {

Runners make_float_runners(const RunnerSetup& setup, const TextInput& text) {
  return make_runners<float>(setup, text);
}

}  // namespace compare
