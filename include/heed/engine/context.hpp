// SPDX-License-Identifier: Apache-2.0
#pragma once

// A call, checked and planned.

#include <heed/engine/key_side.hpp>
#include <heed/engine/plan.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/simd/instructions.hpp>

namespace heed::inline HEED_ABI {

// What all panels of a call read.
template <class Op, class Real>
struct CallContext {
  const Op& op;
  Geometry geometry;
  const BoundMask<Real>& mask;
  Inputs<Real> in;
  Plan plan;
  Real scale;
  const KeySide<Op, Real>& keys;
  Dropout dropout = {};

  using Score = typename Op::ScoreType;
  // Transposed queries carry the scale, and a pair's raw dot product is recovered by its inverse; a scale
  // of 0 has none and multiplies the logit instead.
  [[nodiscard]] Real query_factor() const { return scale != Real(0) ? scale : Real(1); }
  // Groups that the panels of `heads` heads fill.
  [[nodiscard]] Index groups_of(Index heads) const {
    return (heads * plan.panels + plan.group - 1) / plan.group;
  }
  // Does the score pass have nothing to do?
  [[nodiscard]] bool plain() const {
    return Score::plain && mask.soft_cap() == Real(0) && scale != Real(0);
  }
};

}  // namespace heed::inline HEED_ABI
