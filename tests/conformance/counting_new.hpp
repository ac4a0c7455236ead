// SPDX-License-Identifier: Apache-2.0
#pragma once

// Replaces the global operator new by one that counts, and that fails on demand. Include it in one
// translation unit of a program. Calls keep no scratch memory there, so that each allocates what it needs.

#include <heed/core/kept_memory.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace heed_test {

struct Allocations {
  static inline std::atomic<long> until_failure{-1};  // 0: the next one fails; negative: none does
  static inline std::atomic<long> count{0};
  static inline std::atomic<long> bytes{0};  // requested, freed ones included

  static inline const bool keeps_nothing = (heed::keep_scratch(0), true);

  static void* take(std::size_t size, std::size_t alignment) {
    count.fetch_add(1, std::memory_order_relaxed);
    bytes.fetch_add(long(size), std::memory_order_relaxed);
    if (until_failure.load() >= 0 && until_failure.fetch_sub(1) == 0) throw std::bad_alloc();
    const std::size_t whole =
        (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
#if defined(_WIN32)
    void* memory = _aligned_malloc(whole, alignment);
#else
    void* memory = std::aligned_alloc(alignment, whole);
#endif
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
  }
  static void give_back(void* memory) noexcept {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    std::free(memory);
#endif
  }
};

}  // namespace heed_test

// Not inlined: compilers warn of free() on memory that they know came from operator new.
[[gnu::noinline]] void* operator new(std::size_t size) {
  return heed_test::Allocations::take(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new[](std::size_t size) {
  return heed_test::Allocations::take(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
[[gnu::noinline]] void* operator new(std::size_t size, std::align_val_t alignment) {
  return heed_test::Allocations::take(size, std::size_t(alignment));
}
[[gnu::noinline]] void* operator new[](std::size_t size, std::align_val_t alignment) {
  return heed_test::Allocations::take(size, std::size_t(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return heed_test::Allocations::take(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete[](void* memory) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::align_val_t) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  heed_test::Allocations::give_back(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  heed_test::Allocations::give_back(memory);
}
