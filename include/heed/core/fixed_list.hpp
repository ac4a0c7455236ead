// SPDX-License-Identifier: Apache-2.0
#pragma once

// A list of fixed capacity, which is allocated once. Elements stay where they are, and need neither be copied nor moved.
// The engine keeps lists of an op's own types in it: a std::vector of each type costs a compiler several times as much.

#include <heed/core/config.hpp>

#include <cstddef>
#include <new>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

template <class Element>
class FixedList {
 public:
  // Throws std::bad_alloc.
  explicit FixedList(Index room)
      : elements_(static_cast<Element*>(::operator new(std::size_t(room) * sizeof(Element),
                                                       std::align_val_t(alignof(Element))))) {}
  FixedList(const FixedList&) = delete;
  ~FixedList() {
    clear();
    ::operator delete(elements_, std::align_val_t(alignof(Element)));
  }

  // Adds one element; the list must have room for it.
  template <class... Arguments>
  Element& emplace(Arguments&&... arguments) {
    Element* const element =
        ::new (elements_ + size_) Element{std::forward<Arguments>(arguments)...};
    ++size_;
    return *element;
  }
  void clear() {
    while (size_ > 0) elements_[--size_].~Element();
  }

  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] Element* data() const { return elements_; }
  [[nodiscard]] Element* begin() const { return elements_; }
  [[nodiscard]] Element* end() const { return elements_ + size_; }
  [[nodiscard]] Element& operator[](std::size_t i) const { return elements_[i]; }

 private:
  Element* elements_;
  std::size_t size_ = 0;
};

}  // namespace HEED_ABI
}  // namespace heed
