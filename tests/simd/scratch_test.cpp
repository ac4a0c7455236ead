// SPDX-License-Identifier: Apache-2.0
#include <heed/simd/scratch.hpp>

#include "catch.hpp"

#if __has_include(<sys/resource.h>)
#include <sys/resource.h>
#endif
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

using heed::Index;
using heed::Scratch;

namespace {

// The flags of Linux for the memory at `address` in /proc/self/smaps, in words of two letters; empty on other systems.
std::string flags_of(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const std::uintptr_t wanted = reinterpret_cast<std::uintptr_t>(address);
  bool holds = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::uintptr_t first = 0, end = 0;
    char dash = 0;
    if (words >> std::hex >> first >> dash >> end && dash == '-')
      holds = first <= wanted && wanted < end;
    if (holds && line.rfind("VmFlags:", 0) == 0) return line + ' ';
  }
  return {};
}

// Does the system show what memory has asked for huge pages? An emulator does not.
bool shows_huge_pages() {
#if defined(MADV_HUGEPAGE)
  constexpr std::size_t bytes = 2 * heed::kHugePage;
  void* const memory = ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool shown = ::madvise(memory, bytes, MADV_HUGEPAGE) == 0 &&
                     flags_of(memory).find(" hg ") != std::string::npos;
  ::munmap(memory, bytes);
  return shown;
#else
  return false;
#endif
}

}  // namespace

#if defined(__GLIBC__) && !defined(HEED_SANITIZED)  // sanitizers have heaps of their own
// The first test, since later ones free large memory, which has the same effect.
TEST_CASE("what calls free beside their scratch does not go back to the system", "[scratch]") {
  const auto pages_touched_anew = [] {
    rusage usage;
    ::getrusage(RUSAGE_SELF, &usage);
    return usage.ru_minflt;
  };
  const auto call = [] {
    const Scratch<float> scratch(50'000);
    std::vector<std::vector<float>> beside;
    for (int n = 0; n < 8; ++n) beside.emplace_back(25'000, 1.0F);  // 200 pages in all
  };
  for (int n = 0; n < 3; ++n) call();
  const long before = pages_touched_anew();
  for (int n = 0; n < 20; ++n) call();
  CHECK(pages_touched_anew() - before < 20 * 20);
}
#endif

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

TEST_CASE("a thread's next scratch is what its last one was", "[scratch]") {
  constexpr Index numbers = 100'000;
  heed::keep_scratch(std::size_t(1) << 20);
  const auto memory_of = [](Index count) { return Scratch<float>(count).take(count); };
  const float* const last = memory_of(numbers);
  CHECK(memory_of(numbers) == last);
  CHECK(memory_of(numbers * 9 / 10) == last);
  CHECK(memory_of(numbers / 2) != last);
  CHECK(memory_of(numbers + 1000) != last);
  {
    Scratch<float> one(numbers), other(numbers);  // at once: two memories
    CHECK(one.take(1) != other.take(1));
  }
  // What is too large is not kept in place of others.
  const float* const newest = memory_of(numbers);
  (void)memory_of(3 * numbers);
  const std::vector<std::vector<float>> where_it_was(8, std::vector<float>(numbers));
  CHECK(memory_of(numbers) == newest);
  // Nothing is kept of what lasts.
  const std::size_t kept = heed::detail::KeptMemory::bytes();
  Scratch<float>::lasting(numbers).take(numbers)[0] = 1;
  CHECK(heed::detail::KeptMemory::bytes() == kept);
  // Another thread has its own.
  std::thread([&] { CHECK(memory_of(numbers) != last); }).join();
}

namespace {

// Bytes of addresses that this process uses; 0 where the system does not say, and under a sanitizer, whose own addresses they
// are.
std::size_t bytes_in_use() {
  std::size_t pages = 0;
  if (heed::kIsSanitized) return 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * 4096;
}

}  // namespace

TEST_CASE("what threads keep is bounded, and ends with them", "[scratch]") {
  // Blocks so large that C libraries return them to the system when they are freed.
  constexpr std::size_t mebibyte = std::size_t(1) << 20, block = 40 * mebibyte;
  constexpr Index count = Index(block / sizeof(float));
  const auto grown_by = [](std::size_t most, int scratches) {
    heed::keep_scratch(0);
    const std::size_t before = bytes_in_use();
    heed::keep_scratch(most);
    {
      std::vector<Scratch<float>> all;
      for (int n = 0; n < scratches; ++n) all.emplace_back(count + 4096 * n);
    }
    const std::size_t after = bytes_in_use();
    return after > before ? after - before : 0;
  };
  CHECK(grown_by(0, 4) < block / 2);
  if (bytes_in_use() > 0) CHECK(grown_by(block * 5 / 2, 6) >= 2 * block);
  CHECK(grown_by(block * 5 / 2, 6) < 3 * block);
  CHECK(grown_by(block / 2, 6) < block / 2);  // one alone is larger
  heed::keep_scratch(4 * block);
  const std::size_t before = bytes_in_use();
  for (int n = 0; n < 8; ++n)
    std::thread([] {
      thread_local Scratch<float> to_the_end(count);  // outlives what the thread keeps
      to_the_end.take(1)[0] = 1;
      Scratch<float>{count}.take(1)[0] = 1;
    }).join();
  CHECK(bytes_in_use() <= before + 3 * block);
  heed::keep_scratch(0);
}

TEST_CASE("a piece of a piece stays null while pieces are only counted", "[scratch]") {
  float memory[4] = {};
  CHECK(heed::piece_at(memory, 3) == memory + 3);
  CHECK(heed::piece_at<float>(nullptr, 3) == nullptr);
}

TEST_CASE("large memory starts at a huge page and asks for such pages", "[scratch]") {
  constexpr Index page = Index(heed::kHugePage / sizeof(float));
  for (const Index count : {2 * page, 5 * page + 3}) {
    Scratch<float> scratch(count);
    float* memory = scratch.take(count);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % heed::kHugePage == 0);
    memory[count - 1] = 1;
    if (!shows_huge_pages()) continue;
    for (const Index at : {Index(0), count / page * page - 1}) {
      const std::string flags = flags_of(memory + at);
      INFO(flags);
      CHECK(flags.find(" hg ") != std::string::npos);
    }
  }
}
