// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnable parameter: a small owning tensor. Scalars have shape (1), per-head values (heads).

#include <heed/core/error.hpp>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

namespace heed::inline HEED_ABI {

template <class T>
class Param {
 public:
  Param() = default;
  Param(T scalar) : shape_{1}, values_{scalar} {}
  Param(std::initializer_list<T> per_head) : shape_{Index(per_head.size())}, values_(per_head) {}
  Param(std::vector<Index> shape, std::vector<T> values)
      : shape_(std::move(shape)), values_(std::move(values)) {
    Index count = 1;
    for (const Index extent : shape_) count = checked_product(count, extent, "Param");
    require(count == size(), "Param: the shape holds ", count, " values, ", size(), " were given");
  }
  // Zeros of the given shape.
  explicit Param(std::vector<Index> shape) : shape_(std::move(shape)) {
    Index count = 1;
    for (const Index extent : shape_) count = checked_product(count, extent, "Param");
    values_.assign(std::size_t(count), T(0));
  }

  [[nodiscard]] const std::vector<Index>& shape() const { return shape_; }
  [[nodiscard]] Index extent(Index axis) const { return shape_.at(std::size_t(axis)); }
  [[nodiscard]] Index size() const { return Index(values_.size()); }
  [[nodiscard]] bool given() const { return !values_.empty(); }
  [[nodiscard]] T* data() { return values_.data(); }
  [[nodiscard]] const T* data() const { return values_.data(); }
  [[nodiscard]] T& operator[](Index i) { return values_[std::size_t(i)]; }
  [[nodiscard]] const T& operator[](Index i) const { return values_[std::size_t(i)]; }

  // The value that head h reads: the scalar, or its own.
  [[nodiscard]] const T& head(Index h) const { return values_[std::size_t(size() == 1 ? 0 : h)]; }
  [[nodiscard]] T& head(Index h) { return values_[std::size_t(size() == 1 ? 0 : h)]; }

  void set_zero() { std::fill(values_.begin(), values_.end(), T(0)); }

  template <class U>
  [[nodiscard]] Param<U> cast() const {
    std::vector<U> values;
    values.reserve(values_.size());
    for (const T& value : values_) values.push_back(U(value));
    return values.empty() ? Param<U>() : Param<U>(shape_, std::move(values));
  }

 private:
  std::vector<Index> shape_;
  std::vector<T> values_;
};

// Throws unless p is a scalar or has one value per head.
template <class T>
void require_per_head(const Param<T>& p, Index heads, const char* op, const char* name) {
  require(p.size() == 1 || p.size() == heads, op, ": ", name, " has ", p.size(),
          " values; it needs 1 or one per head (", heads, ")");
}

}  // namespace heed::inline HEED_ABI
