// SPDX-License-Identifier: Apache-2.0
#pragma once

// The random decisions of one case: a stream of numbers that one seed fixes.

#include <heed/core/random.hpp>

#include <initializer_list>

namespace fuzz {

using heed::Index;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random_(seed, 7) {}

  // In [0, 1).
  [[nodiscard]] double uniform() { return random_.uniform(next_++); }
  [[nodiscard]] double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // Standard normal, rounded to a float: inputs and parameters are the same numbers in float and double.
  [[nodiscard]] double normal() { return double(float(random_.normal(next_++))); }
  // A float in [low, high).
  [[nodiscard]] double number(double low, double high) { return double(float(uniform(low, high))); }
  // In [0, count).
  [[nodiscard]] Index below(Index count) {
    return Index(random_.bits(next_++) % std::uint64_t(count));
  }
  // In [low, high].
  [[nodiscard]] Index between(Index low, Index high) { return low + below(high - low + 1); }
  [[nodiscard]] bool chance(double probability) { return uniform() < probability; }
  template <class X>
  [[nodiscard]] X pick(std::initializer_list<X> list) {
    return list.begin()[below(Index(list.size()))];
  }

 private:
  heed::CounterRandom random_;
  std::uint64_t next_ = 0;
};

}  // namespace fuzz
