// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "text_input.hpp"

#include <map>
#include <tuple>

namespace compare {

// The use of a tensor. The numbers also choose the random streams of the projections.
enum class Role : std::uint64_t {
  query = 1,
  key,
  value,
  extra,
  grad_out,
  query_inputs,
  key_inputs,  // from the text
  out,
  grad_query,
  grad_key,
  grad_value,
  grad_extra,
  grad_query_inputs,
  grad_key_inputs  // written by the passes
};

// Inputs, outputs and gradients, shared by all variants that read them in the same shape.
template <class T>
class TensorPool {
 public:
  explicit TensorPool(const TextInput& text) : text_(text) {}

  // A tensor (batch, heads, len, dim) for that role, the same one for the same arguments. Inputs and grad_out are filled
  // from the text, rounded to T.
  [[nodiscard]] heed::TensorView<T> view(Role role, Index heads, Index dim) {
    const heed::Shape shape{text_.batch(), heads, text_.len(), dim};
    const auto [place, is_new] = memory_.try_emplace({role, heads, dim});
    std::vector<T>& numbers = place->second;
    if (is_new && role <= Role::key_inputs) {
      const std::vector<double> wide = text_.project(std::uint64_t(role), heads, dim);
      numbers.reserve(wide.size());
      for (const double x : wide) numbers.push_back(T(heed::ArithmeticOf<T>(x)));
    } else if (is_new) {
      numbers.assign(std::size_t(heed::element_count(shape, "heed_compare")), T(0));
    }
    return {numbers.data(), shape};
  }

 private:
  const TextInput& text_;
  std::map<std::tuple<Role, Index, Index>, std::vector<T>> memory_;
};

}  // namespace compare
