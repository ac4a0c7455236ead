// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a call of one op compiles: the op as the engine sees it, handed to the engine's calls (driver.hpp).

#include <heed/engine/door.hpp>
#include <heed/engine/driver.hpp>
#include <heed/engine/op_vjps.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// May a call of the op on these keys take the features that are kept?
template <class Op, class Real = typename Op::Scalar>
[[nodiscard]] bool key_features_fit(const KeyFeatures<Real>& kept, const Op& op, const Geometry& g,
                                    const StoredView<const Real>& key) {
  const OpTilesOf<Op> of(op);
  return Driver<Real>::features_fit(kept, of.tiles(), g, key);
}

// run(vjps, gradient) for an op whose gradients go to grad_op, if it is given.
template <class Op, class Run>
void with_gradient(const Op& op, Op* grad_op, Run&& run) {
  using Real = typename Op::Scalar;
  const OpVjpsOf<Op> of(op);
  const OpVjps<Real> vjps = of.vjps();
  if (!grad_op) return run(vjps, static_cast<OpGradient<Real>*>(nullptr));
  OpGradient<Real> gradient(vjps);
  run(vjps, &gradient);
  *grad_op = OpVjpsOf<Op>::typed(op, gradient);
}

template <class Op>
void Door<Op>::forward(const Op& op, const ForwardArguments<Real>& given) {
  const OpTilesOf<Op> of(op);
  Driver<Real>::forward(of.tiles(), given);
}
template <class Op>
void Door<Op>::forward_packed(const Op& op, const ForwardArguments<Real>& given) {
  const OpTilesOf<Op> of(op);
  Driver<Real>::forward_packed(of.tiles(), given);
}
template <class Op>
void Door<Op>::backward(const Op& op, const BackwardArguments<Real>& given, Op* grad_op) {
  const OpTilesOf<Op> of(op);
  with_gradient(op, grad_op, [&](const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
    Driver<Real>::backward(of.tiles(), vjps, given, gradient);
  });
}
template <class Op>
void Door<Op>::backward_packed(const Op& op, const BackwardArguments<Real>& given, Op* grad_op) {
  const OpTilesOf<Op> of(op);
  with_gradient(op, grad_op, [&](const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
    Driver<Real>::backward_packed(of.tiles(), vjps, given, gradient);
  });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
