// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors and parameters as lists of named numbers: the form in which gradients are compared.

#include <heed/core/param.hpp>
#include <heed/simd/stored_view.hpp>

#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct NamedTensor {
  std::string name;
  std::vector<double> values;
};

// The numbers of a view in (batch, heads, len, dim) order, as doubles.
template <class Number, class View>
[[nodiscard]] std::vector<Number> dense_numbers(const View& view) {
  const Shape& s = view.shape();
  std::vector<Number> numbers;
  numbers.reserve(std::size_t(element_count(s, "dense_numbers")));
  for_each_row(s, [&](Index b, Index h, Index t) {
    for (Index c = 0; c < s.dim; ++c) numbers.push_back(Number(view(b, h, t, c)));
  });
  return numbers;
}

template <class Number, class Element>
[[nodiscard]] std::vector<Number> dense_numbers(const StoredView<Element>& view) {
  return view.visit([](const auto& stored) { return dense_numbers<Number>(stored); });
}

namespace detail {

// Calls f(name, parameter) for the parameters in use, with the name of their part.
template <class Op, class F>
void visit_named_params(Op& op, F&& f) {
  const auto prefixed = [&f](const char* part) {
    return [&f, part](const char* name, auto& param) {
      if (param.given()) f(std::string(part) + "." + name, param);
    };
  };
  visit_parameters(op.score, prefixed("score"));
  visit_parameters(op.normaliser, prefixed("normaliser"));
  visit_parameters(op.readout, prefixed("readout"));
}

}  // namespace detail

// The parameters in use, each under its part: "score.strength", "normaliser.lambda", "readout.weight".
template <class Op>
[[nodiscard]] std::vector<NamedTensor> named_params(Op op) {
  std::vector<NamedTensor> named;
  detail::visit_named_params(op, [&](const std::string& name, auto& param) {
    named.push_back({name, {param.data(), param.data() + param.size()}});
  });
  return named;
}

}  // namespace HEED_ABI
}  // namespace heed
