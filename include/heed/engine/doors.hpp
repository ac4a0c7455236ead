// SPDX-License-Identifier: Apache-2.0
#pragma once

// Both doors: they check a call and run it.

#include <heed/engine/calls.hpp>
#include <heed/engine/door.hpp>
#include <heed/engine/door_checks.hpp>
#include <heed/engine/share.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Op>
void Door<Op>::forward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                       const Outputs<Real>& outputs, Saved<Real>* saved, const Options& options) {
  const std::string where = door_name("heed::forward", options.name);
  if (saved) saved->stamp = {};
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  require_share(op, g, options, where);
  check_outputs(op, outputs, g, in, mask, where);
  if (saved) saved->sequences.clear();
  const int threads = resolve_threads(options.threads);
  ForwardCall<Op> call(op, g, in, mask, outputs, saved, options, where, threads);
  ForwardCall<Op>* const calls[] = {&call};
  run_forward_calls<Op>(op, calls, Preparation(1, threads), options);
}

template <class Op>
void Door<Op>::backward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                        const Saved<Real>& saved, const StoredView<const Real>& out,
                        const OutputGradients<Real>& output, const Gradients<Real>& grads,
                        Op* grad_op, const Options& options) {
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  require_one_piece(in.key, "key", where);
  require_one_piece(in.value, "value", where);
  require_share(op, g, options, where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  check_backward(op, g, in, mask, out, output, grads, where);
  check_saved<Op>(saved, CallStamp::of<Op>(g, mask, scale_of(op, g, options), options), where);
  const int threads = resolve_threads(options.threads);
  BackwardCall<Op> call(op, g, in, bound, saved, out, output, grads, options, threads);
  BackwardCall<Op>* const calls[] = {&call};
  run_backward_calls<Op>(calls, false, grad_op, Preparation(1, threads), options);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
