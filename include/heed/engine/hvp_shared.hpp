// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the workers of a Hessian-vector product share: what those of backward do, whose sums of gradients it has where their
// tangents ask for them, and these tangents.

#include <heed/engine/visiting_order.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// grads: where the tangents of the gradients go.
template <class Real>
struct HvpShared : BackwardShared<Real> {
  using Base = BackwardShared<Real>;
  // Laid out as the sums of gradients that they are the tangents of.
  std::vector<Real> dfeature_tangents, drow_tangents, dquery_input_tangents, dkey_input_tangents;

  HvpShared(const CallContext<Real>& c, const OpVjps<Real>& of_op, const Saved<Real>& of_forward,
            const OutputGradientOperands<Real>& of_output, const GradientOperands<Real>& to)
      : Base(c, of_op, of_forward, of_output, to),
        dfeature_tangents(this->dfeatures.size()),
        drow_tangents(this->drows.size()),
        dquery_input_tangents(this->dquery_inputs.size()),
        dkey_input_tangents(this->dkey_inputs.size()) {}

  // Where the tangents of the gradients of keys are added up, from the first key of `at` on; see key_rows(), which says
  // where these gradients are where keys are transformed.
  [[nodiscard]] typename Base::KeyRows key_tangent_rows(const CallContext<Real>& c,
                                                        const TilePlace& at, const Source& source) {
    typename Base::KeyRows rows = this->key_rows(c, at, 0, source);
    if (c.op.score.traits.has_transform)
      rows.data = drow_tangents.data() + (rows.data - this->drows.data());
    return rows;
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
