// SPDX-License-Identifier: Apache-2.0
#pragma once

// Promises of a part of an op about what it does not read; they allow the engine faster ways. A
// part promises for itself only, and not for types that inherit from it:
//
//   using PlaceFree = MyScore;         // in struct MyScore
//
// PlaceFree     The answer is the same in every head and at every position. Parameters with one value per head, and
//               the columns that source() names, do not count: the engine sees them. One query each of several
//               heads may then be computed as several queries of one head, where query_index, key_index, head,
//               first_query, first_row and the like would tell the difference.
// NormedDots    A score reads pair.dot and pair.projected only times pair.query[0], and these products are what
//               stays in range. Both factors may then be scaled, their product unchanged, so that
//               rows whose dot product overflows have finite scores.
// KeptFeatures  A score's key features depend on the key's row, projected row and table entries, and on the numbers that
//               `std::vector<double> feature_numbers() const` gives, if the score has it, and on nothing else. A cache may
//               then keep them from call to call (engine/key_features.hpp). Projection, tables and
//               the parameters that features read need no mention: the engine compares them.
//
// Mergeable     A streaming normaliser gives each key the share exp(score) / sum of exp(score), over all keys that the
//               query sees and nothing else, and has join() (plug/streaming.hpp). The keys of a row may then be visited in
//               parts, each from begin() on, whose states are joined; and the answers of parts merge by their lse
//               (engine/partial.hpp).
// SumOfSoftmaxes  A row normaliser's weights are sums over its maps of a factor times the softmax of
//               the map's scores. Members of it give the factors, so that the maps may be computed apart (mpi/ring.hpp):
//                 map_factor(head, map, extra)                 of a row with this extra input
//                 map_factor_slope(map, extra)                 with uses_extra: its derivative by the extra input
//                 add_map_factor(head, map, dfactor, grad)     without: adds to the parameters of `grad`
//
// Without a promise the engine takes the general path.

#include <heed/core/config.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

template <class Part>
inline constexpr bool place_free = false;
template <class Part>
requires requires { typename Part::PlaceFree; }
inline constexpr bool place_free<Part> = std::is_same_v<typename Part::PlaceFree, Part>;

template <class Score>
inline constexpr bool normed_dots = false;
template <class Score>
requires requires { typename Score::NormedDots; }
inline constexpr bool normed_dots<Score> = std::is_same_v<typename Score::NormedDots, Score>;

template <class Score>
inline constexpr bool kept_features = false;
template <class Score>
requires requires { typename Score::KeptFeatures; }
inline constexpr bool kept_features<Score> = std::is_same_v<typename Score::KeptFeatures, Score>;

template <class Normaliser>
inline constexpr bool mergeable = false;
template <class Normaliser>
requires requires { typename Normaliser::Mergeable; }
inline constexpr bool mergeable<Normaliser> =
    std::is_same_v<typename Normaliser::Mergeable, Normaliser>;

template <class Normaliser>
inline constexpr bool sum_of_softmaxes = false;
template <class Normaliser>
requires requires { typename Normaliser::SumOfSoftmaxes; }
inline constexpr bool sum_of_softmaxes<Normaliser> =
    std::is_same_v<typename Normaliser::SumOfSoftmaxes, Normaliser>;

}  // namespace HEED_ABI
}  // namespace heed
