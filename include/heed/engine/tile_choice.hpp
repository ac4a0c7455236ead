// SPDX-License-Identifier: Apache-2.0
#pragma once

// How wide tiles of keys should be under a mask that hides pairs in blocks: a tile is skipped where it is hidden as
// a whole, and wide ones straddle more blocks.

#include <heed/mask/bound_mask.hpp>

#include <algorithm>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

struct TileChoice {
  Index keys = 0;  // per tile
  double fraction =
      0;  // of all pairs, that such tiles compute; 0 where there was nothing to look at
  double wide_fraction = 0;  // the same of tiles of the width that was offered
};

// Keys per block that tiles are made of: kTileBlock, or those of the blocks of the caller's lists, where no such tile
// ends with them.
inline constexpr Index kTileBlock = 64;
template <class Real>
[[nodiscard]] Index tile_block(const BoundMask<Real>& mask, Index lanes) {
  const Index block = mask.rule_block();
  const bool fits = block > kTileBlock && block <= 4 * kTileBlock && block % lanes == 0;
  return fits && block % kTileBlock != 0 ? block : kTileBlock;
}

// Which of the blocks of `block` keys some query of a panel sees.
template <class Real>
[[nodiscard]] std::vector<char> seen_blocks(const BoundMask<Real>& mask, const Geometry& g,
                                            Index block, Index b, Index h, Index first,
                                            Index rows) {
  std::vector<char> seen;
  for (Index j = 0; j < g.len_kv; j += block)
    seen.push_back(mask.classify(b, h, first, rows, j, std::min(block, g.len_kv - j)) !=
                   TileKind::empty);
  return seen;
}

// Keys in those tiles of `tile` keys that hold a seen block of `block` keys.
[[nodiscard]] inline double computed_keys(const std::vector<char>& seen, Index block, Index tile) {
  const std::ptrdiff_t step = std::max<Index>(1, tile / block);
  double keys = 0;
  for (auto from = seen.begin(); from < seen.end();) {
    const auto to = seen.end() - from > step ? from + step : seen.end();
    if (std::find(from, to, char(1)) != to) keys += double((to - from) * block);
    from = to;
  }
  return keys;
}

// `wide` keys per tile, or four, two or one of the blocks of tile_block() keys, where they save a tenth of the work;
// a multiple of `lanes`. A function of shapes and mask, of which it looks at a few panels of `lanes` queries.
template <class Real>
[[nodiscard]] TileChoice choose_key_tile(const BoundMask<Real>& mask, const Geometry& g,
                                         Index lanes, Index wide) {
  constexpr Index kLooks = 16;
  constexpr double kTileCost = 16;  // of a tile by itself, in keys
  TileChoice best{wide, 0, 0};
  const Index panels = (g.len_q + lanes - 1) / lanes, all = g.batch * g.heads * panels;
  if (all == 0 || g.len_kv <= kTileBlock ||
      !(mask.has_allowed() || mask.has_documents() || mask.has_rules()))
    return best;
  const Index block = tile_block(mask, lanes);
  std::vector<std::vector<char>> looks;
  for (Index i = 0; i < std::min(kLooks, all); ++i) {
    const Index unit = i * all / std::min(kLooks, all), first = unit % panels * lanes;
    looks.push_back(seen_blocks(mask, g, block, unit / panels / g.heads, unit / panels % g.heads,
                                first, std::min(lanes, g.len_q - first)));
  }
  const auto fraction = [&](Index tile) {
    double keys = 0, whole = 0;
    for (const auto& seen : looks) {
      keys += computed_keys(seen, block, tile);
      whole += double(Index(seen.size()) * block);
    }
    return keys / whole;
  };
  const auto cost = [&](Index tile, double computed) {
    return computed * (1 + kTileCost / double(tile));
  };
  best.fraction = best.wide_fraction = fraction((wide + block - 1) / block * block);
  double least = 0.9 * cost(wide, best.fraction);
  for (Index tile = 4 * block; tile >= std::max(block, lanes); tile /= 2) {
    const double computed = fraction(tile);
    if (tile >= wide || cost(tile, computed) >= least) continue;
    least = cost(tile, computed);
    best.keys = tile;
    best.fraction = computed;
  }
  return best;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
