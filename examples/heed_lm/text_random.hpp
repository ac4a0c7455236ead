// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/random.hpp>

#include <heed/core/config.hpp>

#include <cstdint>

namespace heed_lm {

using heed::Index;

// Each purpose has its own random numbers, so that one seed serves a whole run.
enum class Purpose : std::uint64_t { windows = 101, example_order = 102, parentheses = 103 };

// A sequence of random numbers that is the same on every machine.
class Draws {
 public:
  // `number` counts the steps, epochs or examples, each of which has its own sequence.
  Draws(std::uint64_t seed, Purpose purpose, std::uint64_t number)
      : random_(heed::CounterRandom(seed, std::uint64_t(purpose)).bits(0), number) {}

  // A number of [0, count), uniform but for less than count / 2^64, by which small ones are favoured.
  [[nodiscard]] Index below(Index count) {
    return Index(random_.bits(next_++) % std::uint64_t(count));
  }
  [[nodiscard]] bool chance(double probability) { return random_.uniform(next_++) < probability; }

 private:
  heed::CounterRandom random_;
  std::uint64_t next_ = 0;
};

}  // namespace heed_lm
