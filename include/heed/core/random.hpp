// SPDX-License-Identifier: Apache-2.0
#pragma once

// Random numbers by counter: number i of stream s is a function of (seed, s, i) alone, the same on every
// machine and for any number of threads.

#include <heed/core/config.hpp>

#include <cmath>
#include <cstdint>
#include <numbers>

namespace heed {
inline namespace HEED_ABI {

class CounterRandom {
 public:
  explicit CounterRandom(std::uint64_t seed, std::uint64_t stream = 0)
      : key_(mix(seed + 0x9E3779B97F4A7C15ULL) ^ mix(stream + 0xD1B54A32D192ED03ULL)) {}

  [[nodiscard]] std::uint64_t bits(std::uint64_t i) const {
    return mix(key_ + (i + 1) * 0x9E3779B97F4A7C15ULL);
  }
  // Uniform in [0, 1), 53 bits.
  [[nodiscard]] double uniform(std::uint64_t i) const { return double(bits(i) >> 11) * 0x1.0p-53; }
  // Standard normal, by Box and Muller's transform.
  [[nodiscard]] double normal(std::uint64_t i) const {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(2 * i)));
    return radius * std::cos(2.0 * std::numbers::pi * uniform(2 * i + 1));
  }

 private:
  // The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
  [[nodiscard]] static std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
  }
  std::uint64_t key_;
};

// The numbers of one stream, one after another.
class RandomSequence {
 public:
  explicit RandomSequence(std::uint64_t seed, std::uint64_t stream = 0) : numbers_(seed, stream) {}

  // Uniform in [0, 1), 53 bits.
  [[nodiscard]] double uniform() { return numbers_.uniform(next_++); }
  // Standard normal.
  [[nodiscard]] double normal() { return numbers_.normal(next_++); }
  // Uniform in [0, count); the remainder favours small numbers by less than count / 2^64.
  [[nodiscard]] Index below(Index count) {
    return Index(numbers_.bits(next_++) % std::uint64_t(count));
  }
  [[nodiscard]] bool chance(double probability) { return uniform() < probability; }

 private:
  CounterRandom numbers_;
  std::uint64_t next_ = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
