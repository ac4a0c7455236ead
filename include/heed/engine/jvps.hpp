// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the engine asks of an op in forward mode, beside what it asks in forward (tiles.hpp): the Jacobian-vector products of its
// parts along one direction of the parameters. op_jvps.hpp makes them of any op. A dot over a number is its derivative along the
// direction: its tangent.
//
//   once per call        tangents of tables, of the readout of all rows
//   once per panel       features() and transform() of queries, pull(), weights() of whole rows
//   once per 64 keys     features() and transform() of keys
//   once per tile        scores(), weigh()

#include <heed/autodiff/dual.hpp>
#include <heed/engine/dual_lanes.hpp>
#include <heed/engine/tiles.hpp>

namespace heed {
inline namespace HEED_ABI {

// A number and its tangent.
using DualNumber = Dual<double, 1>;

// The tangents of the pairs of a ScoreTile:
//
//   x.(scaled dot) = factor (q. k + q k.)
//   logit. = keep x. (1 - (logit/cap)^2)                   the second factor of a soft cap only
//   score. = sum_x (dscore/dx) x. + sum_i (dscore/dp_i) p._i
template <class Real>
struct ScoreTangentTile {
  LaneTile<Real> tangents;  // [keys][lanes], in: of the scaled dot products; out: of the scores
  const Real* scalars;      // of p[0], p[1], ...
  LaneTile<const Real> features;  // [query_features][lanes]
  const Real*
      key_features;  // laid out as ScoreTile::key_features, feature i `key_stride` further on
  Index key_stride;
  LaneTile<Real> projected;  // of projected dot products; data is null without a projection
  LaneTile<Real> table;      // shaped as ScoreTile::table
  const PositionTable<Real>* positions;
};

template <class Real>
class ScoreJvps : public RowFormulas<Real, DualLanes<Real>> {
 public:
  const ColumnFormula<Real>* columns = nullptr;  // as ScoreTiles, with the tangents of its weights

  // Does a parameter move that the transform may read?
  [[nodiscard]] virtual bool transform_moves() const = 0;
  // Cells of hidden pairs mean nothing.
  virtual void scores(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved) const = 0;
};

// With s. the tangents of scores, w the weights and mixed = w V, a streaming normaliser's dscore() gives, by dL/ds_j = A_j G_j +
// B_j delta and delta = sum_k w_k G_k - dL/dlse,
//
//   mixed. = sum_j (A_j s_j.) v_j + w_j v_j. + U mixed,   lse. = -U,   U = sum_k B_k s_k. + what its parameters pull
template <class Real>
class NormaliserJvps {
 public:
  LearntOfOp<Real> learnt;  // tangents of learnt keys

  virtual ~NormaliserJvps() = default;

  // Asked of streaming normalisers. Scores become weights w, tangents A s.; adds B s. to pulled, [lanes]. open: the sums of the
  // states grow, and weights are those before finish().
  virtual void weigh(const LaneTile<Real>& /*scores*/, const LaneTile<Real>& /*tangents*/,
                     const TilePlace&, int /*vectors*/, const LaneTile<Real>& /*states*/,
                     bool /*open*/, Real* /*pulled*/) const {}
  // Adds what parameters and the numbers of queries' tokens, whose tangents are `inputs`, [query_inputs][lanes], pull in vector v.
  // The dinputs of `queries` are work memory.
  virtual void pull(const StreamQueries<Real>& /*queries*/, int /*v*/,
                    const LaneTile<Real>& /*states*/, const LaneTile<Real>& /*inputs*/,
                    Real* /*pulled*/) const {}

  // Asked of row normalisers: scores become weights, and their tangents those of the weights (RowTangents).
  virtual void weights(RowBlock<Real>&, const RowTangents<Real>&) const {}
};

class ReadoutJvps {
 public:
  virtual ~ReadoutJvps() = default;
  // All rows of a call in long hand, on numbers that move.
  virtual void read_out(ReadoutContext<DualNumber>& context) const = 0;
};

// An op and a direction of its parameters. The parts must outlive it.
template <class Real>
struct OpJvps {
  const ScoreJvps<Real>& score;
  const NormaliserJvps<Real>& normaliser;
  const ReadoutJvps& readout;
};

}  // namespace HEED_ABI
}  // namespace heed
