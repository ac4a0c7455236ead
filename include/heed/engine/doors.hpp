// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of the engine: a call is checked and run.

#include <heed/engine/calls.hpp>
#include <heed/engine/checks.hpp>
#include <heed/engine/driver.hpp>
#include <heed/engine/op_door.hpp>
#include <heed/engine/share.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
void Driver<Real>::forward(const OpTiles<Real>& op, const Inputs<Real>& in, const Mask<Real>& mask,
                           const Outputs<Real>& outputs, Saved<Real>* saved,
                           const Options& options) {
  const std::string where = door_name("heed::forward", options.name);
  if (saved) saved->stamp = {};
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  require_share(op, g, options, where);
  check_outputs(op, outputs, g, in, mask, where);
  if (saved) saved->sequences.clear();
  const int threads = resolve_threads(options.threads);
  ForwardCall<Real> call(op, g, in, mask, outputs, saved, options, where, threads);
  ForwardCall<Real>* const calls[] = {&call};
  run_forward_calls<Real>(op, calls, Preparation(1, threads), options);
}

template <class Real>
void Driver<Real>::backward(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                            const Inputs<Real>& in, const Mask<Real>& mask,
                            const Saved<Real>& saved, const StoredView<const Real>& out,
                            const OutputGradients<Real>& output, const Gradients<Real>& grads,
                            OpGradient<Real>* grad_op, const Options& options) {
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  require_one_piece(in.key, "key", where);
  require_one_piece(in.value, "value", where);
  require_share(op, g, options, where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  check_backward(op, g, in, mask, out, output, grads, where);
  check_saved(op, saved, CallStamp::of(op.type, g, mask, scale_of(op, g, options), options), where);
  const int threads = resolve_threads(options.threads);
  BackwardCall<Real> call(op, vjps, g, in, bound, saved, out, output, grads, options, threads);
  BackwardCall<Real>* const calls[] = {&call};
  run_backward_calls<Real>(calls, false, grad_op, Preparation(1, threads), options);
}

template <class Real>
Index Driver<Real>::share_step(const OpTiles<Real>& op, const Geometry& g, const Options& options) {
  return step_of_shares(op, g, options);
}
template <class Real>
bool Driver<Real>::features_fit(const KeyFeatures<Real>& kept, const OpTiles<Real>& op,
                                const Geometry& g, const StoredView<const Real>& key) {
  return KeySide<Real>::fits(kept, op, g, key);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
