// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks hand-written gradients against the function itself.
//
//   const auto loss = [](const auto& t) { return t[0][0] * t[0][0] * t[1][0]; };
//   const std::vector<NamedTensor> at = {{"x", {3}}, {"w", {2}}};
//   const auto report = check_gradient(loss, at, {{"x", {12}}, {"w", {9}}}, Method::dual);
//   if (!report.passed) std::puts(report.text().c_str());
//
// The function takes `const std::vector<std::vector<S>>&`, the tensors in the order of `inputs`,
// and returns one S, for S = double, std::complex<double>, Dual<double, 1> or Var<double>; its
// formulas use the words of scalar.hpp.
//
// Criterion: |analytic - numeric| <= tolerance * max(1, |analytic|, |numeric|). A gradient must be
// a number: NaN or infinity fails on either side, and also on both.
// Errors: std::invalid_argument when `inputs` and `analytic` do not name the same tensors of the
// same lengths, each once, or when an option is out of range.
// Cost: one evaluation per entry checked (central differences: two); tape_gradient: one in all.

#include <heed/autodiff/complex_step.hpp>
#include <heed/autodiff/dual.hpp>
#include <heed/autodiff/tape.hpp>
#include <heed/check/named_tensor.hpp>
#include <heed/core/error.hpp>
#include <heed/core/scalar.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

enum class Method { central_difference, complex_step, dual };

struct GradcheckOptions {
  std::optional<double> tolerance = {};  // >= 0; default 1e-8 central difference, 1e-12 others
  std::optional<double> step = {};   // > 0; default 1e-5 central (times max(1, |x|)), 1e-30 complex
  Index max_entries_per_tensor = 0;  // 0: all; else this many, the same in every run
  Index max_failures = 20;           // failures that a report keeps; it counts all
};

// One entry of one tensor; `error` is relative to max(1, |analytic|, |numeric|), and +inf when a
// side is not finite.
struct Mismatch {
  std::string tensor;
  Index index = 0;
  double analytic = 0, numeric = 0, error = 0;
};

struct GradientReport {
  bool passed = true;  // also if nothing was checked: see `checked`
  double worst_error = 0;
  Mismatch worst;                  // the first entry with the largest error, even if it passes
  std::vector<Mismatch> failures;  // the first GradcheckOptions::max_failures failures
  Index failed = 0;
  Index checked = 0;

  // One line, and one more for each failure kept.
  [[nodiscard]] std::string text() const;
};

