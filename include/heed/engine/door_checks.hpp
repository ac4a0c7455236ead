// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the doors ask of the tensors that they are given beside the inputs.

#include <heed/engine/call.hpp>
#include <heed/engine/tile/stream_states.hpp>

#include <array>
#include <iterator>
#include <span>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Op>
[[nodiscard]] Shape lse_shape(const Geometry& g) {
  return {g.batch, g.heads, g.held_queries(), Op::NormaliserType::maps};
}

template <class Op>
[[nodiscard]] Shape steps_shape(const Op& op, const Geometry& g) {
  return {g.batch, g.heads, g.held_queries(), op.readout.step_columns(g)};
}

// Throws where the op, with its options, gives no steps; `name` says of what they were given.
template <class Op>
void require_steps(const Op& op, const char* name, const std::string& where) {
  const char* why = op.readout.without_steps();
  require(why == nullptr, where, ": ", name, " was given, ", why ? why : "");
}

// f(name, tensor) for all that a call reads as numbers: of its inputs, or of their tangents, and of its mask's bias.
template <class Tensors, class Bias, class F>
void for_each_operand(const Tensors& of, const Bias& bias, F&& f) {
  f("query", of.query);
  f("key", of.key);
  f("value", of.value);
  f("extra", of.extra);
  f("query_inputs", of.query_inputs);
  f("key_inputs", of.key_inputs);
  f("bias", bias);
}

// A tensor of a call as its checks see it.
struct NamedMemory {
  const char* name;
  bool given;
  MemoryView view, scales;  // scales: without elements unless its rows have some
};
template <class View>
[[nodiscard]] NamedMemory named_memory(const char* name, const View& view) {
  MemoryView scales{};
  if constexpr (requires { view.scales(); }) scales = view.scales();
  return {name, view.given(), view, scales};
}

// All that a call reads, in the order of for_each_operand(), and the boolean mask behind it.
inline constexpr std::size_t kOperands = 7;
template <class Real>
[[nodiscard]] std::array<NamedMemory, kOperands + 1> memory_of(const Inputs<Real>& in,
                                                               const Mask<Real>& mask) {
  return {named_memory("query", in.query),
          named_memory("key", in.key),
          named_memory("value", in.value),
          named_memory("extra", in.extra),
          named_memory("query_inputs", in.query_inputs),
          named_memory("key_inputs", in.key_inputs),
          named_memory("bias", mask.bias),
          named_memory("the boolean mask", mask.allowed)};
}
// All gradients that backward() writes, in the order of the operands; and what it reads of the outputs.
template <class Real>
[[nodiscard]] std::array<NamedMemory, kOperands> memory_of(const Gradients<Real>& grads) {
  return {named_memory("grad_query", grads.query),
          named_memory("grad_key", grads.key),
          named_memory("grad_value", grads.value),
          named_memory("grad_extra", grads.extra),
          named_memory("grad_query_inputs", grads.query_inputs),
          named_memory("grad_key_inputs", grads.key_inputs),
          named_memory("grad_bias", grads.bias)};
}
template <class Real>
[[nodiscard]] std::array<NamedMemory, 4> memory_of(const StoredView<const Real>& out,
                                                   const OutputGradients<Real>& output) {
  return {named_memory("out", out), named_memory("grad_out", output.out),
          named_memory("grad_lse", output.lse), named_memory("grad_steps", output.steps)};
}
inline void require_apart(const MemoryView& out, const char* name,
                          std::span<const NamedMemory> read, const std::string& where) {
  for (const NamedMemory& input : read) {
    require_apart(out, input.view, name, input.name, where);
    require_apart_from_scales(out, input.scales, name, input.name, where);
  }
}

template <class Op, class Real>
void check_outputs(const Op& op, const Outputs<Real>& outputs, const Geometry& g,
                   const Inputs<Real>& in, const Mask<Real>& mask, const std::string& where) {
  const auto read = memory_of(in, mask);
  require_output(outputs.out, g.out_shape(), "out", where);
  require_apart(outputs.out, "out", read, where);
  if (outputs.lse.given()) {
    require_output(outputs.lse, lse_shape<Op>(g), "lse", where);
    require_apart(outputs.lse, "lse", read, where);
    require_apart(outputs.lse, outputs.out, "lse", "out", where);
  }
  if (!outputs.steps.given()) return;
  require_steps(op, "steps", where);
  require_output(outputs.steps, steps_shape(op, g), "steps", where);
  require_apart(outputs.steps, "steps", read, where);
  require_apart(outputs.steps, outputs.out, "steps", "out", where);
  require_apart(outputs.steps, outputs.lse, "steps", "lse", where);
}

template <class Real>
void check_gradients(const Gradients<Real>& grads, const Inputs<Real>& in, const Mask<Real>& mask,
                     const StoredView<const Real>& out, const OutputGradients<Real>& output,
                     const std::string& where) {
  const auto read = memory_of(in, mask);
  const auto of_output = memory_of(out, output);
  const auto written = memory_of(grads);
  for (std::size_t i = 0; i < kOperands; ++i) {
    const NamedMemory& a = written[i];
    if (!a.given) continue;
    require(read[i].given, where, ": ", a.name, " was given, the call has no such input");
    require_output(a.view, read[i].view.shape, a.name, where);
    require_apart(a.view, a.name, read, where);
    require_apart(a.view, a.name, of_output, where);
    for (std::size_t n = i + 1; n < kOperands; ++n)
      require_apart(a.view, written[n].view, a.name, written[n].name, where);
  }
}

// Are these the rows that forward saves for such a call?
template <class Op, class Real>
void check_saved(const Saved<Real>& saved, const CallStamp& call, const std::string& where) {
  using Normaliser = typename Op::NormaliserType;
  const Geometry& g = call.geometry;
  const std::string difference = saved.stamp.difference(call);
  require(difference.empty(), where, ": saved ", difference);
  const auto check = [&](const std::vector<Real>& numbers, Index wanted, const char* what) {
    require(Index(numbers.size()) == wanted, where, ": saved holds ", numbers.size(), " ", what,
            ", the call needs ", wanted, "; it must come from forward() of the same op and inputs");
  };
  const Index rows = g.query_rows();
  check(saved.lse, Normaliser::maps * rows, "log-sum-exps");
  check(saved.state, Normaliser::streams ? StreamStates<Normaliser, Real>::kNumbers * rows : 0,
        "states of rows");
  check(saved.mixed, Op::ReadoutType::saves_mixed ? rows * g.dim_v : 0, "mixed values");
}

// What backward() is given beside its inputs, of a call or of packed sequences.
template <class Op, class Real>
void check_backward(const Op& op, const Geometry& g, const Inputs<Real>& in, const Mask<Real>& mask,
                    const StoredView<const Real>& out, const OutputGradients<Real>& output,
                    const Gradients<Real>& grads, const std::string& where) {
  const Shape out_shape = g.out_shape();
  require_shape(out, out_shape, "out", where);
  require_shape(output.out, out_shape, "grad_out", where);
  if (output.lse.given()) {
    require(Op::NormaliserType::differentiates_lse, where,
            ": grad_lse was given, the op's normaliser has no derivative of lse "
            "(plug/normaliser.hpp)");
    require_shape(output.lse, lse_shape<Op>(g), "grad_lse", where);
  }
  if (output.steps.given()) {
    require_steps(op, "grad_steps", where);
    require_shape(output.steps, steps_shape(op, g), "grad_steps", where);
  }
  check_gradients(grads, in, mask, out, output, where);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
