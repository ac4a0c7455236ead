// SPDX-License-Identifier: Apache-2.0
#pragma once

// The version of these headers. `.github/CHANGELOG.md` says what a version promises.

#include <heed/core/config.hpp>

namespace heed {
inline namespace HEED_ABI {

// 10000 a + 100 b + c for version a.b.c: static_assert(heed::kVersion >= 100) asks for 0.1.0 or later.
inline constexpr int kVersion = 100;
inline constexpr const char* kVersionText = "0.1.0";

}  // namespace HEED_ABI
}  // namespace heed
