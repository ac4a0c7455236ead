// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks every gradient of an attention op - inputs, bias and parameters - against its reference.
//
//   const auto grad_out = gradcheck_grad_out(problem.geometry);      // what your backward is fed
//   reference::Gradients<Op> mine = ...;                             // what it returned
//   const auto report = check_op_gradient(op, problem, named_gradients(mine), Method::dual);
//   if (!report.passed) std::puts(report.text().c_str());
//
// The function that is differentiated is loss = sum(out o grad_out), out by reference::forward.
// Formulas with a jump (argmax, halting) are checked where they stand: a step must not cross it.
//
// Names   "query", "key", "value", "extra", "query_inputs", "key_inputs" and "bias" where the problem has them, and each
//         parameter under its part: "score.strength", "normaliser.lambda", "readout.weight".
// Bounds  the gradient of a bias of -infinity must be 0.
// Errors  as check_gradient, among them a tensor that has no gradient and is not in options.fixed.
// Cost    one forward pass of the reference per entry checked; central differences two.

#include <heed/check/gradcheck.hpp>
#include <heed/reference/reference.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct OpGradcheckOptions {
  GradcheckOptions gradcheck;
  // Names of tensors that are not differentiated.
  std::vector<std::string> fixed;
};

namespace detail {

// Calls f(name, values) for the tensors that a problem has.
template <class P, class F>
void visit_problem(P& problem, F&& f) {
  f("query", problem.query);
  f("key", problem.key);
  f("value", problem.value);
  if (!problem.extra.empty()) f("extra", problem.extra);
  if (!problem.query_inputs.empty()) f("query_inputs", problem.query_inputs);
  if (!problem.key_inputs.empty()) f("key_inputs", problem.key_inputs);
  if (!problem.bias.empty()) f("bias", problem.bias);
}

[[nodiscard]] inline bool is_fixed(const OpGradcheckOptions& options, const std::string& name) {
  return std::find(options.fixed.begin(), options.fixed.end(), name) != options.fixed.end();
}

[[nodiscard]] inline bool bias_hides(double bias) {
  return bias == -std::numeric_limits<double>::infinity();
}

// All tensors that the loss depends on. A bias of -infinity counts as 0 here, since the loss does not read it.
template <class Op>
[[nodiscard]] std::vector<NamedTensor> op_tensors(const Op& op,
                                                  const reference::Problem<double>& problem) {
  std::vector<NamedTensor> tensors;
  visit_problem(problem, [&](const char* name, const std::vector<double>& values) {
    tensors.push_back({name, values});
    if (std::string(name) == "bias")
      std::replace_if(tensors.back().values.begin(), tensors.back().values.end(), bias_hides, 0.0);
  });
  for (NamedTensor& param : named_params(op)) tensors.push_back(std::move(param));
  return tensors;
}

// sum(out o grad_out) + sum(lse o grad_lse) + sum(steps o grad_steps) over S, as a function of the tensors named by
// `names`. grad_lse and grad_steps may be empty; the lse of a row that sees no key does not count.
template <class Op>
struct OpLoss {
  const Op& op;
  const reference::Problem<double>& problem;
  const std::vector<double>& grad_out;
  std::vector<std::string> names;
  std::vector<double> grad_lse = {};    // (batch, heads, len_q, maps)
  std::vector<double> grad_steps = {};  // (batch, heads, len_q)

