// SPDX-License-Identifier: Apache-2.0

// The variants of examples/zoo, in float.

#include "ops.hpp"
#include "suite.hpp"

#include <zoo/zoo.hpp>

void heed_bench::add_zoo() {
  for (const Case& c : cases())
    zoo::for_each_zoo_variant<float>(
        c.geometry(), [&](const auto& variant) { add_variant<float>(variant, c, "float"); });
}
