// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/random.hpp>

#include <cstdint>

namespace heed_lm {

using heed::Index;

// Each purpose has its own random numbers, so that one seed serves a whole run.
// tasks/parens.cpp has number 103.
enum class Purpose : std::uint64_t { windows = 101, example_order = 102 };

// A sequence of random numbers that is the same on every machine.
class Draws : public heed::RandomSequence {
 public:
  // `number` counts the steps, epochs or examples, each of which has its own sequence.
  Draws(std::uint64_t seed, Purpose purpose, std::uint64_t number)
      : RandomSequence(heed::CounterRandom(seed, std::uint64_t(purpose)).bits(0), number) {}
};

}  // namespace heed_lm
