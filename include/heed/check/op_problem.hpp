// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sizes, tensors and mask of a call, in the form that the reference reads.

#include <heed/check/op_call.hpp>
#include <heed/reference/reference.hpp>

namespace heed {
inline namespace HEED_ABI {

// The inputs, which may lie anywhere, over the scalar S; the mask's bias is copied, its boolean mask stays a view.
template <class S, class Real>
[[nodiscard]] reference::Problem<S> problem_of(const Geometry& g, const Inputs<Real>& in,
                                               const Mask<Real>& mask, const Options& options) {
  reference::Problem<S> problem;
  problem.geometry = g;
  problem.query = dense_numbers<S>(in.query);
  problem.key = dense_numbers<S>(in.key);
  problem.value = dense_numbers<S>(in.value);
  problem.extra = dense_numbers<S>(in.extra);
  problem.query_inputs = dense_numbers<S>(in.query_inputs);
  problem.query_inputs_shape = in.query_inputs.shape();
  problem.key_inputs = dense_numbers<S>(in.key_inputs);
  problem.key_inputs_shape = in.key_inputs.shape();
  reference::use_mask(problem, mask);
  problem.scale = options.scale;
  problem.dropout = options.dropout;
  return problem;
}

template <class S, class Op>
[[nodiscard]] reference::Problem<S> problem_of(const OpCall<Op>& call) {
  return problem_of<S>(call.geometry(), call.inputs(), call.mask, call.options);
}

}  // namespace HEED_ABI
}  // namespace heed
