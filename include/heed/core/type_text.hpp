// SPDX-License-Identifier: Apache-2.0
#pragma once

// A type's name for error texts, as a program writes it: "heed::Attention<float, heed::DarScore<float>, ...>".

#include <heed/core/config.hpp>

#include <string>
#include <string_view>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Type>
[[nodiscard]] constexpr const char* compilers_type_text() {
  return __PRETTY_FUNCTION__;  // "... [with Type = heed::v0_1_avx2_openmp::Softmax<float>]"
}

template <class Type>
[[nodiscard]] std::string type_text() {
  std::string text = compilers_type_text<Type>();
  text.erase(0, text.find("Type = ") + 7);
  text.pop_back();
  constexpr std::string_view inside = HEED_TEXT(HEED_ABI) "::";
  for (std::size_t at; (at = text.find(inside)) != std::string::npos;)
    text.erase(at, inside.size());
  return text;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
