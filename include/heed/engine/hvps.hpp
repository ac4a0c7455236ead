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

namespace heed {
inline namespace HEED_ABI {

// A tile on its way back, as ScoreBack, and how it moves.
template <class Real>
struct DualScoreBack {
  DualLanes<Real> dscores;  // in: dL/dscore; out: dL/d(q.k), over CallContext::row_factor()
  LaneTile<Real> hidden;    // -infinity where a pair is hidden, else 0; data is null where none is
  Real *key_lanes, *key_tangent_lanes;    // out, [key_features][keys][W]
  DualLanes<Real> dfeatures;              // add, [query_features][lanes]
  LaneTile<Real> dscalar_tangents;        // add, [scalars][lanes]
  DualLanes<Real> dtable;                 // add, shaped as ScoreTile::table
  PositionSums<Real>* position_tangents;  // add
  Real logit_part;
};

template <class Real>
class ScoreHvps : public RowVjps<Real, DualLanes<Real>> {
 public:
  // Hidden pairs contribute nothing. `moved`: the tangents of the scaled dot products, which stay.
  virtual void scores_vjp(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved,
                          const DualScoreBack<Real>& back) const = 0;
  // The slope of summand(), and how it moves with x.
  [[nodiscard]] virtual DualNumber slope(const DualNumber& x) const = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
