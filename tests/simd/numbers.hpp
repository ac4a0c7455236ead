// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory for tests of the lowest layer: random numbers, and buffers that notice writes beside them.

#include <heed/core/random.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace heed_test {

using heed::Index;

// `count` numbers in [-1, 1), the same for a seed in every run.
template <class T>
[[nodiscard]] std::vector<T> random_numbers(Index count, std::uint64_t seed) {
  const heed::CounterRandom random(seed);
  std::vector<T> numbers;
  for (Index i = 0; i < count; ++i) numbers.push_back(T(2 * random.uniform(std::uint64_t(i)) - 1));
  return numbers;
}

// `count` numbers with a margin in front and behind that must keep its mark.
template <class T>
class Guarded {
 public:
  Guarded(Index count, T value)
      : numbers_(std::size_t(count) + 2 * kMargin, kMark), count_(std::size_t(count)) {
    std::fill_n(numbers_.begin() + kMargin, count_, value);
  }
  [[nodiscard]] T* data() { return numbers_.data() + kMargin; }
  [[nodiscard]] T operator[](Index i) const { return numbers_[std::size_t(i) + kMargin]; }
  [[nodiscard]] bool margins_are_untouched() const {
    const auto marked = [](T x) { return x == kMark; };
    return std::all_of(numbers_.begin(), numbers_.begin() + kMargin, marked) &&
           std::all_of(numbers_.end() - kMargin, numbers_.end(), marked);
  }

 private:
  static constexpr std::size_t kMargin = 64;
  static constexpr T kMark = T(-12345);
  std::vector<T> numbers_;
  std::size_t count_;
};

// Bound of the error of a sum of `terms` products whose absolute values add up to `size`: one rounding per
// product and one per addition, each of half an eps, and as much again for the sum that it is compared with.
template <class T>
[[nodiscard]] double sum_error(Index terms, double size) {
  return double(std::numeric_limits<T>::epsilon()) * double(terms + 1) * size +
         double(std::numeric_limits<T>::min());
}

}  // namespace heed_test
