// SPDX-License-Identifier: Apache-2.0
#pragma once

// From gradients of what a score derives of a row back to the row, where the row, the parameters and the gradients all move.
// Of a row x, with d for "gradient of":
//
//   features f(x)       dx += df . df/dx                          by the features' vjp on dual numbers
//   entries e = W x     dx += W^T de                              dx. += W.^T de + W^T de.
//   transform t(x)      dx  = dt . dt/dx                          by the transform's vjp on dual numbers
//
// What features and transforms read of parameters and of numbers of tokens gets its gradients, with tangents, likewise.

#include <heed/engine/tangents.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Lanes of numbers and of their tangents.
template <class Real>
struct MovingLanes {
  LaneTile<Real> value, tangent;

  [[nodiscard]] static MovingLanes take(Scratch<Real>& scratch, Index rows, Index lanes) {
    const auto one = [&] { return LaneTile<Real>{scratch.take(rows * lanes), rows, lanes}; };
    const LaneTile<Real> value = one();
    return {value, one()};
  }
  void fill(Real x) const {
    value.fill(x);
    tangent.fill(x);
  }
  void add(Index r, int v, const MovingPack<Real>& x) const {
    value.add(r, v, x.value);
    tangent.add(r, v, tangent_of<Real>(x));
  }
};

// The same of side values of rows, or of their gradients. There is no projection: hvp() refuses it.
template <class Real>
struct MovingSides {
  SideTiles<Real> value, tangent;

  [[nodiscard]] static MovingSides take(Scratch<Real>& scratch, Index width, Index table_rows,
                                        Index inputs, Index lanes) {
    const auto one = [&] {
      return SideTiles<Real>::take(scratch, width, 0, table_rows, inputs, lanes);
    };
    const SideTiles<Real> value = one();
    return {value, one()};
  }
  void set_width(Index width) { value.x.rows = tangent.x.rows = width; }
  void fill(Real number) const {
    for (const SideTiles<Real>& tiles : {value, tangent})
      for (const LaneTile<Real>& tile : {tiles.x, tiles.table, tiles.input}) tile.fill(number);
  }
  [[nodiscard]] MovingLanes<Real> x() const { return {value.x, tangent.x}; }
};

// Rows and their tangents as the feature functions of a score see them; see LaneRow.
template <class Real>
struct MovingRow {
  using Scalar = MovingPack<Real>;
  LaneRow<Real> row;
  SideTiles<Real> tangent;

  [[nodiscard]] Index dim() const { return row.dim(); }
  [[nodiscard]] Index rank() const { return 0; }
  [[nodiscard]] Index table_rows() const { return row.table_rows(); }
  [[nodiscard]] Scalar x(Index c) const {
    return moving_pack(row.x(c), tangent.x.load(c, row.vector));
  }
  [[nodiscard]] Scalar projected(Index) const { return {}; }
  [[nodiscard]] Scalar table(Index m) const {
    return moving_pack(row.table(m), tangent.table.load(m, row.vector));
  }
  [[nodiscard]] Scalar input(Index c) const {
    return moving_pack(row.input(c), tangent.input.load(c, row.vector));
  }
  [[nodiscard]] Scalar index() const { return Scalar(row.index()); }
  [[nodiscard]] Scalar visible() const { return Scalar(row.visible()); }
};
// Where their gradients are added.
template <class Real>
struct MovingRowGrad {
  const MovingSides<Real>& to;
  int vector;

  void add_x(Index c, const MovingPack<Real>& g) const { to.x().add(c, vector, g); }
  void add_projected(Index, const MovingPack<Real>&) const {}
  void add_table(Index m, const MovingPack<Real>& g) const {
    MovingLanes<Real>{to.value.table, to.tangent.table}.add(m, vector, g);
  }
  void add_input(Index c, const MovingPack<Real>& g) const {
    MovingLanes<Real>{to.value.input, to.tangent.input}.add(c, vector, g);
  }
};

// Numbers of a head that score() reads, with their tangents.
template <class Score, class Real>
[[nodiscard]] ScalarsOf<Score, MovingPack<Real>> moving_scalars(
    const ScalarsOf<Score, Pack<Real>>& p, const ScalarsOf<Score, Pack<Real>>& tangents) {
  ScalarsOf<Score, MovingPack<Real>> moving;
  for (std::size_t i = 0; i < p.size(); ++i) moving[i] = moving_pack(p[i], tangents[i]);
  return moving;
}

