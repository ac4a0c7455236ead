// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace heed_bench {

void add_eigen();
void add_blas();   // where OpenBLAS is installed
void add_torch();  // where libtorch is installed

}  // namespace heed_bench
