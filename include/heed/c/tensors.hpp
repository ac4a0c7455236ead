// SPDX-License-Identifier: Apache-2.0
#pragma once

// Views of the tensors of c.h in C++ types. Errors are std::invalid_argument with one sentence.

#include <heed/c.h>
#include <heed/io/dlpack.hpp>
#include <heed/mask/mask.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/simd/stored_view.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

[[nodiscard]] inline bool has_dtype(const DLTensor& tensor, std::uint8_t code, int bits) {
  return tensor.dtype.code == code && tensor.dtype.bits == bits && tensor.dtype.lanes == 1;
}

// A tensor of a call that computes with the Real of Element; null for a tensor that is not given.
// Errors begin with `where`.
template <class Element>
[[nodiscard]] StoredView<Element> stored_view(const DLTensor* tensor, const char* name,
                                              const std::string& where,
                                              const char* of = "beside this query") {
  using Real = std::remove_const_t<Element>;
  if (tensor == nullptr) return {};
  const std::string who = where + ": " + name;
  if constexpr (std::is_same_v<Real, float>) {
    using Bfloat16 = std::conditional_t<std::is_const_v<Element>, const bfloat16, bfloat16>;
    using Half = std::conditional_t<std::is_const_v<Element>, const half, half>;
    if (has_dtype(*tensor, kDLBfloat, 16)) return detail::view_dlpack_as<Bfloat16>(*tensor, who);
    if (has_dtype(*tensor, kDLFloat, 16)) return detail::view_dlpack_as<Half>(*tensor, who);
  }
  require(has_dtype(*tensor, kDLFloat, 8 * sizeof(Real)), who, " has dtype ",
          detail::dtype_text(tensor->dtype), ", ", of, " it must be ",
          sizeof(Real) == 4 ? "float32, float16 or bfloat16" : "float64");
  return detail::view_dlpack_as<Element>(*tensor, who);
}

// Calls f(Real()) with the type in which a call with this query computes.
template <class F>
decltype(auto) with_real(const DLTensor* query, const std::string& where, F&& f) {
  if (query == nullptr || has_dtype(*query, kDLFloat, 32) || has_dtype(*query, kDLFloat, 16) ||
      has_dtype(*query, kDLBfloat, 16))
    return f(float());
  require(has_dtype(*query, kDLFloat, 64), where, ": query has dtype ",
          detail::dtype_text(query->dtype), ", it must be float64, float32, float16 or bfloat16");
  return f(double());
}

[[nodiscard]] inline Align align_of(int align, const char* name, const char* where) {
  require(align == heed_top_left || align == heed_bottom_right, where, ": ", name, " is ", align,
          ", it must be ", int(heed_top_left), " (heed_top_left) or ", int(heed_bottom_right),
          " (heed_bottom_right)");
  return align == heed_top_left ? Align::top_left : Align::bottom_right;
}

// A small tensor of any strides and number of axes, read or written number by number.
class SmallTensor {
 public:
  SmallTensor(const DLTensor& tensor, const std::string& who) : tensor_(tensor), who_(who) {
    const std::int32_t device = detail::device_of(tensor);
    require(device == kDLCPU, who, " is on ", detail::device_text(device), ", it must be on cpu");
    require(tensor.ndim >= 0 && tensor.ndim <= kMostAxes, who, " has ndim ", tensor.ndim,
            ", it must lie in [0, ", kMostAxes, "]");
    require(tensor.ndim == 0 || tensor.shape != nullptr, who, " has ndim ", tensor.ndim,
            " and a null shape");
    for (int axis = 0; axis < tensor.ndim; ++axis) {
      require(tensor.shape[axis] >= 0, who, " has an extent of ", tensor.shape[axis],
              ", it must not be negative");
      shape_.push_back(tensor.shape[axis]);
      size_ = checked_product(size_, shape_.back(), who.c_str());
    }
    if (size_ == 0) return;  // nothing is read
    require(tensor.data != nullptr, who, " has a null pointer and ", size_, " numbers");
    strides_.assign(shape_.size(), 1);
    if (tensor.strides != nullptr)
      strides_.assign(tensor.strides, tensor.strides + tensor.ndim);
    else
      for (std::size_t axis = shape_.size(); axis-- > 1;)
        strides_[axis - 1] = strides_[axis] * shape_[axis];
    find_place();
  }

  [[nodiscard]] const std::vector<Index>& shape() const { return shape_; }
  [[nodiscard]] Index size() const { return size_; }

