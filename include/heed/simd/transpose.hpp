// SPDX-License-Identifier: Apache-2.0
#pragma once

// Copies between row-major user memory and lane tiles. A lane tile holds column c of all rows one after the other,
// tile[c * lanes + row], with zeros behind the last row up to `lanes`.

#include <heed/simd/pack.hpp>

#include <algorithm>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// One stage of the transpose of a W x W block: swaps the off-diagonal blocks of size Half of two rows.
template <class Real, int Half, int... L>
[[gnu::always_inline]] inline void exchange(Pack<Real>& a, Pack<Real>& b,
                                            std::integer_sequence<int, L...>) {
  constexpr int W = kLanes<Real>;
  const auto low = __builtin_shufflevector(a.v, b.v, ((L & Half) ? W + L - Half : L)...);
  const auto high = __builtin_shufflevector(a.v, b.v, ((L & Half) ? W + L : L + Half)...);
  a = Pack<Real>(typename Pack<Real>::Vector(low));
  b = Pack<Real>(typename Pack<Real>::Vector(high));
}

template <class Real, int Half>
[[gnu::always_inline]] inline void transpose_stages(Pack<Real>* rows) {
  constexpr int W = kLanes<Real>;
  if constexpr (Half < W) {
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
      if (!(i & Half))
        exchange<Real, Half>(rows[i], rows[i + Half], std::make_integer_sequence<int, W>{});
    transpose_stages<Real, 2 * Half>(rows);
  }
}

// Sums lanes of several rows at once. Each pack holds a part of `2 * Half` lanes per row: the
// halves of each part are added, and the results of two packs join in one, until one pack is left.
// For each row these are the additions of sum_lanes(). The packs are overwritten.
template <class Real, int Half, int Count>
inline void add_halves(Pack<Real>* packs) {
  if constexpr (Count > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < Count / 2; ++i) {
      exchange<Real, Half>(packs[i], packs[i + Count / 2],
                           std::make_integer_sequence<int, kLanes<Real>>{});
      packs[i] += packs[i + Count / 2];
    }
    add_halves<Real, Half / 2, Count / 2>(packs);
  }
}

// Lane k of the result is sum_lanes() of packs[k]. The packs are overwritten.
template <class Real>
[[nodiscard]] inline Pack<Real> sums_of_lanes(Pack<Real> (&packs)[std::size_t(kLanes<Real>)]) {
  add_halves<Real, kLanes<Real> / 2, kLanes<Real>>(packs);
  return packs[0];
}

// destination[c][r] = source[r][c] * factor for one W x W block. Row is destination_row where a compiler knows it, else 0. Not
// inlined, since a compiler would move the computation of W row addresses out of the caller's loops, and has too few registers
// to hold them.
template <Index Row, class Real>
[[gnu::noinline]] void transpose_block(const Real* source, Index source_row, Real* destination,
                                       Index destination_row, Real factor) {
  constexpr int W = kLanes<Real>;
  Pack<Real> rows[std::size_t(W)];
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i)
    rows[i] = Pack<Real>::load(source + i * source_row) * Pack<Real>(factor);
  transpose_stages<Real, 1>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < W; ++i) rows[i].store(destination + i * (Row > 0 ? Row : destination_row));
}

// The same of `rows` rows, with zeros for the others.
template <class Real>
void transpose_few(const Real* source, Index source_row, Index rows, Real* destination,
                   Index destination_row, Real factor) {
  constexpr Index W = kLanes<Real>;
  Real block[std::size_t(W * W)] = {};
  for (Index r = 0; r < rows; ++r) Pack<Real>::load(source + r * source_row).store(block + r * W);
  transpose_block<0>(block, W, destination, destination_row, factor);
}
// destination[c][r] = source[r][c] for one W x W block, for the first `columns` columns only.
template <class Real>
void transpose_to_few(const Real* source, Index source_row, Index columns, Real* destination,
                      Index destination_row) {
  constexpr Index W = kLanes<Real>;
  Real block[std::size_t(W * W)];
  transpose_block<0>(source, source_row, block, W, Real(1));
  for (Index c = 0; c < columns; ++c)
    Pack<Real>::load(block + c * W).store(destination + c * destination_row);
}

}  // namespace detail