  template <class S>
  [[nodiscard]] S operator()(const std::vector<std::vector<S>>& tensors) const {
    auto cast = reference::cast_whole_op<S>(op);
    auto moved = reference::cast_problem<S>(problem);
    const auto take = [&](const std::string& name, S* values, std::size_t count) {
      const auto at = std::find(names.begin(), names.end(), name);
      if (at == names.end()) return;
      const std::vector<S>& from = tensors[std::size_t(at - names.begin())];
      for (std::size_t i = 0; i < count; ++i)
        if (name != "bias" || !bias_hides(problem.bias[i])) values[i] = from[i];
    };
    visit_problem(moved, [&](const char* name, std::vector<S>& values) {
      take(name, values.data(), values.size());
    });
    visit_named_params(cast, [&](const std::string& name, Param<S>& p) {
      take(name, p.data(), std::size_t(p.size()));
    });
    const reference::Result<S> result = reference::forward(cast, moved);
    S loss = math::dot_product(
        Index(result.out.size()), [&](Index n) { return result.out[std::size_t(n)]; },
        [&](Index n) { return math::constant<S>(grad_out[std::size_t(n)]); });
    const std::size_t maps = result.lse.size();
    for (std::size_t n = 0; n < grad_lse.size(); ++n) {
      const S& lse = result.lse[n % maps][n / maps];
      if (std::isfinite(math::value_of(lse))) loss += lse * math::constant<S>(grad_lse[n]);
    }
    for (std::size_t n = 0; n < grad_steps.size(); ++n)
      loss += result.steps[n] * math::constant<S>(grad_steps[n]);
    return loss;
  }
};

// Fixed numbers in [-1, 1), all different, of both signs.
[[nodiscard]] inline std::vector<double> spread_numbers(Index count) {
  std::vector<double> numbers(std::size_t(std::max<Index>(count, 0)));
  for (std::size_t n = 0; n < numbers.size(); ++n) {
    const double turns = double(n + 1) * 0.6180339887498949;  // the golden ratio's fraction
    numbers[n] = 2 * (turns - std::floor(turns)) - 1;
  }
  return numbers;
}

}  // namespace detail

// The gradient of the loss with respect to out (batch, heads, len_q, dim_v): fixed numbers in
// [-1, 1), all different, of both signs.
[[nodiscard]] inline std::vector<double> gradcheck_grad_out(const Geometry& g) {
  return detail::spread_numbers(g.query_rows() * g.dim_v);
}

// Gradients under the names that check_op_gradient expects; empty ones are left out.
template <class Op>
[[nodiscard]] std::vector<NamedTensor> named_gradients(const reference::Gradients<Op>& gradients) {
  std::vector<NamedTensor> named;
  const auto add = [&](const char* name, const auto& values) {
    named.push_back({name, {values.begin(), values.end()}});
  };
  add("query", gradients.dquery);
  add("key", gradients.dkey);
  add("value", gradients.dvalue);
  if (!gradients.dextra.empty()) add("extra", gradients.dextra);
  if (!gradients.dquery_inputs.empty()) add("query_inputs", gradients.dquery_inputs);
  if (!gradients.dkey_inputs.empty()) add("key_inputs", gradients.dkey_inputs);
  if (!gradients.dbias.empty()) add("bias", gradients.dbias);
  for (NamedTensor& param : named_params(gradients.op)) named.push_back(std::move(param));
  return named;
}

// Compares `analytic`, gradients of sum(out o gradcheck_grad_out) by name, with derivatives of the
// reference at the problem's values.
template <class Op>
[[nodiscard]] GradientReport check_op_gradient(const Op& op,
                                               const reference::Problem<double>& problem,
                                               std::vector<NamedTensor> analytic,
                                               Method method = Method::dual,
                                               const OpGradcheckOptions& options = {}) {
  static_assert(std::is_same_v<typename Op::Scalar, double>,
                "heed: check_op_gradient differentiates in double; cast the op first");
  std::vector<NamedTensor> tensors = detail::op_tensors(op, problem);
  for (const std::string& name : options.fixed)
    require(detail::find_tensor(tensors, name) != nullptr,
            "check_op_gradient: options.fixed names \"", name, "\", which the op does not have");
  const auto fixed = [&](const NamedTensor& t) { return detail::is_fixed(options, t.name); };
  std::erase_if(tensors, fixed);
  std::erase_if(analytic, fixed);

  const std::vector<double> grad_out = gradcheck_grad_out(problem.geometry);
  detail::OpLoss<Op> loss{op, problem, grad_out, {}};
  for (const NamedTensor& tensor : tensors) loss.names.push_back(tensor.name);
  return check_gradient(loss, tensors, analytic, method, options.gradcheck);
}

}  // namespace HEED_ABI
}  // namespace heed
