// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lane tiles, the form in which engine and variants exchange numbers. Queries run along the lanes, everything else along
// the rows: row r of a tile is `lanes` consecutive numbers, one per query of the panel.

#include <heed/simd/pack.hpp>
#include <heed/simd/scratch.hpp>

#include <algorithm>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// Lanes that do not see the key, whose score is -infinity there.
template <class Real>
[[nodiscard]] inline auto is_hidden(Pack<Real> score) {
  return score == Pack<Real>(-kInfinity<Real>);
}

// Rows of lanes in scratch memory.
template <class Real>
struct LaneTile {
  using P = Pack<std::remove_const_t<Real>>;
  Real* data = nullptr;
  Index rows = 0;
  Index lanes = 0;  // distance between rows; a multiple of the vector width

  [[nodiscard]] Real* row(Index r) const { return data + r * lanes; }
  [[nodiscard]] P load(Index r, int v) const { return P::load(row(r) + v * P::width); }
  void store(Index r, int v, P p) const { p.store(row(r) + v * P::width); }
  void add(Index r, int v, P p) const { store(r, v, load(r, v) + p); }
  void fill(Real value) const { std::fill(data, data + rows * lanes, value); }
  [[nodiscard]] LaneTile<const Real> constant() const { return {data, rows, lanes}; }
  operator LaneTile<const Real>() const requires(!std::is_const_v<Real>) { return constant(); }
  [[nodiscard]] LaneTile part(Index first, Index count) const { return {row(first), count, lanes}; }
  // The same rows from vector v on.
  [[nodiscard]] LaneTile from_vector(int v) const { return {data + v * P::width, rows, lanes}; }

  // Numbers that move have two planes, numbers and tangents (engine/derived_tiles.hpp); these are one.
  static constexpr int planes = 1;
  [[nodiscard]] const LaneTile& plane(int) const { return *this; }
  template <class Scratch>
  [[nodiscard]] static LaneTile take(Scratch& scratch, Index rows, Index lanes) {
    return {scratch.take(rows * lanes), rows, lanes};
  }
};

template <class Real>
[[nodiscard]] LaneTile<Real> take_lanes(Scratch<Real>& scratch, Index rows, Index lanes) {
  return {scratch.take(rows * lanes), rows, lanes};
}

// Sum of the first `count` lanes, in double: lane-wise parameter gradients are reduced so.
template <class Real>
[[nodiscard]] inline double sum_valid_lanes(const Real* lanes, Index count) {
  double sum = 0.0;
  for (Index i = 0; i < count; ++i) sum += double(lanes[i]);
  return sum;
}
// The same for vector v of a panel with `valid` valid lanes.
template <class Real>
[[nodiscard]] inline double sum_valid_lanes(Pack<Real> x, int v, Index valid) {
  Real lanes[kLanes<Real>];
  x.store(lanes);
  return sum_valid_lanes(lanes, std::clamp<Index>(valid - v * kLanes<Real>, 0, kLanes<Real>));
}

// The rows of W queries or keys, in the form that a score's feature functions read: one pack per column.
//   x(c)          column c of the row, c < dim
//   projected(c)  column c of row * projection, c < rank
//   table(m)      dot product of the row with row m of the score's table, m < table_rows
//   index()       position of the row: j of key j, Inputs::first_query + i of query i
//   visible()     for queries: number of keys that it sees, if the score has counts_visible
//   input(c)      number c of the token, if the score declares it (plug/token_inputs.hpp)
template <class Real, class Tile = LaneTile<const Real>>
struct LaneRow {
  using Scalar = typename Tile::P;
  Tile x_tile, projected_tile, table_tile;
  int vector = 0;
  Pack<Real> position = Real(0), seen = Real(0);
  Tile input_tile = {};

  [[nodiscard]] Index dim() const { return x_tile.rows; }
  [[nodiscard]] Index rank() const { return projected_tile.rows; }
  [[nodiscard]] Index table_rows() const { return table_tile.rows; }
  [[nodiscard]] Scalar x(Index c) const { return x_tile.load(c, vector); }
  [[nodiscard]] Scalar projected(Index c) const { return projected_tile.load(c, vector); }
  [[nodiscard]] Scalar table(Index m) const { return table_tile.load(m, vector); }
  [[nodiscard]] Scalar index() const { return Scalar(position); }
  [[nodiscard]] Scalar visible() const { return Scalar(seen); }
  [[nodiscard]] Scalar input(Index c) const { return input_tile.load(c, vector); }
};

// The memory to which the gradients of a LaneRow are added.
template <class Real, class Tile = LaneTile<Real>>
struct LaneRowGrad {
  using Scalar = typename Tile::P;
  Tile x_tile, projected_tile, table_tile;
  int vector = 0;
  Tile input_tile = {};

  void add_x(Index c, const Scalar& g) const { x_tile.add(c, vector, g); }
  void add_projected(Index c, const Scalar& g) const { projected_tile.add(c, vector, g); }
  void add_table(Index m, const Scalar& g) const { table_tile.add(m, vector, g); }
  void add_input(Index c, const Scalar& g) const { input_tile.add(c, vector, g); }
};

enum class RowSide { query, key };

// Vector v of rows in lanes, to be transformed in place.
template <class Real, class Tile = LaneTile<Real>>
struct LaneRowInPlace {
  using Scalar = typename Tile::P;
  Tile tile;
  decltype(tile.constant()) before;  // the rows that restore() brings back
  int vector = 0;
  Pack<Real> position = Real(0);

  [[nodiscard]] Index dim() const { return tile.rows; }
  [[nodiscard]] Scalar operator()(Index c) const { return tile.load(c, vector); }
  void set(Index c, const Scalar& x) const { tile.store(c, vector, x); }
  [[nodiscard]] Scalar index() const { return Scalar(position); }
  void restore() const {
    for (Index c = 0; c < dim(); ++c) set(c, before.load(c, vector));
  }
};

}  // namespace HEED_ABI
}  // namespace heed
