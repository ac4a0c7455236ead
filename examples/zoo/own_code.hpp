// SPDX-License-Identifier: Apache-2.0
#pragma once

// For the source files that CMakeLists.txt writes.

#include <heed/compiled.hpp>

#include <type_traits>

namespace zoo {

// The op of a variant, or, where heed::compiled has its code, an op without code.
template <class Op>
using OwnCode = std::conditional_t<heed::BuiltIn<typename Op::Scalar>::template contains<Op>,
                                   heed::detail::NoOp<0, typename Op::Scalar>, Op>;

}  // namespace zoo
