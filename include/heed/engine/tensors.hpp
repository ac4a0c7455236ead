// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tensors of a call as the engine reads and writes them, in the place of those that callers give (call.hpp).
//
// In a share of a call (Inputs::share) the engine counts rows in the whole call: row 0 of a tensor is row `before` of the call.

#include <heed/engine/call.hpp>

namespace heed {
inline namespace HEED_ABI {

// A TensorSet as the engine has it: query_inputs and key_inputs are those of the score, which may be sums over tokens; what
// normaliser and readout read of tokens stands apart.
template <class View, class Keys = View>
struct PartedTensors : TensorSet<View, Keys> {
  View normaliser_query = {}, normaliser_key = {}, readout_query = {};
};
template <class Real>
using Operands = PartedTensors<TensorView<const Real>, StoredView<const Real>>;
template <class Real>
using TangentOperands = PartedTensors<TensorView<const Real>>;
template <class Real>
using GradientOperands = PartedTensors<TensorView<Real>>;

// What forward() writes, or gradients or tangents of it.
template <class View>
struct OutputSet {
  View out = {}, lse = {}, steps = {};
};

// What backward reads of the output's side.
template <class Real>
struct OutputGradientOperands {
  TensorView<const Real> out, grad_out, grad_lse = {}, grad_steps = {};
};

namespace detail {

// The tokens that a tensor has rows of.
enum class TokensOf { queries, keys, pairs };

// The set of f(tensor, tokens) for each tensor of `from`: Inputs, or a set.
template <class To, class From, class F>
[[nodiscard]] To map_tensors(const From& from, F&& f) {
  To to;
  to.query = f(from.query, TokensOf::queries);
  to.key = f(from.key, TokensOf::keys);
  to.value = f(from.value, TokensOf::keys);
  to.extra = f(from.extra, TokensOf::queries);
  if constexpr (requires { from.bias; }) to.bias = f(from.bias, TokensOf::pairs);
  to.query_inputs = f(from.query_inputs, TokensOf::queries);
  to.key_inputs = f(from.key_inputs, TokensOf::keys);
  return to;
}

// `held`, whose row 0 is row `before` of the call, as a view that is asked for rows of the call. The view's len is still
// the number of rows at hand; rows elsewhere must not be asked for.
template <class Element>
[[nodiscard]] TensorView<Element> rows_of_call(const TensorView<Element>& held, Index before) {
  if (before == 0 || held.data() == nullptr) return held;
  return {held.data() - before * held.strides().row, held.shape(), held.strides()};
}
template <class Element>
[[nodiscard]] TensorView<Element> rows_of_call(const TensorView<Element>& held, const Share& share,
                                               TokensOf tokens) {
  return rows_of_call(held, tokens == TokensOf::queries ? share.queries_before
                            : tokens == TokensOf::keys  ? share.keys_before
                                                        : 0);
}
// The other way.
template <class Element>
[[nodiscard]] TensorView<Element> held_rows(const TensorView<Element>& of_call, Index before) {
  return rows_of_call(of_call, -before);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
