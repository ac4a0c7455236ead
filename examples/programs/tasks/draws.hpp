// SPDX-License-Identifier: Apache-2.0
#pragma once

// The random numbers of one sequence.

#include "task.hpp"

#include <heed/core/random.hpp>

#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace tasks {

class Draws : public heed::RandomSequence {
 public:
  // Stream `number` of the streams of (seed, purpose).
  Draws(std::uint64_t seed, std::uint64_t purpose, std::uint64_t number)
      : RandomSequence(heed::CounterRandom(seed, purpose).bits(0), number) {}
  // Each split has a purpose of its own.
  explicit Draws(const Place& place)
      : Draws(place.seed, kSplits + std::uint64_t(place.split), place.index) {}

  // Uniform in [first, end).
  [[nodiscard]] Index between(Index first, Index end) { return first + below(end - first); }

  // `count` different numbers of [first, end) in random order.
  [[nodiscard]] std::vector<Index> distinct(Index count, Index first, Index end) {
    std::vector<Index> all(std::size_t(end - first));
    std::iota(all.begin(), all.end(), first);
    // Invariant: the numbers in front of i are drawn, those from i on are not.
    for (Index i = 0; i < count; ++i)
      std::swap(all[std::size_t(i)], all[std::size_t(between(i, end - first))]);
    all.resize(std::size_t(count));
    return all;
  }

  // `count` different places in the order in which they are drawn; the chance of each is
  // proportional to its weight among the remaining places.
  [[nodiscard]] std::vector<Index> distinct_by_weight(Index count,
                                                      std::vector<std::uint64_t> weights) {
    std::uint64_t total = std::accumulate(weights.begin(), weights.end(), std::uint64_t(0));
    std::vector<Index> places;
    // Invariant: `total` is the sum of the weights, and those of drawn places are 0.
    while (Index(places.size()) < count) {
      std::uint64_t rest = std::uint64_t(below(Index(total)));
      std::size_t place = 0;
      while (rest >= weights[place]) rest -= weights[place++];
      total -= std::exchange(weights[place], 0);
      places.push_back(Index(place));
    }
    return places;
  }

 private:
  static constexpr std::uint64_t kSplits = 200;
};

}  // namespace tasks
