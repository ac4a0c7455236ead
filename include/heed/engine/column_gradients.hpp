// SPDX-License-Identifier: Apache-2.0
#pragma once

// The way back through the sums over columns of a tile (plug/column_sums.hpp), on numbers, or, with DualLanes, on numbers that move.

#include <heed/engine/context.hpp>
#include <heed/engine/tile/place.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Room for the keys of a tile, at which packs begin anywhere (ColumnBack).
template <class Real>
[[nodiscard]] Index column_key_lanes(Index tile) {
  return whole_vectors<Real>(tile) + kLanes<Real>;
}

// Adds to dqueries, [width][lanes], and to dweights, [weights * columns][lanes]; dkeys, [width][column_key_lanes()], is set. pairs:
// those of a strip, pairs(strip).
template <class Real, class Lanes, class Pairs>
void columns_vjp(const CallContext<Real>& c, const TilePlace& at, Pairs&& pairs, const Lanes& dsums,
                 const LaneTile<Real>& hidden, const Lanes& dqueries, const Lanes& dkeys,
                 const Lanes& dweights) {
  const auto tiles = [](const Lanes& of, auto&& part) {
    ColumnTiles<Real> planes{part(of.plane(0))};
    if constexpr (Lanes::planes > 1) planes[1] = part(of.plane(1));
    return planes;
  };
  dkeys.fill(Real(0));
  for_strips(at, c.plan.vectors, [&](const Strip& strip) {
    const auto cells = [&](const LaneTile<Real>& of) { return strip.of(of); };
    const auto lanes = [&](const LaneTile<Real>& of) { return strip.lanes_of(of); };
    const auto keys = [&](const LaneTile<Real>& of) {
      return LaneTile<Real>{of.data + strip.keys.begin, of.rows, of.lanes};
    };
    const ColumnBack<Real> back{tiles(dsums, cells), hidden.data ? strip.of(hidden) : hidden,
                                tiles(dqueries, lanes), tiles(dkeys, keys), tiles(dweights, lanes)};
    const ColumnFormula<Real>& columns = *c.op.score.columns;
    if constexpr (Lanes::planes > 1)
      columns.vjp_tangents(pairs(strip), back);
    else
      columns.vjp(pairs(strip), back);
  });
}
// dK[key] += what columns_vjp() has left of keys part.begin, ...
template <class Real>
void add_column_keys(const LaneTile<Real>& sums, const KeyRange& part, Real* to, Index stride) {
  add_unpacked_lanes(sums.data + part.begin, sums.lanes, part.size(), sums.rows,
                     to + part.begin * stride, stride);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
