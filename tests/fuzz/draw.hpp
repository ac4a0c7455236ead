// SPDX-License-Identifier: Apache-2.0
#pragma once

// The random decisions of one case: a stream of numbers that one seed fixes.

#include <heed/core/random.hpp>

#include <initializer_list>

namespace fuzz {

using heed::Index;

class Draw : public heed::RandomSequence {
 public:
  explicit Draw(std::uint64_t seed, std::uint64_t stream = 7) : RandomSequence(seed, stream) {}

  using RandomSequence::uniform;
  [[nodiscard]] double uniform(double low, double high) { return low + (high - low) * uniform(); }
  // Standard normal, rounded to a float: inputs and parameters are the same numbers in float and double.
  [[nodiscard]] double normal() { return double(float(RandomSequence::normal())); }
  // A float in [low, high).
  [[nodiscard]] double number(double low, double high) { return double(float(uniform(low, high))); }
  // A whole number in [low, high].
  [[nodiscard]] Index between(Index low, Index high) { return low + below(high - low + 1); }
  template <class X>
  [[nodiscard]] X pick(std::initializer_list<X> list) {
    return list.begin()[below(Index(list.size()))];
  }
};

}  // namespace fuzz
