// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors of a share of a call (Inputs::share), as the engine reads them: it counts rows in the whole call, and row 0 of the
// tensor is row `before` of the call.

#include <heed/core/geometry.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// `held`, whose row 0 is row `before` of the call, as a view that is asked for rows of the call. The view's len is still
// the number of rows at hand; rows elsewhere must not be asked for.
template <class Element>
[[nodiscard]] TensorView<Element> rows_of_call(const TensorView<Element>& held, Index before) {
  if (before == 0 || held.data() == nullptr) return held;
  return {held.data() - before * held.strides().row, held.shape(), held.strides()};
}
// The other way.
template <class Element>
[[nodiscard]] TensorView<Element> held_rows(const TensorView<Element>& of_call, Index before) {
  return rows_of_call(of_call, -before);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
