// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scratch memory of one worker: sized once, then handed out in aligned pieces.

#include <heed/core/error.hpp>

#include <cstdlib>
#include <memory>
#include <new>

namespace heed::inline HEED_ABI {

template <class T>
class Scratch {
 public:
  static constexpr std::size_t alignment = 64;

  Scratch() = default;
  // Room for `count` elements; throws std::bad_alloc.
  explicit Scratch(Index count) : capacity_(count) {
    if (count > 0)
      memory_.reset(static_cast<T*>(::operator new(std::size_t(count) * sizeof(T),
                                                   std::align_val_t(alignment))));
  }

  // What take(count) consumes: whole cache lines.
  [[nodiscard]] static constexpr Index padded(Index count) {
    constexpr Index line = Index(alignment / sizeof(T));
    return (count + line - 1) / line * line;
  }

  // The next `count` uninitialised elements, aligned to a cache line.
  [[nodiscard]] T* take(Index count) {
    T* piece = memory_.get() + used_;
    used_ += padded(count);
    if (used_ > capacity_) throw std::logic_error("Scratch: more taken than was sized");
    return piece;
  }

  [[nodiscard]] Index bytes() const { return capacity_ * Index(sizeof(T)); }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete(p, std::align_val_t(alignment)); }
  };
  std::unique_ptr<T, Free> memory_;
  Index capacity_ = 0, used_ = 0;
};

}  // namespace heed::inline HEED_ABI
