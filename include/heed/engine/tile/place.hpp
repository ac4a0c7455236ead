// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

namespace heed {
inline namespace HEED_ABI {

// Where a tile lies: queries [query, query + rows), keys [key, key + keys) of head (b, h).
struct TilePlace {
  Index batch = 0, head = 0;
  Index query = 0, rows = 0;
  Index key = 0, keys = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
