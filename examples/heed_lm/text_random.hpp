// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/random.hpp>

#include <heed/core/config.hpp>

#include <cstdint>

namespace heed_lm {

using heed::Index;

// Each has numbers of its own, so that one seed serves a whole run.
enum class Purpose : std::uint64_t { windows = 101, example_order = 102, parentheses = 103 };

// Random numbers in their order: the same on every machine.
class Draws {
 public:
  // `number`: which step, epoch or example.
  Draws(std::uint64_t seed, Purpose purpose, std::uint64_t number)
      : random_(heed::CounterRandom(seed, std::uint64_t(purpose)).bits(0), number) {}

  // Uniform in [0, count); the remainder favours small numbers by less than count / 2^64.
  [[nodiscard]] Index below(Index count) {
    return Index(random_.bits(next_++) % std::uint64_t(count));
  }
  [[nodiscard]] bool chance(double probability) { return random_.uniform(next_++) < probability; }

 private:
  heed::CounterRandom random_;
  std::uint64_t next_ = 0;
};

}  // namespace heed_lm
