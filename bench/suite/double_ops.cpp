// SPDX-License-Identifier: Apache-2.0
#include "ops.hpp"
#include "suite.hpp"

void heed_bench::add_double() { add_variants<double>("double"); }
