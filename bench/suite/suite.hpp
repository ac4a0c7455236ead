// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace heed_bench {

void add_float();
void add_double();
void add_bfloat16();
void add_caches();
void add_zoo();
void add_layer();

// Prints the table of --tune; takes minutes.
void tune();

}  // namespace heed_bench
