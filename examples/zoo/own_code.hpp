// SPDX-License-Identifier: Apache-2.0
#pragma once

// Used by the source files that CMakeLists.txt writes.

#include <heed/compiled.hpp>

#include <type_traits>

namespace zoo {

// The op of a variant, or an op without code if heed::compiled has its code. Each line of the list
// has its own number, so that no two types are the same.
template <class Op, std::size_t line>
using OwnCode = std::conditional_t<heed::BuiltIn<typename Op::Scalar>::template contains<Op>,
                                   heed::detail::NoOp<line, typename Op::Scalar>, Op>;

}  // namespace zoo
