// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scratch memory of one worker, which is taken once and then handed out in aligned pieces.

#include <heed/core/error.hpp>
#include <heed/core/kept_memory.hpp>

#include <limits>
#include <new>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class Scratch {
 public:
  static constexpr std::size_t alignment = detail::MemoryBlock::alignment;

  // A scratch without memory: take() returns null and counts, so that a first run of the code that
  // takes pieces finds how large the memory must be.
  Scratch() = default;
  // Room for `count` elements, in whole cache lines; throws std::bad_alloc.
  explicit Scratch(Index count)
      : block_(detail::KeptMemory::take(bytes_of(count))), capacity_(padded(count)) {}
  // The same for what outlives calls: the thread keeps nothing of it.
  [[nodiscard]] static Scratch lasting(Index count) {
    Scratch own;
    own.block_ = detail::MemoryBlock::allocate(bytes_of(count));
    own.capacity_ = padded(count);
    own.lasts_ = true;
    return own;
  }
  Scratch(Scratch&& other) noexcept
      : block_(std::exchange(other.block_, {})),
        capacity_(other.capacity_),
        used_(other.used_),
        lasts_(other.lasts_) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(block_, other.block_);
    std::swap(capacity_, other.capacity_);
    std::swap(used_, other.used_);
    std::swap(lasts_, other.lasts_);
    return *this;
  }
  ~Scratch() { lasts_ ? block_.free() : detail::KeptMemory::give_back(block_); }

  // The next `count` uninitialised elements, aligned to a cache line.
  [[nodiscard]] Real* take(Index count) {
    const Index at = used_;
    if (count > kMost - used_) throw std::bad_alloc();  // no memory holds that many
    used_ += padded(count);
    if (!block_.memory) return nullptr;
    if (used_ > capacity_) throw std::logic_error("Scratch: more taken than was sized");
    return static_cast<Real*>(block_.memory) + at;
  }

  // Makes all of the memory free again.
  void clear() { used_ = 0; }
  // Elements taken so far.
  [[nodiscard]] Index used() const { return used_; }

 private:
  static constexpr Index kMost =
      std::numeric_limits<Index>::max() / Index(sizeof(Real)) - Index(alignment);
  // Elements that take(count) uses up: whole cache lines.
  [[nodiscard]] static constexpr Index padded(Index count) {
    constexpr Index line = Index(alignment / sizeof(Real));
    return (count + line - 1) / line * line;
  }
  [[nodiscard]] static constexpr std::size_t bytes_of(Index count) {
    return std::size_t(padded(count)) * sizeof(Real);
  }
  detail::MemoryBlock block_;
  Index capacity_ = 0, used_ = 0;
  bool lasts_ = false;
};

// memory + offset, or null if `memory` is null, as it is from a Scratch that only counts.
template <class Real>
[[nodiscard]] Real* piece_at(Real* memory, Index offset) {
  return memory ? memory + offset : nullptr;
}

// The number of elements that `build(scratch)` takes from a scratch.
template <class Real, class Build>
[[nodiscard]] Index scratch_elements(Build&& build) {
  Scratch<Real> counter;
  (void)build(counter);
  return counter.used();
}

}  // namespace HEED_ABI
}  // namespace heed