// tile[c][r] = factor * source[r][c] for r < rows, 0 for rows <= r < lanes. lanes: multiple of W.
template <class Real>
void pack_lanes(const Real* source, Index source_row, Index rows, Index columns, Real* tile,
                Index lanes, Real factor = Real(1)) {
  constexpr Index W = kLanes<Real>;
  const Index full_rows = rows / W * W, full_columns = columns / W * W;
  for (Index r = 0; r < full_rows; r += W) {
    if (lanes == kPanelLanes<Real>) {
      for (Index c = 0; c < full_columns; c += W)
        detail::transpose_block<kPanelLanes<Real>>(source + r * source_row + c, source_row,
                                                   tile + c * lanes + r, lanes, factor);
    } else {
      for (Index c = 0; c < full_columns; c += W)
        detail::transpose_block<0>(source + r * source_row + c, source_row, tile + c * lanes + r,
                                   lanes, factor);
    }
    for (Index c = full_columns; c < columns; ++c)
      for (Index i = r; i < r + W; ++i) tile[c * lanes + i] = factor * source[i * source_row + c];
  }
  if (full_rows == lanes) return;
  const Index behind = full_rows + (rows > full_rows ? W : 0);  // lanes of blocks with rows
  for (Index c = 0; c < columns; ++c)
    for (Index r = behind; r < lanes; ++r) tile[c * lanes + r] = Real(0);
  if (behind == full_rows) return;
  source += full_rows * source_row;
  tile += full_rows;
  for (Index c = 0; c < full_columns; c += W)
    detail::transpose_few(source + c, source_row, rows - full_rows, tile + c * lanes, lanes,
                          factor);
  for (Index c = full_columns; c < columns; ++c)
    for (Index r = 0; r < W; ++r)
      tile[c * lanes + r] = r < rows - full_rows ? factor * source[r * source_row + c] : Real(0);
}

// destination[r][c] = tile[c][r] for r < rows. lanes: multiple of W; lanes behind the last row are read, not used.
template <class Real>
void unpack_lanes(const Real* tile, Index lanes, Index rows, Index columns, Real* destination,
                  Index destination_row) {
  constexpr Index W = kLanes<Real>;
  const Index full_rows = rows / W * W, full_columns = columns / W * W;
  for (Index c = 0; c < full_columns; c += W) {
    for (Index r = 0; r < full_rows; r += W)
      detail::transpose_block<0>(tile + c * lanes + r, lanes, destination + r * destination_row + c,
                                 destination_row, Real(1));
    if (full_rows < rows)
      detail::transpose_to_few(tile + c * lanes + full_rows, lanes, rows - full_rows,
                               destination + full_rows * destination_row + c, destination_row);
  }
  for (Index c = full_columns; c < columns; ++c)
    for (Index r = 0; r < rows; ++r) destination[r * destination_row + c] = tile[c * lanes + r];
}

// destination[r][c] += tile[c][r] for r < rows.
template <class Real>
void add_unpacked_lanes(const Real* tile, Index lanes, Index rows, Index columns, Real* destination,
                        Index destination_row) {
  constexpr Index W = kLanes<Real>;
  Real turned[std::size_t(W * W)];
  for (Index r = 0; r < rows; r += W)
    for (Index c = 0; c < columns; c += W) {
      const Index width = std::min(W, columns - c), height = std::min(W, rows - r);
      unpack_lanes(tile + c * lanes + r, lanes, height, width, turned, W);
      for (Index i = 0; i < height; ++i) {
        Real* to = destination + (r + i) * destination_row + c;
        if (width == W)
          (Pack<Real>::load(to) + Pack<Real>::load(turned + i * W)).store(to);
        else
          for (Index k = 0; k < width; ++k) to[k] += turned[i * W + k];
      }
    }
}

}  // namespace HEED_ABI
}  // namespace heed
