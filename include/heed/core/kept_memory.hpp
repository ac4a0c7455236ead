// SPDX-License-Identifier: Apache-2.0
#pragma once

// Memory that a thread keeps from call to call. A call works on as much scratch memory as the call before it, as a rule. C libraries
// give large memory back to the system when it is freed, and the system clears each page anew when the next call touches it:
// that can take longer than the call (bench/NOTES.md).

#include <heed/core/system.hpp>

#include <atomic>
#include <new>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Aligned to cache lines; where it fills two huge pages, it starts at one and asks for such pages.
struct MemoryBlock {
  static constexpr std::size_t alignment = 64;

  void* memory = nullptr;
  std::size_t bytes = 0;

  [[nodiscard]] static MemoryBlock allocate(std::size_t bytes) {
    const MemoryBlock block{::operator new(bytes, start(bytes)), bytes};
    if (is_large(bytes)) ask_for_huge_pages(block.memory, bytes);
    return block;
  }
  void free() const noexcept { ::operator delete(memory, start(bytes)); }

 private:
  [[nodiscard]] static bool is_large(std::size_t bytes) { return bytes >= 2 * kHugePage; }
  [[nodiscard]] static std::align_val_t start(std::size_t bytes) {
    return std::align_val_t(is_large(bytes) ? kHugePage : alignment);
  }
};

// The blocks that this thread has given back, the last one first.
class KeptMemory {
 public:
  // Bytes that a thread keeps at most. Sanitizers notice the use of freed memory, not of kept memory.
  static inline std::atomic<std::size_t> most = kIsSanitized ? 0 : std::size_t(64) << 20;

  // Uninitialised memory: a kept block of `bytes` bytes or at most a quarter more, else a new one. Throws std::bad_alloc.
  [[nodiscard]] static MemoryBlock take(std::size_t bytes) {
    List& list = of_thread();
    for (Kept** link = &list.first; *link; link = &(*link)->next)
      if ((*link)->bytes >= bytes && (*link)->bytes - bytes <= bytes / 4) return unlink(link);
    return MemoryBlock::allocate(bytes);
  }
  static void give_back(const MemoryBlock& block) noexcept {
    List& list = of_thread();
    const std::size_t limit = most.load(std::memory_order_relaxed);
    if (block.bytes < kLeast || block.bytes > limit || list.closed) return block.free();
    static const bool steady = keep_heap();
    (void)steady;
    // Frees what the thread keeps when it ends.
    thread_local struct End {
      ~End() {
        of_thread().closed = true;
        free_all();
      }
    } end;
    (void)end;
    if (list.bytes + block.bytes > limit)
      free_all();  // sizes that nobody asks for any more go, too
    list.first = ::new (block.memory) Kept{list.first, block.bytes};
    list.bytes += block.bytes;
  }
  [[nodiscard]] static std::size_t bytes() noexcept { return of_thread().bytes; }
  static void free_all() noexcept {
    while (of_thread().first) unlink(&of_thread().first).free();
  }

 private:
  // Smaller ones stay in the C library's own lists.
  static constexpr std::size_t kLeast = std::size_t(32) << 10;

  // What a call allocates beside its scratch comes from the heap. glibc gives the heap's free end back to the system once it is larger
  // than twice the largest block that was mapped and freed so far (mallopt(3)): 256 KiB where there was none, less than the gradients
  // of some ops fill. One such block, which nobody touches, spares all later calls that.
  static bool keep_heap() noexcept {
    void* volatile block = ::operator new(std::size_t(16) << 20, std::nothrow);
    ::operator delete(block);
    return true;
  }

  struct Kept {  // at the start of a block
    Kept* next;
    std::size_t bytes;
  };
  // Without a destructor, so that it can be used until the thread is gone.
  struct List {
    Kept* first = nullptr;
    std::size_t bytes = 0;
    bool closed = false;
  };
  [[nodiscard]] static List& of_thread() {
    thread_local List list;
    return list;
  }
  [[nodiscard]] static MemoryBlock unlink(Kept** link) {
    Kept* const kept = *link;
    *link = kept->next;
    of_thread().bytes -= kept->bytes;
    return {kept, kept->bytes};
  }
};

}  // namespace detail

// Sets how many bytes of scratch memory each thread keeps for its next call: 64 MiB unless this says otherwise, 0 under a sanitizer of
// addresses. A thread that keeps more frees it: this one at once, others when their next call ends. A thread that ends frees all.
inline void keep_scratch(std::size_t bytes) noexcept {
  detail::KeptMemory::most.store(bytes, std::memory_order_relaxed);
  if (detail::KeptMemory::bytes() > bytes) detail::KeptMemory::free_all();
}

}  // namespace HEED_ABI
}  // namespace heed
