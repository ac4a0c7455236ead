// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a part of an op reads beside the numbers that it is given. A part whose answer is the same in every head
// and at every position says so of itself, and of nothing that inherits from it:
//
//   using PlaceFree = MyScore;      // in struct MyScore
//
// Parameters with one value per head, and the columns that source() names, do not count: the engine sees them.
// The engine may then compute one query each of several heads as several queries of one head, where
// `query_index`, `key_index`, `head`, `first_row` and the like would tell the difference. Of a part that says
// nothing it expects that it reads all of them.

#include <heed/core/config.hpp>

#include <type_traits>

namespace heed::inline HEED_ABI {

template <class Part>
inline constexpr bool place_free = false;
template <class Part>
  requires requires { typename Part::PlaceFree; }
inline constexpr bool place_free<Part> = std::is_same_v<typename Part::PlaceFree, Part>;

}  // namespace heed::inline HEED_ABI