namespace detail {

[[nodiscard]] inline double gradient_error(double analytic, double numeric) {
  if (!std::isfinite(analytic) || !std::isfinite(numeric))
    return std::numeric_limits<double>::infinity();
  return std::abs(analytic - numeric) / std::max({1.0, std::abs(analytic), std::abs(numeric)});
}

// Adds one comparison to the report.
inline void note(GradientReport& report, Mismatch entry, double tolerance, Index max_failures) {
  entry.error = gradient_error(entry.analytic, entry.numeric);
  if (report.checked == 0 || entry.error > report.worst_error) {
    report.worst_error = entry.error;
    report.worst = entry;
  }
  ++report.checked;
  if (entry.error <= tolerance) return;
  report.passed = false;
  ++report.failed;
  if (Index(report.failures.size()) < max_failures) report.failures.push_back(std::move(entry));
}

inline void describe(std::ostream& text, const Mismatch& entry) {
  text << entry.tensor << "[" << entry.index << "]: analytic " << entry.analytic << ", numeric "
       << entry.numeric << ", error " << entry.error;
}

[[nodiscard]] inline const NamedTensor* find_tensor(const std::vector<NamedTensor>& tensors,
                                                    const std::string& name) {
  for (const NamedTensor& tensor : tensors)
    if (tensor.name == name) return &tensor;
  return nullptr;
}

inline void require_unique_names(const std::vector<NamedTensor>& tensors, const char* function,
                                 const char* list) {
  for (const NamedTensor& tensor : tensors)
    require(find_tensor(tensors, tensor.name) == &tensor, function, ": ", list, " holds \"",
            tensor.name, "\" twice");
}

// The gradients in the order of `inputs`; throws when one is missing, unknown or of another length.
[[nodiscard]] inline std::vector<const NamedTensor*> match_gradients(
    const std::vector<NamedTensor>& inputs, const std::vector<NamedTensor>& gradients,
    const char* function, const char* input_list, const char* gradient_list) {
  require_unique_names(inputs, function, input_list);
  require_unique_names(gradients, function, gradient_list);
  for (const NamedTensor& gradient : gradients)
    require(find_tensor(inputs, gradient.name) != nullptr, function, ": ", gradient_list,
            " names \"", gradient.name, "\", which is not in ", input_list);
  std::vector<const NamedTensor*> matched;
  for (const NamedTensor& input : inputs) {
    const NamedTensor* gradient = find_tensor(gradients, input.name);
    require(gradient != nullptr, function, ": ", gradient_list, " has no entry \"", input.name,
            "\"");
    require(gradient->values.size() == input.values.size(), function, ": ", gradient_list, " \"",
            input.name, "\" has ", gradient->values.size(), " values, ", input_list, " has ",
            input.values.size());
    matched.push_back(gradient);
  }
  return matched;
}

// The entries to check, out of n: all when limit is 0 or at least n, else one from each of `limit`
// equal stretches, at a golden-ratio offset, so that no stride of the tensor hides from it.
[[nodiscard]] inline std::vector<Index> spread_entries(Index n, Index limit) {
  const Index count = limit == 0 ? n : std::min(n, limit);
  std::vector<Index> entries;
  entries.reserve(std::size_t(count));
  for (Index k = 0; k < count; ++k) {
    const Index longer = n % count;  // the first stretches are one entry longer
    const Index begin = k * (n / count) + std::min(k, longer);
    const Index width = n / count + (k < longer ? 1 : 0);
    const double turns = double(k) * 0.6180339887498949;
    const Index offset = Index((turns - std::floor(turns)) * double(width));
    entries.push_back(begin + std::min(width - 1, offset));
  }
  return entries;
}

template <class S>
[[nodiscard]] std::vector<std::vector<S>> cast_tensors(const std::vector<NamedTensor>& inputs) {
  std::vector<std::vector<S>> tensors;
  for (const NamedTensor& input : inputs)
    tensors.emplace_back(input.values.begin(), input.values.end());
  return tensors;
}

// df / d entry, by the method for S; `entry` is an element of `tensors`.
template <class F>
[[nodiscard]] double derivative(F& f, const std::vector<std::vector<double>>& tensors,
                                double& entry, double step) {
  const double x = entry, h = step * std::max(1.0, std::abs(x));
  const double above = x + h, below = x - h;  // above - below is not exactly 2h
  entry = above;
  const double f_above = f(tensors);
  entry = below;
  const double f_below = f(tensors);
  entry = x;
  return (f_above - f_below) / (above - below);
}

template <class F>
[[nodiscard]] double derivative(F& f, const std::vector<std::vector<std::complex<double>>>& tensors,
                                std::complex<double>& entry, double step) {
  const double x = entry.real();
  entry = {x, step};
  const std::complex<double> value = f(tensors);
  entry = x;
  return value.imag() / step;
}

template <class F>
[[nodiscard]] double derivative(F& f, const std::vector<std::vector<Dual<double, 1>>>& tensors,
                                Dual<double, 1>& entry, double) {
  entry.grad[0] = 1;
  const Dual<double, 1> value = f(tensors);
  entry.grad[0] = 0;
  return value.grad[0];
}

inline void require_options(const GradcheckOptions& options, double tolerance, double step) {
  require(tolerance >= 0, "check_gradient: tolerance is ", tolerance, ", it must be at least 0");
  require(step > 0, "check_gradient: step is ", step, ", it must be positive");
  require(options.max_entries_per_tensor >= 0, "check_gradient: max_entries_per_tensor is ",
          options.max_entries_per_tensor, ", it must be at least 0");
  require(options.max_failures >= 0, "check_gradient: max_failures is ", options.max_failures,
          ", it must be at least 0");
}

}  // namespace detail