// Adds df . df/drow to `to`, which holds the gradients of the row's table entries so far. Returns the tangents of the
// parameters' gradients. Rows that no pair has read may hold anything, and get 0.
template <class Side, class Score, class Real>
[[nodiscard]] ScalarsOf<Score, Pack<Real>> chain_moving_features(
    const Score& score, const MovingRow<Real>& row, const ScalarsOf<Score, MovingPack<Real>>& p,
    const Pack<Real>* df, const Pack<Real>* df_tangents, const MovingSides<Real>& to) {
  constexpr int count = Side::template count<Score>;
  const int v = row.row.vector;
  const auto idle =
      to.value.idle_lanes(df, count, v) & to.tangent.idle_lanes(df_tangents, count, v);
  MovingPack<Real> f[std::size_t(count + 1)], moving_df[std::size_t(count + 1)];
  for (int i = 0; i < count; ++i) moving_df[i] = moving_pack(df[i], df_tangents[i]);
  features_of<Side>(score, row, p, f);
  ScalarsOf<Score, MovingPack<Real>> dp{};
  features_vjp<Side>(score, row, p, f, moving_df, MovingRowGrad<Real>{to, v}, dp);
  to.value.clear_lanes(idle, v);
  to.tangent.clear_lanes(idle, v);
  ScalarsOf<Score, Pack<Real>> tangents;
  for (std::size_t i = 0; i < dp.size(); ++i)
    tangents[i] = zero_where(idle, tangent_of<Real>(dp[i]));
  return tangents;
}

// Adds W^T de to the gradients of the rows.
template <class Score, class Real>
void chain_moving_table(const Score&, const Real* table, const Real* table_tangent, int vectors,
                        const MovingSides<Real>& to) {
  SideTiles<Real> crossed = to.value;
  crossed.x = to.tangent.x;
  crossed.chain(nullptr, table_tangent, vectors);
  to.tangent.chain(nullptr, table, vectors);
  if constexpr (Score::has_transform) to.value.chain(nullptr, table, vectors);
}

// Sum over the rows of a vector, in every lane, of which `idle` ones and those from `count` on do not count.
template <class Real>
struct MovingLaneSum {
  decltype(Pack<Real>{} == Pack<Real>{}) idle;
  int vector;
  Index count;

  [[nodiscard]] MovingPack<Real> operator()(const MovingPack<Real>& terms) const {
    const auto sum = [&](Pack<Real> x) {
      return Pack<Real>(Real(sum_valid_lanes(zero_where(idle, x), vector, count)));
    };
    return moving_pack(sum(terms.value), sum(tangent_of<Real>(terms)));
  }
};

// The way back through a transform, and the gradients of its parameters, which it adds up; nothing for scores without one.
template <class Score, class Real>
class MovingTransformGradients {
 public:
  explicit MovingTransformGradients(const MovingTransform<Score, Real>& transform)
      : transform_(transform) {
    if constexpr (Score::has_transform) gradients_ = transform.score();
  }
  // Starts at zeros; before run().
  void begin() {
    if constexpr (Score::has_transform)
      visit_parameters(gradients_, [](const char*, auto& param) { param.set_zero(); });
  }
  // d, the gradients of transformed rows of head h from position `first` on, become those of the rows `before`, of which the
  // first `count` exist. Lanes of d that are 0 add nothing, whatever their row holds. `work` has room for the rows.
  void run(RowSide side, Index h, Index first, Index count, const MovingLanes<Real>& before,
           const MovingLanes<Real>& work, const MovingLanes<Real>& d) {
    if constexpr (Score::has_transform)
      for (int v = 0; v * kLanes<Real> < count; ++v) {
        const Pack<Real> zero = Real(0),
                         position = Pack<Real>::iota() + Real(first + v * kLanes<Real>);
        auto idle = zero == zero;
        for (Index c = 0; c < d.value.rows; ++c)
          idle = idle & (d.value.load(c, v) == zero) & (d.tangent.load(c, v) == zero);
        const MovingRowInPlace<Real> rows{work.value,
                                          work.tangent,
                                          v,
                                          position,
                                          before.value.constant(),
                                          before.tangent.constant()};
        rows.restore();
        transform_.score().transform_vjp(side, h, rows,
                                         MovingRowInPlace<Real>{d.value, d.tangent, v, position},
                                         MovingLaneSum<Real>{idle, v, count}, gradients_);
        for (const LaneTile<Real>& tile : {d.value, d.tangent})
          for (Index c = 0; c < tile.rows; ++c) tile.store(c, v, zero_where(idle, tile.load(c, v)));
      }
  }
  // f(n, tangent) for each parameter of the score, numbered as visit_parameters() meets them.
  template <class F>
  void for_each_tangent(F&& f) const {
    if constexpr (Score::has_transform) {
      Index n = 0;
      visit_parameters(gradients_, [&](const char*, const auto& param) {
        for (Index i = 0; i < param.size(); ++i) f(n++, tangent_of<Real>(param[i]).lane(0));
      });
    }
  }

 private:
  const MovingTransform<Score, Real>& transform_;
  typename MovingTransform<Score, Real>::Lifted gradients_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
