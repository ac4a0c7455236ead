// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

#include <stdexcept>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Thrown where a layer cannot go on with a number that is not finite: not a mistake of the call, but of the
// numbers that training has come to.
struct NotFinite : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
