// SPDX-License-Identifier: Apache-2.0
#pragma once

// Is forward mode of an op right? One call, at the sizes and under the masks of check_op():
//
//   const OpReport report = check_jvp(op);
//   std::puts(report.summary().c_str());
//   return report.passed() ? 0 : 1;
//
// Each input, the bias of the mask and each parameter is moved alone along a random direction x.
// (below, `out` includes lse where the normaliser differentiates_lse):
//
//   <u, J x>         J x. of jvp(), against <J^T u, x.>, J^T u being the gradients of backward() for dL/dout = u
//   out along all    all moved at once by jvp() without an earlier forward(), against the sum of the single ones
//   out along x      against (forward(x + h x.) - forward(x - h x.)) / 2h
//
// check_op() makes the first two checks for every op that jvp() takes, and compares backward() itself with the reference.
// The third needs no backward(); formulas with a jump must not have one near the random inputs.
// In double, whatever the op's scalar.
// Errors  those of forward() at the sizes asked for. Ops that jvp() refuses do not compile, with the sentence that it has
//         for them.

#include <heed/check/op_cases.hpp>
#include <heed/engine/jvp.hpp>
#include <heed/plug/check.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

[[nodiscard]] inline const std::vector<double>& values_named(
    const std::string& name, const std::vector<NamedTensor>& tensors) {
  const NamedTensor* tensor = find_tensor(tensors, name);
  require(tensor != nullptr, "check_jvp: the call has no tensor ", name);
  return tensor->values;
}

// A random direction for everything that a call reads, by the names of OpCall::tensors().
template <class Op>
struct CheckDirection {
  std::vector<NamedTensor> tensors;

  explicit CheckDirection(const OpCall<Op>& call) : tensors(call.tensors()) {
    std::uint64_t stream = 0;
    for (NamedTensor& tensor : tensors) {
      const CounterRandom random(31, ++stream);
      for (std::size_t i = 0; i < tensor.values.size(); ++i)
        tensor.values[i] =
            tensor.name == "bias" && bias_hides(tensor.values[i]) ? 0.0 : random.normal(i);
    }
  }
  [[nodiscard]] const std::vector<double>& of(const std::string& name) const {
    return values_named(name, tensors);
  }
  // Tangents of the input named `only`; of all inputs for an empty name.
  [[nodiscard]] Tangents<double> tangents(const OpCall<Op>& call, const std::string& only) const {
    const Inputs<double> in = call.inputs();
    Tangents<double> d;
    const auto give = [&](const char* name, const auto& like, StoredView<const double>& to) {
      if (like.given() && (only.empty() || only == name)) to = {of(name).data(), like.shape()};
    };
    give("query", in.query, d.query);
    give("key", in.key, d.key);
    give("value", in.value, d.value);
    give("extra", in.extra, d.extra);
    give("query_inputs", in.query_inputs, d.query_inputs);
    give("key_inputs", in.key_inputs, d.key_inputs);
    give("bias", call.mask.bias, d.bias);
    return d;
  }
  // Moves the parameter of `op` named `only` by `step` times its direction; all parameters for an empty name.
  void add_parameters(Op& op, const std::string& only, double step) const {
    visit_named_params(op, [&](const std::string& name, auto& param) {
      if (!only.empty() && only != name) return;
      const std::vector<double>& direction = of(name);
      for (Index i = 0; i < param.size(); ++i) param[i] += step * direction[std::size_t(i)];
    });
  }
  // Runs forward() with the tensor named `only` moved by `step` times its direction; returns out, then lse and steps.
  [[nodiscard]] std::vector<double> results_at(const OpCall<Op>& call, const std::string& only,
                                               double step) const {
    OpCall<Op> moved = call;
    const auto add = [&](const char* name, std::vector<double>& to) {
      if (only != name) return;
      for (std::size_t i = 0; i < to.size(); ++i) to[i] += step * of(name)[i];
    };
    add("query", moved.query);
    add("key", moved.key);
    add("value", moved.value);
    add("extra", moved.extra);
    add("query_inputs", moved.query_inputs);
    add("key_inputs", moved.key_inputs);
    std::vector<double> bias = dense_numbers<double>(call.mask.bias);
    add("bias", bias);
    if (call.mask.bias.given()) moved.mask.bias = {bias.data(), call.mask.bias.shape()};
    add_parameters(moved.op, only, step);
    moved.infer();
    moved.out.insert(moved.out.end(), moved.lse.begin(), moved.lse.end());
    moved.out.insert(moved.out.end(), moved.steps.begin(), moved.steps.end());
    return std::move(moved.out);
  }
};

