// SPDX-License-Identifier: Apache-2.0
#include <heed/simd/scratch.hpp>

#include "catch.hpp"

#include <cstdint>
#include <vector>

using heed::Index;
using heed::Scratch;

TEMPLATE_TEST_CASE("pieces of a scratch are aligned to lines of cache and share none", "[scratch]",
                   float, double) {
  using T = TestType;
  Scratch<T> scratch(4096);
  T* end = nullptr;
  for (const Index count : {1, 7, 16, 0, 33, 100}) {
    T* piece = scratch.take(count);
    CHECK(reinterpret_cast<std::uintptr_t>(piece) % Scratch<T>::alignment == 0);
    CHECK((end == nullptr || piece >= end));
    for (Index i = 0; i < count; ++i) piece[i] = T(i);
    end = piece + count;
  }
}

TEMPLATE_TEST_CASE("a scratch without memory counts exactly what one with memory must hold",
                   "[scratch]", float, double) {
  using T = TestType;
  const auto build = [](Scratch<T>& scratch) {
    std::vector<T*> pieces;
    for (const Index count : {5, 1, 64, 31}) pieces.push_back(scratch.take(count));
    return pieces;
  };
  const Index elements = heed::scratch_elements<T>(build);
  Scratch<T> counter;
  for (const T* piece : build(counter)) CHECK(piece == nullptr);
  CHECK(counter.used() == elements);
  Scratch<T> scratch(elements);
  for (const T* piece : build(scratch)) CHECK(piece != nullptr);
  CHECK(scratch.used() == elements);
  CHECK_THROWS_AS((void)scratch.take(1), std::logic_error);
}

TEMPLATE_TEST_CASE("a count that no memory holds is refused and overflows nothing", "[scratch]",
                   float, double) {
  using T = TestType;
  const Index most = std::numeric_limits<Index>::max();
  Scratch<T> counter;
  CHECK_THROWS_AS((void)counter.take(most), std::bad_alloc);
  (void)counter.take(most / Index(sizeof(T)) / 2);
  CHECK_THROWS_AS((void)counter.take(most / Index(sizeof(T)) / 2 + 1), std::bad_alloc);
}

TEST_CASE("a scratch that was moved keeps its pieces", "[scratch]") {
  Scratch<float> first(64);
  float* piece = first.take(16);
  piece[3] = 5;
  Scratch<float> second(std::move(first));
  CHECK(piece[3] == 5);
  CHECK(second.take(16) == piece + 16);
  Scratch<float> third;
  third = std::move(second);
  CHECK(third.take(16) == piece + 32);
}

TEST_CASE("a piece of a piece stays null while pieces are only counted", "[scratch]") {
  float memory[4] = {};
  CHECK(heed::piece_at(memory, 3) == memory + 3);
  CHECK(heed::piece_at<float>(nullptr, 3) == nullptr);
}
