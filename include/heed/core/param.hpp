// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnable parameter: a small owning tensor. Scalars have shape (1), per-head values (heads).

#include <heed/core/error.hpp>

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
class Param {
 public:
  Param() = default;
  Param(Real scalar) : shape_{1}, values_{scalar} {}
  Param(std::initializer_list<Real> per_head) : shape_{Index(per_head.size())}, values_(per_head) {}
  Param(std::vector<Index> shape, std::vector<Real> values)
      : shape_(std::move(shape)), values_(std::move(values)) {
    const Index count = count_of(shape_);
    require(count == size(), "Param: the shape holds ", count, " values, ", size(), " were given");
  }
  // Zeros of the given shape.
  explicit Param(std::vector<Index> shape)
      : shape_(std::move(shape)), values_(std::size_t(count_of(shape_)), Real(0)) {}

  [[nodiscard]] const std::vector<Index>& shape() const { return shape_; }
  [[nodiscard]] Index extent(Index axis) const { return shape_.at(std::size_t(axis)); }
  [[nodiscard]] Index size() const { return Index(values_.size()); }
  [[nodiscard]] bool given() const { return !values_.empty(); }
  [[nodiscard]] Real* data() { return values_.data(); }
  [[nodiscard]] const Real* data() const { return values_.data(); }
  [[nodiscard]] Real& operator[](Index i) { return values_[std::size_t(i)]; }
  [[nodiscard]] const Real& operator[](Index i) const { return values_[std::size_t(i)]; }

  // The value for head h: the scalar, or the head's own.
  [[nodiscard]] const Real& head(Index h) const {
    return values_[std::size_t(size() == 1 ? 0 : h)];
  }
  [[nodiscard]] Real& head(Index h) { return values_[std::size_t(size() == 1 ? 0 : h)]; }

  void set_zero() { std::fill(values_.begin(), values_.end(), Real(0)); }

  template <class U>
  [[nodiscard]] Param<U> cast() const {
    std::vector<U> values;
    values.reserve(values_.size());
    for (const Real& value : values_) values.push_back(U(value));
    return shape_.empty() ? Param<U>() : Param<U>(shape_, std::move(values));
  }

 private:
  [[nodiscard]] static Index count_of(const std::vector<Index>& shape) {
    Index count = 1;
    for (const Index extent : shape) {
      require(extent >= 0, "Param: an extent is ", extent, ", it must not be negative");
      count = checked_product(count, extent, "Param");
    }
    return count;
  }
  std::vector<Index> shape_;
  std::vector<Real> values_;
};

template <class>
inline constexpr bool is_param = false;
template <class Real>
inline constexpr bool is_param<Param<Real>> = true;

// Throws unless p is a scalar or has one value per head.
template <class Real>
void require_per_head(const Param<Real>& p, Index heads, const char* op, const char* name) {
  require(p.size() == 1 || p.size() == heads, op, ": ", name, " has ", p.size(),
          " values, the call has ", heads, " heads; it needs 1 value, or one per head");
}

// Throws unless p, of shape (1 or heads, ...), has a row for all heads or one for each.
template <class Real>
void require_rows_per_head(const Param<Real>& p, Index heads, const char* op, const char* name) {
  require(p.extent(0) == 1 || p.extent(0) == heads, op, ": ", name, " has ", p.extent(0),
          " rows, the call has ", heads, " heads; it needs 1 row, or one per head");
}

}  // namespace HEED_ABI
}  // namespace heed
