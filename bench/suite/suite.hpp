// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace heed_bench {

void add_float();
void add_double();

}  // namespace heed_bench
