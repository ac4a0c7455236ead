// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where a tile of pairs lies, and which of its pairs are computed. A panel holds several vectors of queries; near the
// edge of a causal mask or of a window, some of its vectors see keys that the others do not. Each vector is computed
// with those keys alone that the bands and the key length leave to some query of it:
//
//   keys of the tile   0 ........ keys
//   vector 0           ####                 a panel of 4 vectors on the diagonal of a causal mask. Pairs at # are
//   vector 1           ########             computed, and masked where they are hidden; what the tile holds beside
//   vector 2           ############         them means nothing. Passes go vector by vector, products strip by strip
//   vector 3           ################     (for_strips)

#include <heed/core/function_ref.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/plug/tile.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

namespace heed {
inline namespace HEED_ABI {

// Vectors that are computed with the same keys: a strip of fewer than 8 keys costs more than it saves.
template <class Real>
inline constexpr int kStripVectors = kLanes<Real> >= 8 ? 1 : 8 / kLanes<Real>;

// Queries [query, query + rows), keys [key, key + keys) of head (b, h).
struct TilePlace {
  Index batch = 0, head = 0;
  Index query = 0, rows = 0;
  Index key = 0, keys = 0;
  // For each vector of queries: the range of keys, in the whole row, outside of which all its pairs are hidden.
  std::array<KeyRange, kPanelVectors> seen_by_vector = no_bounds();

  [[nodiscard]] KeyRange key_range() const { return {key, key + keys}; }
  // Keys of the tile, counted from its first, that vector v is computed with.
  [[nodiscard]] KeyRange keys_of(int v) const {
    const KeyRange& seen = seen_by_vector[std::size_t(v)];
    const Index begin = std::clamp<Index>(seen.begin - key, 0, keys);
    return {begin, std::clamp<Index>(seen.end - key, begin, keys)};
  }

 private:
  [[nodiscard]] static constexpr std::array<KeyRange, kPanelVectors> no_bounds() {
    std::array<KeyRange, kPanelVectors> all{};
    for (KeyRange& keys : all) keys.end = std::numeric_limits<Index>::max();
    return all;
  }
};

// Keys of a tile that the same vectors, side by side, are computed with.
struct Strip {
  KeyRange keys;
  int first_vector, vectors;

  // The strip's cells of a tile [keys][lanes], and its lanes of rows [anything][lanes].
  template <class Real>
  [[nodiscard]] LaneTile<Real> of(const LaneTile<Real>& tile) const {
    return lanes_of(tile.part(keys.begin, keys.size()));
  }
  template <class Real>
  [[nodiscard]] LaneTile<Real> lanes_of(const LaneTile<Real>& rows) const {
    return rows.from_vector(first_vector);
  }
};

// body(strip) for strips that make up the computed pairs of a tile, each pair in one of them. Keys of a later vector begin and end
// no earlier, as bands have them, so that vectors that share keys lie side by side.
inline void for_strips(const TilePlace& at, int vectors, FunctionRef<const Strip&> body) {
  std::array<KeyRange, kPanelVectors> keys;  // of each vector
  for (int v = 0; v < vectors; ++v) keys[std::size_t(v)] = at.keys_of(v);
  for (Index from = 0, to; from < at.keys; from = to) {
    to = at.keys;  // or the next key at which some vector begins or ends
    unsigned met = 0;
    for (int v = 0; v < vectors; ++v) {
      const auto [begin, end] = keys[std::size_t(v)];
      if (begin > from) to = std::min(to, begin);
      if (end > from) to = std::min(to, end);
      met |= unsigned(begin <= from && from < end) << v;
    }
    if (met == 0) continue;
    const int first = std::countr_zero(met);
    body(Strip{{from, to}, first, std::countr_one(met >> first)});
  }
}

// The cells of a tile that are not computed.
template <class Real>
void fill_skipped(const TilePlace& at, int vectors, const LaneTile<Real>& tile, Real value) {
  for (int v = 0; v < vectors; ++v) {
    const KeyRange computed = at.keys_of(v);
    for (Index j = 0; j < computed.begin; ++j) tile.store(j, v, value);
    for (Index j = computed.end; j < at.keys; ++j) tile.store(j, v, value);
  }
}

}  // namespace HEED_ABI
}  // namespace heed
