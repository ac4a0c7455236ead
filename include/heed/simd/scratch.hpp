// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scratch memory of one worker, which is allocated once and then handed out in aligned pieces. Large memory starts at a huge
// page and asks for such pages.

#include <heed/core/error.hpp>
#include <heed/core/system.hpp>

#include <limits>
#include <new>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class Scratch {
 public:
  static constexpr std::size_t alignment = 64;

  // A scratch without memory: take() returns null and counts, so that a first run of the code that
  // takes pieces finds how large the memory must be.
  Scratch() = default;
  // Room for `count` elements, in whole cache lines; throws std::bad_alloc.
  explicit Scratch(Index count)
      : memory_(static_cast<Real*>(::operator new(bytes(padded(count)), start(padded(count))))),
        capacity_(padded(count)) {
    if (is_large(capacity_)) ask_for_huge_pages(memory_, bytes(capacity_));
  }
  Scratch(Scratch&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)),
        capacity_(other.capacity_),
        used_(other.used_) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(capacity_, other.capacity_);
    std::swap(used_, other.used_);
    return *this;
  }
  ~Scratch() { ::operator delete(memory_, start(capacity_)); }

  // The next `count` uninitialised elements, aligned to a cache line.
  [[nodiscard]] Real* take(Index count) {
    const Index at = used_;
    if (count > kMost - used_) throw std::bad_alloc();  // no memory holds that many
    used_ += padded(count);
    if (!memory_) return nullptr;
    if (used_ > capacity_) throw std::logic_error("Scratch: more taken than was sized");
    return memory_ + at;
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
  [[nodiscard]] static constexpr std::size_t bytes(Index count) {
    return std::size_t(count) * sizeof(Real);
  }
  // True if `count` elements fill two huge pages.
  [[nodiscard]] static constexpr bool is_large(Index count) {
    return bytes(count) >= 2 * kHugePage;
  }
  [[nodiscard]] static constexpr std::align_val_t start(Index count) {
    return std::align_val_t(is_large(count) ? kHugePage : alignment);
  }
  Real* memory_ = nullptr;  // <memory> would double the compile time of an op
  Index capacity_ = 0, used_ = 0;
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
