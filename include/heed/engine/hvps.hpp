// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine asks of an op in forward over backward, beside what it asks in backward (vjps.hpp) and in forward mode
// (jvps.hpp): how the vector-Jacobian products of its score move. op_hvps.hpp makes them of any op that hvp() carries.
//
//   once per call        slope() of numbers of tokens that are summed
//   once per panel       features_vjp() of queries, transform_vjp()
//   once per 64 keys     features_vjp() of keys, transform_vjp()
//   once per tile        scores_vjp()

#include <heed/engine/jvps.hpp>
#include <heed/engine/vjps.hpp>

#include <memory>

namespace heed {
inline namespace HEED_ABI {

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

// A tile on its way back, as ScoreBack, and how it moves.
template <class Real>
struct MovingBack {
  MovingLanes<Real> dscores;  // in: dL/dscore; out: dL/d(q.k), over CallContext::row_factor()
  LaneTile<Real> hidden;  // -infinity where a pair is hidden, else 0; data is null where none is
  Real *key_lanes, *key_tangent_lanes;    // out, [key_features][keys][W]
  MovingLanes<Real> dfeatures;            // add, [query_features][lanes]
  LaneTile<Real> dscalar_tangents;        // add, [scalars][lanes]
  MovingLanes<Real> dtable;               // add, shaped as ScoreTile::table
  PositionSums<Real>* position_tangents;  // add
  Real logit_part;
};

// Gradients of the parameters that a transform reads, and their tangents, which the score alone knows.
template <class Real>
class MovingGradient {
 public:
  virtual ~MovingGradient() = default;
  virtual void set_zero() = 0;
  // Adds the tangents to sums[0], sums[1], ..., in the order in which the score names its parameters.
  virtual void add_tangents_to(double* sums) const = 0;
};

template <class Real>
class ScoreHvps {
 public:
  virtual ~ScoreHvps() = default;
  // Hidden pairs contribute nothing. `moved`: the tangents of the scaled dot products, which stay.
  virtual void scores_vjp(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved,
                          const MovingBack<Real>& back) const = 0;
  // Adds df . df/drow to `grads`, which hold the gradients of the rows' table entries so far, and the tangents of what they
  // owe to p to dscalars, [scalar][lane]. Rows that no pair has read may hold anything, and get 0.
  virtual void features_vjp(RowSide side, const MovingSides<Real>& rows, Index h, Index first,
                            const Real* visible, int vectors, const MovingLanes<Real>& dfeatures,
                            const MovingSides<Real>& grads,
                            const LaneTile<Real>& dscalar_tangents) const = 0;
  // Null for scores without a transform.
  [[nodiscard]] virtual std::unique_ptr<MovingGradient<Real>> transform_gradient() const = 0;
  // d, the gradients of transformed rows, become those of `before`, of which the first `count` exist. Lanes of d that are 0
  // add nothing, whatever their row holds. `work` has room for the rows.
  virtual void transform_vjp(RowSide side, Index h, Index first, Index count,
                             const MovingLanes<Real>& before, const MovingLanes<Real>& work,
                             const MovingLanes<Real>& d, MovingGradient<Real>& grad) const = 0;
  // The slope of summand(), and how it moves with x.
  [[nodiscard]] virtual Moving slope(const Moving& x) const = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
