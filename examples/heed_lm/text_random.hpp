// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/random.hpp>

#include <cstdint>

namespace heed_lm {

using heed::Index;

// Each has numbers of its own, so that one seed serves a whole run.
enum class Purpose : std::uint64_t { windows = 101, example_order = 102, parentheses = 103 };

// Random numbers one after another: the same on every machine.
class Draws : public heed::RandomSequence {
 public:
  // `number`: which step, epoch or example.
  Draws(std::uint64_t seed, Purpose purpose, std::uint64_t number)
      : RandomSequence(heed::CounterRandom(seed, std::uint64_t(purpose)).bits(0), number) {}
};

}  // namespace heed_lm