  // All numbers, the last axis fastest.
  template <class Number>
  [[nodiscard]] std::vector<Number> numbers() const {
    std::vector<Number> values;
    with_dtype([&]<class Stored>(Stored) {
      values.reserve(std::size_t(size_));
      each([&](Index at) {
        Stored x;
        std::memcpy(&x, address(at, sizeof x), sizeof x);
        values.push_back(Number(x));
      });
    });
    return values;
  }
  // The same of a tensor of integers.
  [[nodiscard]] std::vector<Index> whole_numbers() const {
    require(has_dtype(tensor_, kDLInt, 64) || has_dtype(tensor_, kDLInt, 32), who_, " has dtype ",
            detail::dtype_text(tensor_.dtype), ", it must be int64 or int32");
    std::vector<Index> values;
    values.reserve(std::size_t(size_));
    each([&](Index at) {
      if (tensor_.dtype.bits == 64) {
        std::int64_t x;
        std::memcpy(&x, address(at, sizeof x), sizeof x);
        values.push_back(x);
      } else {
        std::int32_t x;
        std::memcpy(&x, address(at, sizeof x), sizeof x);
        values.push_back(Index(x));
      }
    });
    return values;
  }
  // Throws unless write() can write this many numbers of that shape.
  void require_writable(const std::vector<Index>& shape) const {
    const bool number = shape_.empty() && shape == std::vector<Index>{1};
    require(shape_ == shape || number, who_, " has shape ", detail::extents_text(shape_),
            ", it must be ", detail::extents_text(shape));
    with_dtype([](auto) {});                           // throws for others
    std::vector<std::pair<Index, std::size_t>> steps;  // from the shortest
    for (std::size_t axis = 0; axis < strides_.size(); ++axis)
      if (shape_[axis] > 1) steps.emplace_back(std::abs(strides_[axis]), axis);
    std::sort(steps.begin(), steps.end());
    Index taken = 1;
    for (const auto& [stride, axis] : steps) {
      require(stride >= taken, who_, " has stride ", strides_[axis], " along axis ", axis,
              " of extent ", shape_[axis], ", it is written: its numbers must not overlap");
      taken += stride * (shape_[axis] - 1);
    }
  }
  // The bytes from its lowest number to the end of its highest.
  [[nodiscard]] MemoryView memory() const {
    return {{1, 1, 1, Index(end_ - first_)},
            {},
            0,
            1,
            1,
            reinterpret_cast<const void*>(first_),
            [](const void* first, Index) { return first; }};
  }
  [[nodiscard]] bool overlaps(const SmallTensor& other) const {
    if (!may_overlap(memory(), other.memory())) return false;
    std::vector<std::pair<std::uintptr_t, std::uintptr_t>> numbers;
    for (const SmallTensor* tensor : {this, &other})
      tensor->each([&](Index at) {
        const auto first = reinterpret_cast<std::uintptr_t>(tensor->address(at, tensor->bytes()));
        numbers.emplace_back(first, first + tensor->bytes());
      });
    std::sort(numbers.begin(), numbers.end());
    return std::adjacent_find(numbers.begin(), numbers.end(), [](const auto& a, const auto& b) {
             return a.second > b.first;
           }) != numbers.end();
  }
  template <class Number>
  void write(const Number* values) const {
    with_dtype([&]<class Stored>(Stored) {
      using Wide = std::conditional_t<std::is_same_v<Stored, double>, double, float>;
      each([&](Index at) {
        const auto x = Stored(Wide(*values++));
        std::memcpy(address(at, sizeof x), &x, sizeof x);
      });
    });
  }

 private:
  static constexpr int kMostAxes = 8;

  template <class F>
  void with_dtype(F&& f) const {
    if (has_dtype(tensor_, kDLFloat, 64)) return f(double());
    if (has_dtype(tensor_, kDLFloat, 32)) return f(float());
    if (has_dtype(tensor_, kDLFloat, 16)) return f(half());
    require(has_dtype(tensor_, kDLBfloat, 16), who_, " has dtype ",
            detail::dtype_text(tensor_.dtype),
            ", it must be float64, float32, float16 or bfloat16");
    f(bfloat16());
  }
  [[nodiscard]] std::size_t bytes() const { return (tensor_.dtype.bits + 7U) / 8U; }
  // Throws unless all numbers have addresses.
  void find_place() {
    Index below = 0, above = 1;
    bool beyond = tensor_.byte_offset > detail::kFurthest;
    for (std::size_t axis = 0; axis < strides_.size(); ++axis) {
      Index far = 0;
      beyond |= __builtin_mul_overflow(strides_[axis], shape_[axis] - 1, &far);
      Index& side = far < 0 ? below : above;
      beyond |= __builtin_add_overflow(side, far, &side);
    }
    for (Index* side : {&below, &above}) beyond |= __builtin_mul_overflow(*side, bytes(), side);
    std::uintptr_t origin = 0;
    beyond |= __builtin_add_overflow(reinterpret_cast<std::uintptr_t>(tensor_.data),
                                     tensor_.byte_offset, &origin);
    beyond |= __builtin_add_overflow(origin, below, &first_);
    beyond |= __builtin_add_overflow(origin, above, &end_);
    if (!beyond) return;
    std::string strides;
    for (const Index stride : strides_)
      strides += (strides.empty() ? "" : ",") + std::to_string(stride);
    fail(who_, " has strides (", strides, ") and byte_offset ", tensor_.byte_offset,
         ", its numbers lie beyond the address space");
  }
  // Calls f(offset), in elements, for each number.
  template <class F>
  void each(F&& f) const {
    for (Index n = 0; n < size_; ++n) {
      Index rest = n, at = 0;
      for (std::size_t axis = shape_.size(); axis-- > 0; rest /= shape_[axis])
        at += rest % shape_[axis] * strides_[axis];
      f(at);
    }
  }
  [[nodiscard]] unsigned char* address(Index at, std::size_t bytes) const {
    return static_cast<unsigned char*>(tensor_.data) + tensor_.byte_offset + at * Index(bytes);
  }

  const DLTensor& tensor_;
  std::string who_;
  std::vector<Index> shape_, strides_;
  Index size_ = 1;
  std::uintptr_t first_ = 0, end_ = 0;
};

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
