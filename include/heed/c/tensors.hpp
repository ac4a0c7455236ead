// SPDX-License-Identifier: Apache-2.0
#pragma once

// Structs and tensors of c.h as those of C++. Errors are std::invalid_argument with one sentence.

#include <heed/c.h>
#include <heed/io/dlpack.hpp>
#include <heed/mask/mask.hpp>
#include <heed/plug/parameters.hpp>
#include <heed/simd/stored_view.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// The caller's struct, which may be shorter than ours: what it lacks is 0. It may be longer where all behind ours is 0.
template <class Struct>
[[nodiscard]] Struct adopt(const Struct* given, const char* name, const char* where) {
  require(given != nullptr, where, ": ", name, " is a null pointer");
  const std::size_t size = given->size;
  require(size > sizeof(std::size_t), where, ": the size of ", name, " is ", size,
          ", it must be that of its struct, ", sizeof(Struct));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t n = sizeof(Struct); n < size; ++n)
    require(bytes[n] == 0, where, ": ", name, " has something at byte ", n,
            ", this library knows the first ", sizeof(Struct), " bytes");
  Struct own{};
  std::memcpy(&own, given, std::min(size, sizeof(Struct)));
  return own;
}

[[nodiscard]] inline bool has_dtype(const DLTensor& tensor, std::uint8_t code, int bits) {
  return tensor.dtype.code == code && tensor.dtype.bits == bits && tensor.dtype.lanes == 1;
}

// A tensor of a call that computes with the Real of Element; null: one that is not given.
template <class Element>
[[nodiscard]] StoredView<Element> stored_view(const DLTensor* tensor, const char* name) {
  using Real = std::remove_const_t<Element>;
  if (tensor == nullptr) return {};
  if constexpr (std::is_same_v<Real, float>) {
    using Bfloat16 = std::conditional_t<std::is_const_v<Element>, const bfloat16, bfloat16>;
    using Half = std::conditional_t<std::is_const_v<Element>, const half, half>;
    if (has_dtype(*tensor, kDLBfloat, 16)) return view_dlpack<Bfloat16>(*tensor, name);
    if (has_dtype(*tensor, kDLFloat, 16)) return view_dlpack<Half>(*tensor, name);
  }
  return view_dlpack<Element>(*tensor, name);
}

// f(Real()) for what a call with this query computes with.
template <class F>
decltype(auto) with_real(const DLTensor* query, const std::string& where, F&& f) {
  if (query == nullptr || has_dtype(*query, kDLFloat, 32) || has_dtype(*query, kDLFloat, 16) ||
      has_dtype(*query, kDLBfloat, 16))
    return f(float());
  require(has_dtype(*query, kDLFloat, 64), where, ": query has dtype ",
          detail::dtype_text(query->dtype), ", it must be float of 16, 32 or 64 bits, or bfloat16");
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
    std::int32_t device = 0;  // copied: the number may be none of the enumeration's
    std::memcpy(&device, &tensor.device.device_type, sizeof device);
    require(device == kDLCPU, who, " is on device type ", device, ", it must be ", int(kDLCPU),
            " (CPU)");
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
    require(size_ == 0 || tensor.data != nullptr, who, " has a null pointer and ", size_,
            " numbers");
    strides_.assign(shape_.size(), 1);
    if (tensor.strides != nullptr)
      strides_.assign(tensor.strides, tensor.strides + tensor.ndim);
    else
      for (std::size_t axis = shape_.size(); axis-- > 1;)
        strides_[axis - 1] = strides_[axis] * shape_[axis];
  }

  [[nodiscard]] const std::vector<Index>& shape() const { return shape_; }
  [[nodiscard]] Index size() const { return size_; }

  // All numbers, the last axis fastest.
  template <class Number>
  [[nodiscard]] std::vector<Number> numbers() const {
    std::vector<Number> values;
    with_dtype("float of 16, 32 or 64 bits, or bfloat16", [&]<class Stored>(Stored) {
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
            detail::dtype_text(tensor_.dtype), ", it must be int of 32 or 64 bits");
    std::vector<Index> values;
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
    require(shape_ == shape, who_, " has shape ", detail::extents_text(shape_), ", it must be ",
            detail::extents_text(shape));
    require(has_dtype(tensor_, kDLFloat, 32) || has_dtype(tensor_, kDLFloat, 64), who_,
            " has dtype ", detail::dtype_text(tensor_.dtype),
            ", it must be float of 32 or 64 bits");
    for (std::size_t axis = 0; axis < shape_.size(); ++axis)
      require(strides_[axis] != 0 || shape_[axis] <= 1, who_, " has stride 0 along axis ", axis,
              " of extent ", shape_[axis], ", it is written");
  }
  template <class Number>
  void write(const Number* values) const {
    const bool twice = tensor_.dtype.bits == 64;
    each([&](Index at) {
      const auto x = double(*values++);
      const auto narrow = float(x);
      if (twice)
        std::memcpy(address(at, sizeof x), &x, sizeof x);
      else
        std::memcpy(address(at, sizeof narrow), &narrow, sizeof narrow);
    });
  }

 private:
  static constexpr int kMostAxes = 8;

  template <class F>
  void with_dtype(const char* wanted, F&& f) const {
    if (has_dtype(tensor_, kDLFloat, 64)) return f(double());
    if (has_dtype(tensor_, kDLFloat, 32)) return f(float());
    if (has_dtype(tensor_, kDLFloat, 16)) return f(half());
    require(has_dtype(tensor_, kDLBfloat, 16), who_, " has dtype ",
            detail::dtype_text(tensor_.dtype), ", it must be ", wanted);
    f(bfloat16());
  }
  // f(offset), in elements.
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
};

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