// Memory for out, and behind it for lse and steps where the call asks for them.
template <class Op>
struct CheckResults {
  std::vector<double> numbers;
  Outputs<double> views;
  explicit CheckResults(OpCall<Op>& call)
      : numbers(call.out.size() + call.lse.size() + call.steps.size()),
        views(numbers.data(), call.out_view().shape()) {
    double* next = numbers.data() + call.out.size();
    if (!call.lse.empty()) views.lse = {next, call.lse_shape()};
    if (!call.steps.empty()) views.steps = {next + call.lse.size(), call.steps_shape()};
  }
  CheckResults(const CheckResults&) = delete;
};

// Compares jvp() of a call, whose passes have run, with backward(), and with the sum of its own
// results; calls each(name, tangents) with the tangents along each tensor alone.
template <class Op, class Each>
GradientReport check_tangents_of(OpCall<Op>& call, const CheckDirection<Op>& direction,
                                 Index failures, Each&& each) {
  std::vector<double> u = call.grad_out;
  u.insert(u.end(), call.grad_lse.begin(), call.grad_lse.end());
  u.insert(u.end(), call.grad_steps.begin(), call.grad_steps.end());
  std::vector<double> sum(u.size());
  CheckResults<Op> moved(call), found(call);
  const std::vector<NamedTensor> gradients = call.gradients();
  GradientReport report;
  for (const NamedTensor& tensor : direction.tensors) {
    Op of_op = zeros_like(call.op);
    direction.add_parameters(of_op, tensor.name, 1);
    jvp(call.op, call.inputs(), call.mask, call.saved, StoredView<const double>(call.out_view()),
        direction.tangents(call, tensor.name), moved.views, &of_op, call.options);
    double forwards = 0, backwards = 0;
    for (std::size_t i = 0; i < u.size(); ++i) {
      sum[i] += moved.numbers[i];
      forwards += moved.numbers[i] * u[i];
    }
    const std::vector<double>& gradient = values_named(tensor.name, gradients);
    for (std::size_t i = 0; i < gradient.size(); ++i) backwards += gradient[i] * tensor.values[i];
    note(report, {"<u, J x> along " + tensor.name, 0, forwards, backwards}, 1e-10, failures);
    each(tensor.name, moved.numbers);
  }
  Op of_op = zeros_like(call.op);
  direction.add_parameters(of_op, "", 1);
  jvp(call.op, call.inputs(), call.mask, direction.tangents(call, ""), found.views, moved.views,
      &of_op, call.options);
  for (std::size_t i = 0; i < u.size(); ++i)
    note(report, {"out along all", Index(i), moved.numbers[i], sum[i]}, 1e-10, failures);
  return report;
}

}  // namespace detail

// At most `options.max_entries_per_tensor` entries of out and lse along each tensor, spread evenly; 0 checks all.
template <AttentionOp Op>
[[nodiscard]] OpReport check_jvp(const Op& op, const Geometry& g = detail::kCheckGeometry,
                                 GradcheckOptions options = {.max_entries_per_tensor = 32}) {
  static_assert(check_attention_op<Op>());
  static_assert(detail::check_jvp_op<Op>());
  require_sizes(g, op.normaliser.query_heads(g.heads), "check_jvp");
  detail::require_something(g, "check_jvp");
  const auto exact = cast_op<double>(op);
  using Exact = std::remove_const_t<decltype(exact)>;
  OpReport report;
  const double tolerance = options.tolerance.value_or(1e-8), step = options.step.value_or(1e-5);
  detail::for_check_calls(exact, g, report, [&](OpCall<Exact>& call, const std::string& name) {
    detail::run_check_call(call);
    const detail::CheckDirection<Exact> direction(call);
    GradientReport differences;
    const auto compare = [&](const std::string& tensor, const std::vector<double>& moved) {
      const std::vector<double> there = direction.results_at(call, tensor, step),
                                back = direction.results_at(call, tensor, -step);
      for (const Index i :
           detail::spread_entries(Index(moved.size()), options.max_entries_per_tensor)) {
        const auto at = std::size_t(i);
        // The lse of a row that sees nothing is -infinity on both sides and does not move.
        const double slope = there[at] == back[at] ? 0 : (there[at] - back[at]) / (2 * step);
        detail::note(differences, {"out along " + tensor, i, moved[at], slope}, tolerance,
                     options.max_failures);
      }
    };
    report.cases.emplace_back(
        "forward mode, " + name,
        detail::check_tangents_of(call, direction, options.max_failures, compare));
    report.cases.emplace_back("differences, " + name, differences);
  });
  return report;
}

}  // namespace HEED_ABI
}  // namespace heed
