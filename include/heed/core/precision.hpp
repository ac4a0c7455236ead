// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

namespace heed {
inline namespace HEED_ABI {

// What products are computed with: q.k and weights times values, and backward's products with queries, keys, values
// and the gradient of the output. All else, above all scores and what becomes of them, is computed in the op's Real.
enum class Precision {
  storage,  // the op's Real
  mixed     // for ops of float: numbers rounded to bfloat16, sums of their products in float
};

}  // namespace HEED_ABI
}  // namespace heed
