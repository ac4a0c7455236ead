// SPDX-License-Identifier: Apache-2.0
#pragma once

// One stage of a backward call that shares compute one after the other, each going on where the one before has ended: for
// each head of a family, from the last share of the queries to the first. What the last stage leaves has the bits of backward() of
// the whole call.

#include <heed/engine/doors.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// backward() of a share, as such a stage. given.grads: zeros before the first stage; the gradients of keys, values and bias
// are handed on. Gradients of the parameters, and what side values owe to the keys, come with the last stage.
template <class Op, class Real = typename Op::Scalar>
void backward_stage(const Op& op, const BackwardArguments<Real>& given, HandedOn<Real>& on,
                    bool last, Op* grad_op) {
  static_assert(!InputColumns<Op>::any);
  const OpTilesOf<Op> of(op);
  with_gradient(op, grad_op, [&](const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
    Driver<Real>::backward(of.tiles(), vjps, given, gradient, &on, last);
  });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
