// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of a panel's queries: in lanes, as they are read from tensors and written to them, and by rows, as products over queries
// read them.

#include <heed/core/view.hpp>
#include <heed/engine/tile/place.hpp>
#include <heed/engine/tile/rows.hpp>
#include <heed/simd/transpose.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The rows of the queries at `place` in a tensor (batch, heads, queries, columns), as many columns as `to` has rows; zeros for a
// tensor that is not given.
template <class Real>
void pack_rows(const TensorView<const Real>& from, const TilePlace& place,
               const LaneTile<Real>& to) {
  if (to.rows == 0) return;
  if (!from.given()) return to.fill(Real(0));
  pack_lanes(from.row(place.batch, place.head, place.query), from.strides().row, place.rows,
             to.rows, to.data, to.lanes);
}
// The other way; nothing for a tensor that is not given.
template <class Real>
void unpack_rows(const LaneTile<Real>& from, const TilePlace& place, const TensorView<Real>& to) {
  if (to.given() && from.rows > 0)
    unpack_lanes(from.data, from.lanes, place.rows, from.rows,
                 to.row(place.batch, place.head, place.query), to.strides().row);
}
template <class Real>
void add_unpacked_rows(const LaneTile<Real>& from, const TilePlace& place,
                       const TensorView<Real>& to) {
  if (to.given() && from.rows > 0)
    add_unpacked_lanes(from.data, from.lanes, place.rows, from.rows,
                       to.row(place.batch, place.head, place.query), to.strides().row);
}

// Rows of a panel by rows, padded to whole vectors, with zeros behind the last of them.
template <class Real>
struct PanelRows {
  Real *memory = nullptr, *clean_memory = nullptr;  // [lanes][whole vectors]
  Rows<Real> rows, clean;                           // clean: without numbers that are not finite

  [[nodiscard]] bool given() const { return rows.count > 0; }
  // Copies rows, which may be these, times `factor`.
  void copy(const Rows<Real>& from, Index lanes, Real factor = Real(1)) {
    const Index padded = whole_vectors<Real>(from.columns);
    std::fill(memory + from.count * padded, memory + lanes * padded, Real(0));
    copy_rows(from, factor, memory, padded);
    rows = {memory, from.count, from.columns, padded};
  }
  // Copies the first `count` lanes.
  void copy(const LaneTile<Real>& from, Index count) {
    const Index padded = whole_vectors<Real>(from.rows);
    const Index written = padded == from.rows ? count : 0;  // rows without a gap
    std::fill(memory + written * padded, memory + from.lanes * padded, Real(0));
    unpack_lanes(from.data, from.lanes, count, from.rows, memory, padded);
    rows = {memory, count, from.rows, padded};
  }
  void clean_up() { clean = finite_copy(rows, clean_memory, rows.stride); }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