inline std::string GradientReport::text() const {
  std::ostringstream text;
  text.precision(10);
  if (checked == 0) return "gradient check passed: there were no entries to check";
  text << "gradient check " << (passed ? "passed" : "FAILED") << ": ";
  if (!passed) text << failed << " of ";
  text << checked << " entries" << (passed ? "" : " differ") << "; worst ";
  detail::describe(text, worst);
  for (const Mismatch& failure : failures) detail::describe(text << "\n  ", failure);
  if (failed > Index(failures.size()))
    text << "\n  and " << failed - Index(failures.size()) << " more";
  return text.str();
}

// check_gradient by the method for S: double (central differences), std::complex<double> (complex
// step) or Dual<double, 1>; f need only accept this S.
template <class S, class F>
[[nodiscard]] GradientReport check_gradient_on(F&& f, const std::vector<NamedTensor>& inputs,
                                               const std::vector<NamedTensor>& analytic,
                                               const GradcheckOptions& options = {}) {
  constexpr bool central = std::same_as<S, double>;
  const double tolerance = options.tolerance.value_or(central ? 1e-8 : 1e-12);
  const double step = options.step.value_or(central ? 1e-5 : 1e-30);
  detail::require_options(options, tolerance, step);
  const auto gradients =
      detail::match_gradients(inputs, analytic, "check_gradient", "inputs", "analytic");
  auto tensors = detail::cast_tensors<S>(inputs);
  GradientReport report;
  for (std::size_t t = 0; t < inputs.size(); ++t)
    for (const Index i :
         detail::spread_entries(Index(tensors[t].size()), options.max_entries_per_tensor)) {
      const double numeric = detail::derivative(f, tensors, tensors[t][std::size_t(i)], step);
      detail::note(report, {inputs[t].name, i, gradients[t]->values[std::size_t(i)], numeric},
                   tolerance, options.max_failures);
    }
  return report;
}

// Compares `analytic`, one gradient for each input by name, with the derivative of f at `inputs`.
template <class F>
[[nodiscard]] GradientReport check_gradient(F&& f, const std::vector<NamedTensor>& inputs,
                                            const std::vector<NamedTensor>& analytic, Method method,
                                            const GradcheckOptions& options = {}) {
  switch (method) {
    case Method::central_difference: return check_gradient_on<double>(f, inputs, analytic, options);
    case Method::complex_step:
      return check_gradient_on<std::complex<double>>(f, inputs, analytic, options);
    case Method::dual: return check_gradient_on<Dual<double, 1>>(f, inputs, analytic, options);
  }
  fail("check_gradient: method ", int(method), " is not one of 0, 1, 2");
}

// The exact gradient of f with respect to all inputs, in their order, from one run on a tape.
template <class F>
[[nodiscard]] std::vector<NamedTensor> tape_gradient(F&& f,
                                                     const std::vector<NamedTensor>& inputs) {
  Tape<double> tape;
  std::vector<std::vector<Var<double>>> tensors;
  for (const NamedTensor& input : inputs) {
    auto& tensor = tensors.emplace_back();
    for (const double value : input.values) tensor.push_back(tape.variable(value));
  }
  const Var<double> root = f(std::as_const(tensors));
  const std::vector<double> adjoint = tape.gradient(root);
  std::vector<NamedTensor> gradients;
  for (std::size_t t = 0; t < inputs.size(); ++t) {
    auto& gradient = gradients.emplace_back(NamedTensor{inputs[t].name, {}});
    for (const Var<double>& x : tensors[t])
      gradient.values.push_back(adjoint[std::size_t(x.index)]);
  }
  return gradients;
}

}  // namespace HEED_ABI
}  // namespace heed
