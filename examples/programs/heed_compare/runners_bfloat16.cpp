// SPDX-License-Identifier: Apache-2.0
#include "op_runner.hpp"

namespace compare {

Runners make_bfloat16_runners(const RunnerSetup& setup, const TextInput& text) {
  return make_runners<heed::bfloat16>(setup, text);
}

}  // namespace compare
