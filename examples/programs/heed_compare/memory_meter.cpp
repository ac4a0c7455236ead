// SPDX-License-Identifier: Apache-2.0
#include "memory_meter.hpp"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

using heed::Index;

std::atomic<Index> held{0}, peak{0};

// A block starts with a gap as large as its alignment; the gap ends with the block's size.
constexpr std::size_t kPlainGap = alignof(std::max_align_t) < 16 ? 16 : alignof(std::max_align_t);

[[nodiscard]] std::size_t gap_for(std::align_val_t alignment) {
  return std::size_t(alignment) < kPlainGap ? kPlainGap : std::size_t(alignment);
}

void note_held(Index now) {
  Index highest = peak.load(std::memory_order_relaxed);
  while (now > highest && !peak.compare_exchange_weak(highest, now, std::memory_order_relaxed)) {
  }
}

// Null if there is no memory.
[[nodiscard]] void* allocate(std::size_t bytes, std::size_t gap) noexcept {
  if (bytes > SIZE_MAX - 2 * gap) return nullptr;
  const std::size_t whole = (bytes + gap + gap - 1) / gap * gap;  // aligned_alloc wants multiples
  char* block = static_cast<char*>(std::aligned_alloc(gap, whole));
  if (!block) return nullptr;
  reinterpret_cast<std::size_t*>(block + gap)[-1] = bytes;
  note_held(held.fetch_add(Index(bytes), std::memory_order_relaxed) + Index(bytes));
  return block + gap;
}

[[nodiscard]] void* allocate_or_throw(std::size_t bytes, std::size_t gap) {
  for (;;) {
    if (void* p = allocate(bytes, gap)) return p;
    const std::new_handler handler = std::get_new_handler();
    if (!handler) throw std::bad_alloc();
    handler();
  }
}

void release(void* p, std::size_t gap) noexcept {
  if (!p) return;
  held.fetch_sub(Index(static_cast<std::size_t*>(p)[-1]), std::memory_order_relaxed);
  std::free(static_cast<char*>(p) - gap);
}

}  // namespace

void* operator new(std::size_t n) { return allocate_or_throw(n, kPlainGap); }
void* operator new[](std::size_t n) { return allocate_or_throw(n, kPlainGap); }
void* operator new(std::size_t n, std::align_val_t a) { return allocate_or_throw(n, gap_for(a)); }
void* operator new[](std::size_t n, std::align_val_t a) { return allocate_or_throw(n, gap_for(a)); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return allocate(n, kPlainGap); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept {
  return allocate(n, kPlainGap);
}
void* operator new(std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, gap_for(a));
}
void* operator new[](std::size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, gap_for(a));
}

void operator delete(void* p) noexcept { release(p, kPlainGap); }
void operator delete[](void* p) noexcept { release(p, kPlainGap); }
void operator delete(void* p, std::size_t) noexcept { release(p, kPlainGap); }
void operator delete[](void* p, std::size_t) noexcept { release(p, kPlainGap); }
void operator delete(void* p, std::align_val_t a) noexcept { release(p, gap_for(a)); }
void operator delete[](void* p, std::align_val_t a) noexcept { release(p, gap_for(a)); }
void operator delete(void* p, std::size_t, std::align_val_t a) noexcept { release(p, gap_for(a)); }
void operator delete[](void* p, std::size_t, std::align_val_t a) noexcept {
  release(p, gap_for(a));
}
void operator delete(void* p, const std::nothrow_t&) noexcept { release(p, kPlainGap); }
void operator delete[](void* p, const std::nothrow_t&) noexcept { release(p, kPlainGap); }
void operator delete(void* p, std::align_val_t a, const std::nothrow_t&) noexcept {
  release(p, gap_for(a));
}
void operator delete[](void* p, std::align_val_t a, const std::nothrow_t&) noexcept {
  release(p, gap_for(a));
}

namespace compare {

MemoryMeter::MemoryMeter() : before_(held.load()) { peak.store(before_); }

Index MemoryMeter::peak_bytes() const { return peak.load() - before_; }

}  // namespace compare
