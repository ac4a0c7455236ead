// SPDX-License-Identifier: Apache-2.0
#include "ops.hpp"
#include "suite.hpp"

void heed_bench::add_bfloat16() {
  add_variants<heed::bfloat16>("bf16", heed::Precision::mixed);
  add_variants<heed::bfloat16>("bf16-storage");
}
