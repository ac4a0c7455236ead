// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tile sizes, scratch and workers of a call: a function of shapes and mask, so that results never depend on
// the number of threads.

#include <heed/core/parallel.hpp>
#include <heed/engine/call.hpp>
#include <heed/engine/tile_choice.hpp>

namespace heed {
inline namespace HEED_ABI {

// Level-2 cache that tiles are sized for: what current x86 and Arm server cores have at least.
inline constexpr Index kCacheBytes = Index(1) << 20;
// Scratch of a worker among many. Up to eight share that of eight: where one worker needs more than its share, fewer run.
inline constexpr Index kWorkerBytes = Index(12) << 20;

// Width of a group of panels that share one pass over keys and values, in bytes of one number per query: that of one
// AVX-512 panel. Wider groups gain nothing, and leave less for other threads.
inline constexpr Index kGroupBytes = 256;
// In mixed precision the panels of a group also share the pairs of keys and values: to pair a row of d numbers takes some
// d / 8 instructions on AVX-512, its product with a panel 2 d. Groups are so many times as wide in forward, and half of
// that in backward, which keeps dscores and weights of all panels of a group.
inline constexpr Index kBf16Groups = 4;

struct Plan {
  int vectors = kPanelVectors;  // per panel
  Index lanes = 0;              // queries per panel
  Index tile = 0;               // keys per tile; a multiple of lanes
  Index tiles = 0;              // tiles of a whole row
  Index group = 1;              // panels that a worker takes through the tiles together
  Index panels = 0;             // panels per head
  Index wide_tile = 0;  // keys per tile, had not the mask asked for fewer; 0 where it has not
  double fraction = 0,
         wide_fraction = 0;  // of all pairs, that either computes; 0 where nobody looked

  [[nodiscard]] Index span_keys(bool streams, Index len_kv) const {
    return streams ? std::min(tile, len_kv) : len_kv;
  }
};

namespace detail {

// Keys per tile: panel scratch and one tile of K and V in half of the cache; in forward, with 16
// registers, in a quarter: such processors often have 512 KiB. Narrow panels finish a tile soon, and
// gain from scores that stay in the first level.
template <class Real>
[[nodiscard]] Index natural_tile(const Geometry& g, Index lanes, bool backward) {
  const Index size = Index(sizeof(Real)), width = g.dim_qk + g.dim_v;
  const Index fixed = (backward ? 2 : 1) * lanes * width * size;
  const Index per_key = ((backward ? 3 : 1) * lanes + (backward ? 2 : 1) * width) * size;
  const bool small = kRegisters == 16 && !backward;
  return std::clamp<Index>((kCacheBytes / (small ? 4 : 2) - fixed) / per_key, 96,
                           backward ? 192
                           : small  ? 256
                                    : 512);
}

}  // namespace detail

// row_tiles: scratch tiles [len_kv][lanes] that a row normaliser keeps; 0 for streaming ones.
// page_rows: what tiles must divide, 0 for memory in one piece.
template <class Real>
[[nodiscard]] Plan make_plan(const Geometry& g, const BoundMask<Real>& mask, const Options& options,
                             Index row_tiles, Index page_rows, bool backward) {
  Plan plan;
  if (options.panel_vectors > 0) {
    plan.vectors = options.panel_vectors;
  } else {
    // Whole rows stay near the cache on narrower panels; twice its size is what still gains from wide ones (measured
    // on AVX-512, bench/NOTES.md). A single vector is for rows that would keep other workers from running: its products
    // reach two thirds of the speed only.
    const Index row_bytes = row_tiles * g.len_kv * kLanes<Real> * Index(sizeof(Real));
    while (plan.vectors > 2 && row_bytes * plan.vectors > 2 * kCacheBytes) plan.vectors /= 2;
    while (plan.vectors > 1 && row_bytes * plan.vectors > kWorkerBytes) plan.vectors /= 2;
    // Short sequences fill no panel.
    while (plan.vectors > 1 && g.len_q <= (plan.vectors / 2) * kLanes<Real>) plan.vectors /= 2;
  }
  if (page_rows > 0 && plan.vectors == 3) plan.vectors = 2;  // tiles of three fill no page
  plan.lanes = plan.vectors * kLanes<Real>;
  const auto whole_panels = [&](Index keys) {
    return std::max<Index>(1, (keys + plan.lanes / 2) / plan.lanes) * plan.lanes;
  };
  // No tile is wider than the row, nor a page.
  const Index longest = (g.len_kv / plan.lanes + 1) * plan.lanes;
  const Index most = page_rows > 0 ? page_rows : longest;
  if (options.key_tile > 0) {
    plan.tile = whole_panels(std::min(options.key_tile, most));
  } else {
    const Index natural = whole_panels(detail::natural_tile<Real>(g, plan.lanes, backward));
    const detail::TileChoice choice =
        detail::choose_key_tile(mask, g, plan.lanes, std::min(natural, most));
    plan.tile = whole_panels(choice.keys);
    plan.fraction = choice.fraction;
    plan.wide_fraction = choice.wide_fraction;
    if (choice.keys < std::min(natural, most)) plan.wide_tile = std::min(natural, most);
  }
  if (page_rows > 0)
    while (page_rows % plan.tile != 0) plan.tile -= plan.lanes;
  plan.tiles = (g.len_kv + plan.tile - 1) / plan.tile;
  plan.panels = (g.len_q + plan.lanes - 1) / plan.lanes;
  // Whole rows of a group fill no more than the cache.
  const bool mixed = options.precision.mixes();
  const Index wider = !mixed ? 1 : backward ? kBf16Groups / 2 : kBf16Groups;
  Index group = wider * kGroupBytes / (plan.lanes * Index(sizeof(Real)));
  const Index row_bytes = row_tiles * g.len_kv * plan.lanes * Index(sizeof(Real));
  if (row_bytes > 0) group = backward ? 1 : std::min(group, kCacheBytes / row_bytes);
  const Index companions = (backward ? 1 : g.group()) * plan.panels;
  plan.group = std::max<Index>(1, std::min(group, companions));
  return plan;
}

// Where the caller leaves the number of threads open, a worker gets at least this many flops: some 20
// microseconds, so that waking a thread is not the larger part.
inline constexpr double kWorkerFlops = 2e6;

// Parts into which the keys of each key-value head's readers are split where there are few of these, so that all
// threads have work; 1 elsewhere. A part has kPartKeys keys at least. It follows from the sizes alone.
inline constexpr Index kPartKeys = 4096, kPartUnits = 32;
[[nodiscard]] inline Index parts_of_keys(Index units, Index len_kv) {
  return std::clamp<Index>(kPartUnits / std::max<Index>(1, units), 1,
                           std::max<Index>(1, len_kv / kPartKeys));
}

// Flops of forward's products, had it no mask.
[[nodiscard]] inline double product_flops(const Geometry& g) {
  return 2.0 * double(g.query_rows()) * double(g.len_kv) * double(g.dim_qk + g.dim_v);
}
// As many of `threads` workers as may have `bytes` of scratch each, at least one.
[[nodiscard]] inline Index affordable_workers(Index threads, Index bytes) {
  const Index all = std::max<Index>(8, threads) * kWorkerBytes;
  return std::clamp<Index>(all / std::max<Index>(1, bytes), 1, std::max<Index>(1, threads));
}

// Workers for `units` units of work that need `bytes` of scratch each.
[[nodiscard]] inline int worker_count(const Options& options, double flops, Index units,
                                      Index bytes) {
  const Index threads = resolve_threads(options.threads);
  const Index affordable = affordable_workers(threads, bytes);
  const Index worthwhile = options.threads > 0 ? threads : Index(1.0 + flops / kWorkerFlops);
  return int(std::max<Index>(1, std::min({units, affordable, worthwhile})));
}
[[nodiscard]] inline int worker_count(const Options& options, const Geometry& g, Index units,
                                      Index bytes) {
  return worker_count(options, product_flops(g), units, bytes);
}

}  // namespace HEED_ABI
}  // namespace heed
