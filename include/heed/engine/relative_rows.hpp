// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tables of which a pair reads the row of its distance (table_clip() in plug/score.hpp), as Shaw's q . r(i - j):
//
//   G = R Q^T          once per panel of queries: [row][lane]
//   table_ij = G[clip(i - j)][i]
//
// The lanes i, i + 1, ... of one key read neighbouring rows. G is therefore laid out once more, a diagonal in each vector:
//
//   by_lane[place(d)][lane k] = G[clip(d + k)][k]       d = i - j of the vector's lane 0
//
// so that a pair costs a load, and backward a load and a store. In backward dG is added up in the same way, then
//
//   dQ^T += R^T dG          dR += dG Q
//
// Cost    of queries, beside len_kv keys: 2 clip + 1 more products forward, and twice as many backward.
//         With clip 16, 64, 128 forward took 1.12, 1.21, 1.14 and backward 1.13, 1.26, 1.30 times that of plain attention (4
//         heads, len 2,048, dim 64, float, one thread, AVX2; medians on a busy machine).
// Memory  per worker and panel 4 clip + W + 1 numbers per lane forward, twice as many backward; per call heads (2 clip + 1)
//         dim_qk, and as many doubles times twice the threads backward.
// Source  P. Shaw et al. 2018, "Self-Attention with Relative Position Representations", equation 5.

#include <heed/plug/tile.hpp>
#include <heed/simd/scratch.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {

// Where the vector whose lane 0 is at `distance` from its key reads. Beyond the clip in both directions all lanes read the
// last row.
template <class Real>
[[nodiscard, gnu::always_inline]] inline Index relative_place(Index clip, Index distance) {
  constexpr Index reach = kLanes<Real> - 1;
  return std::clamp(distance, -clip - reach, clip) + clip + reach;
}

// Places of the vectors of a table of so many rows, and room for them.
template <class Real>
[[nodiscard]] Index relative_places(Index table_rows) {
  return table_rows + kLanes<Real> - 1;
}
template <class Real>
[[nodiscard]] LaneTile<Real> take_relative(Scratch<Real>& scratch, Index table_rows, Index lanes) {
  return LaneTile<Real>::take(scratch, relative_places<Real>(table_rows), lanes);
}

// The clip of a table whose vectors take so many rows.
template <class Real>
[[nodiscard, gnu::always_inline]] inline Index clip_of(Index places) {
  return (places - kLanes<Real>) / 2;
}

// f(place, lane, row) for every number of a vector of by_lane and the row of the table that it stands for.
template <class Real, class F>
void for_each_relative(Index places, F&& f) {
  constexpr Index W = kLanes<Real>;
  const Index rows = places - (W - 1);
  for (Index n = 0; n < places; ++n)
    for (Index k = 0; k < W; ++k) f(n, k, std::clamp<Index>(n + k - (W - 1), 0, rows - 1));
}

// by_lane from the products of a panel with the table.
template <class Real>
void lay_out_by_lane(const LaneTile<Real>& table, int vectors, const LaneTile<Real>& by_lane) {
  for (int v = 0; v < vectors; ++v)
    for_each_relative<Real>(by_lane.rows, [&](Index n, Index k, Index row) {
      by_lane.row(n)[v * kLanes<Real> + k] = table.row(row)[v * kLanes<Real> + k];
    });
}
// The way back: adds the gradients of by_lane to those of the products.
template <class Real>
void add_from_lanes(const LaneTile<Real>& by_lane, int vectors, const LaneTile<Real>& table) {
  for (int v = 0; v < vectors; ++v)
    for_each_relative<Real>(by_lane.rows, [&](Index n, Index k, Index row) {
      table.row(row)[v * kLanes<Real> + k] += by_lane.row(n)[v * kLanes<Real> + k];
    });
}

}  // namespace HEED_ABI
}  // namespace heed
