// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of the engine: a call is checked and run.

#include <heed/engine/backward_pass.hpp>
#include <heed/engine/op_door.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
void Driver<Real>::forward(const OpTiles<Real>& op, const ForwardArguments<Real>& given) {
  if (given.saved) given.saved->stamp = {};
  const OpenCall<Real> open = open_call(kForwardDoor, op, given);
  open.check(given.out);
  if (given.saved) given.saved->sequences.clear();
  const int threads = open.threads();
  ForwardCall<Real> call(open, given.out, given.saved, threads);
  ForwardCall<Real>* const calls[] = {&call};
  run_forward<Real>(calls, op, Preparation(1, threads), given.options);
}

template <class Real>
void Driver<Real>::backward(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                            const BackwardArguments<Real>& given, OpGradient<Real>* grad_op,
                            HandedOn<Real>* on, bool last) {
  const OpenCall<Real> open = open_call(kBackwardDoor, op, given);
  const BoundMask<Real> bound = open.bound_mask(given.options.threads);
  open.check(given);
  open.check(given.saved);
  BackwardCall<Real> call(open, vjps, bound, given, open.threads());
  BackwardCall<Real>* const calls[] = {&call};
  run_backward<Real>(calls, false, grad_op, given.options, on, last);
  call.finish();
}

template <class Real>
Index Driver<Real>::share_step(const OpTiles<Real>& op, const Geometry& g, const Options& options) {
  return step_of_shares(op, g, options);
}
template <class Real>
bool Driver<Real>::features_fit(const KeyFeatures<Real>& kept, const OpTiles<Real>& op,
                                const Geometry& g, const StoredView<const Real>& key) {
  return DerivedKeys<Real>::fits(kept, op, g, key);
}

}  // namespace detail

// A share of the queries of a call of these sizes begins at a multiple of this number, and ends at one or behind the last
// query: the panels of forward and the groups of panels of backward then are those of the whole call, and so are the bits of
// all that belongs to a query. It depends on the sizes, and on key_tile, panel_vectors and precision of the options, not on
// the mask.
template <class Op>
[[nodiscard]] Index share_step(const Op& op, const Geometry& g, const Options& options = {}) {
  using Real = typename Op::Scalar;
  Index step = 0;
  detail::Door<Op>::with_tiles(op, [&](const OpTiles<Real>& tiles) {
    step = detail::Driver<Real>::share_step(tiles, g, options);
  });
  return step;
}

}  // namespace HEED_ABI
}  // namespace heed
