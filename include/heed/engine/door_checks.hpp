// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the doors ask of the tensors that they are given beside the inputs.

#include <heed/engine/call.hpp>
#include <heed/engine/tile/stream_states.hpp>

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

template <class Op, class Real>
void check_outputs(const Op& op, const Outputs<Real>& outputs, const Geometry& g,
                   const Inputs<Real>& in, const Mask<Real>& mask, const std::string& where) {
  require_output(outputs.out, g.out_shape(), "out", where);
  const auto apart = [&](const StoredView<Real>& out, const char* name) {
    for_each_operand(in, mask.bias, [&](const char* input, const auto& view) {
      require_apart(out, view, name, input, where);
    });
    require_apart(out, mask.allowed, name, "the boolean mask", where);
  };
  apart(outputs.out, "out");
  if (outputs.lse.given()) {
    require_output(outputs.lse, lse_shape<Op>(g), "lse", where);
    apart(outputs.lse, "lse");
    require_apart(outputs.lse, outputs.out, "lse", "out", where);
  }
  if (!outputs.steps.given()) return;
  require_steps(op, "steps", where);
  require_output(outputs.steps, steps_shape(op, g), "steps", where);
  apart(outputs.steps, "steps");
  require_apart(outputs.steps, outputs.out, "steps", "out", where);
  require_apart(outputs.steps, outputs.lse, "steps", "lse", where);
}

template <class Real>
void check_gradients(const Gradients<Real>& grads, const Inputs<Real>& in, const Mask<Real>& mask,
                     const StoredView<const Real>& out, const OutputGradients<Real>& output,
                     const std::string& where) {
  struct Named {
    const char* name;
    bool given;
    MemoryView view, scales;
  };
  const auto named = [](const char* name, const auto& view) {
    MemoryView scales{};
    if constexpr (requires { view.scales(); }) scales = view.scales();
    return Named{name, view.given(), view, scales};
  };
  const Named read[] = {named("query", in.query),           named("key", in.key),
                        named("value", in.value),           named("extra", in.extra),
                        named("bias", mask.bias),           named("query_inputs", in.query_inputs),
                        named("key_inputs", in.key_inputs), named("out", out),
                        named("grad_out", output.out),      named("grad_lse", output.lse),
                        named("grad_steps", output.steps)};
  const Named written[] = {named("grad_query", grads.query),
                           named("grad_key", grads.key),
                           named("grad_value", grads.value),
                           named("grad_extra", grads.extra),
                           named("grad_bias", grads.bias),
                           named("grad_query_inputs", grads.query_inputs),
                           named("grad_key_inputs", grads.key_inputs)};
  for (const Named& a : written) {
    if (!a.given) continue;
    const Named& like = read[&a - written];
    require(like.given, where, ": ", a.name, " was given, the call has no such input");
    require_output(a.view, like.view.shape, a.name, where);
    for (const Named& b : read) {
      require_apart(a.view, b.view, a.name, b.name, where);
      require_apart_from_scales(a.view, b.scales, a.name, b.name, where);
    }
    require_apart(a.view, mask.allowed, a.name, "the boolean mask", where);
    for (const Named& b : written)
      if (&a < &b) require_apart(a.view, b.view, a.name, b.name, where);
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
