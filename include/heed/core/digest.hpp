// SPDX-License-Identifier: Apache-2.0
#pragma once

// A digest: one number of 64 bits that stands for many numbers when they are compared.

#include <heed/core/random.hpp>

#include <concepts>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Equal numbers in the same order have equal digests; different ones share a digest only by chance, once in 2^64 pairs.
class Digest {
 public:
  template <class Number>
  void add(Number number) {
    if constexpr (std::floating_point<Number>) number += Number(0);  // -0 equals 0
    std::uint64_t bits = 0;
    static_assert(sizeof number <= sizeof bits);
    std::memcpy(&bits, &number, sizeof number);
    sum_ += CounterRandom(bits).bits(count_++);
  }
  template <class Number>
  void add(const std::vector<Number>& numbers) {
    add(numbers.size());
    for (const Number& number : numbers) add(number);
  }
  [[nodiscard]] std::uint64_t sum() const { return sum_; }
  [[nodiscard]] std::string text() const { return "#" + std::to_string(sum_); }

 private:
  std::uint64_t sum_ = 0, count_ = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
