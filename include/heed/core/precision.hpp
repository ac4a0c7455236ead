// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

namespace heed {
inline namespace HEED_ABI {

// How large products are computed.
enum class Precision {
  storage,  // in the type of the arithmetic: float or double, whatever tensors are stored as
  mixed,    // operands are rounded to bfloat16, products added up in float; in float alone
};

}  // namespace HEED_ABI
}  // namespace heed
