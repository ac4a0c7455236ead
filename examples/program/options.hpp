// SPDX-License-Identifier: Apache-2.0
#pragma once

// Values of options, checked while they are still text: what CLI11 converts itself takes NaN for any number
// and -1 for 2^64 - 1.

#include "limits.hpp"

#include <CLI/CLI.hpp>

#include <charconv>
#include <cstdint>
#include <string>

namespace heed_program {

namespace detail {

template <class Number>
[[nodiscard]] bool read_number(const std::string& text, Number& number) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && stop == end;
}

[[nodiscard]] inline std::string short_text(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

template <class Number>
[[nodiscard]] CLI::Validator number_in(Number least, Number most, const std::string& range) {
  return CLI::Validator(
      [=](std::string& text) {
        Number x{};
        const bool good = read_number(text, x) && x >= least && x <= most;
        return good ? std::string() : "\"" + text + "\" is no " + range;
      },
      "");
}

}  // namespace detail

// Whole numbers from `least` to `most`.
[[nodiscard]] inline CLI::Validator whole(std::int64_t least, std::int64_t most) {
  return detail::number_in(
      least, most, "whole number from " + std::to_string(least) + " to " + std::to_string(most));
}
// Numbers from `least` to `most`; NaN is none.
[[nodiscard]] inline CLI::Validator number(double least, double most) {
  return detail::number_in(
      least, most, "number from " + detail::short_text(least) + " to " + detail::short_text(most));
}
[[nodiscard]] inline CLI::Validator seed() {
  return detail::number_in(std::uint64_t(0), ~std::uint64_t(0), "whole number from 0 to 2^64 - 1");
}
// `what`: "file" or "folder".
[[nodiscard]] inline CLI::Validator path_of(const std::string& what) {
  return CLI::Validator(
      [=](std::string& text) { return text.empty() ? "\"\" names no " + what : std::string(); },
      "");
}

}  // namespace heed_program
