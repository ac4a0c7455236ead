// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

#include <stdexcept>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Thrown where a layer cannot go on because a number is not finite. The call is right: training has led to such numbers.
struct NotFinite : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
