// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/config.hpp>

#include <concepts>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// A reference to a function, valid only during the full expression that made it. A function that
// takes one is compiled once, and not for each argument.
template <class... Arguments>
class FunctionRef {
 public:
  template <class F>
  requires(!std::same_as<std::remove_cvref_t<F>, FunctionRef>) FunctionRef(F&& f)
      : of_(const_cast<void*>(static_cast<const void*>(&f))),
        call_([](void* of, Arguments... arguments) {
          (*static_cast<std::remove_reference_t<F>*>(of))(arguments...);
        }) {}
  void operator()(Arguments... arguments) const { call_(of_, arguments...); }

 private:
  void* of_;
  void (*call_)(void*, Arguments...);
};

}  // namespace HEED_ABI
}  // namespace heed
