// SPDX-License-Identifier: Apache-2.0
#pragma once

// Turns exceptions into the status values that functions of c.h return.

#include <heed/c.h>
#include <heed/core/config.hpp>

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// Calls f(). An exception becomes a status and a sentence, which begins with the name of the function.
template <class F>
[[nodiscard]] int guarded(std::string& error, const std::string_view door, F&& f) noexcept {
  const auto failed = [&](int status, std::string_view text) {
    if (text.starts_with("KvCache")) text.remove_prefix(text.find(": ") + 2);
    try {
      error = text.starts_with(door) ? "" : std::string(door) + ": ";
      error += text;
    } catch (...) {
      error.clear();  // no memory for the sentence either
    }
    return status;
  };
  try {
    f();
    return heed_ok;
  } catch (const std::invalid_argument& wrong) {
    return failed(heed_invalid, wrong.what());
  } catch (const std::bad_alloc&) {
    return failed(heed_no_memory, "memory ran out");
  } catch (const std::length_error&) {  // more numbers than a vector may ever hold
    return failed(heed_no_memory, "memory ran out");
  } catch (const std::exception& other) {
    return failed(heed_failed, other.what());
  } catch (...) {
    return failed(heed_failed, "an exception of no known type was thrown");
  }
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
