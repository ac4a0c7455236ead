// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers as text, for tables and files.

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <string>

namespace compare {

// Formats like printf, into a string.
[[nodiscard]] __attribute__((format(printf, 1, 2))) inline std::string print(const char* format,
                                                                             ...) {
  std::va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, arguments);
  va_end(arguments);
  std::string text(std::size_t(length) + 1, '\0');
  std::vsnprintf(text.data(), text.size(), format, again);
  va_end(again);
  text.pop_back();
  return text;
}

// A number for CSV; empty if it is not finite, where JSON has null.
[[nodiscard]] inline std::string csv_number(double x, int digits) {
  return std::isfinite(x) ? print("%.*g", digits, x) : "";
}

}  // namespace compare
