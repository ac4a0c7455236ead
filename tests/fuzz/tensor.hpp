// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors in memory of any layout: axes in any order, gaps between rows, heads and batches, axes that run backwards,
// parts of one packed projection. The memory between and around the numbers holds canaries: NaN, so
// that a read there shows in the results; untouched() finds a write.

#include <heed/core/view.hpp>

#include "fuzz/draw.hpp"

#include <cstring>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace fuzz {

template <class T>
struct Memory {
  std::unique_ptr<T[]> numbers;
  std::vector<char> owned;  // true for memory of a tensor

  explicit Memory(Index count) : numbers(new T[std::size_t(count)]), owned(std::size_t(count), 0) {
    for (Index i = 0; i < count; ++i) numbers[std::size_t(i)] = canary();
  }
  [[nodiscard]] static T canary() {
    if constexpr (std::is_same_v<T, bool>)
      return true;
    else
      return std::numeric_limits<T>::quiet_NaN();
  }
  [[nodiscard]] bool untouched() const {
    const T gap = canary();
    for (std::size_t i = 0; i < owned.size(); ++i)
      if (!owned[i] && std::memcmp(&numbers[i], &gap, sizeof(T)) != 0) return false;
    return true;
  }
};

template <class T>
class Tensor {
 public:
  Tensor() = default;  // not given
  // A tensor in memory of its own, laid out at random.
  Tensor(Draw& draw, const heed::Shape& shape) : shape_(shape) {
    const Index extents[] = {shape.batch, shape.heads, shape.len};
    int order[] = {2, 1, 0};  // innermost first
    if (draw.chance(0.6))
      for (int n = 2; n > 0; --n) std::swap(order[n], order[draw.below(n + 1)]);
    const bool gaps = draw.chance(0.5), backwards = draw.chance(0.4);
    Index strides[3], step = shape.dim;
    first_ = draw.below(5);
    for (const int axis : order) {
      if (gaps) step += draw.below(4);
      strides[axis] = step;
      step *= std::max<Index>(1, extents[axis]);
    }
    for (int axis = 0; axis < 3; ++axis)
      if (backwards && draw.chance(0.5) && extents[axis] > 0) {
        first_ += strides[axis] * (extents[axis] - 1);
        strides[axis] = -strides[axis];
      }
    strides_ = {strides[0], strides[1], strides[2]};
    memory_ = std::make_shared<Memory<T>>(step + 16);
    own();
  }
  // Part `part` of a packed projection (batch, len, parts * heads * dim) in `memory`.
  Tensor(std::shared_ptr<Memory<T>> memory, const heed::Shape& s, Index parts, Index part)
      : memory_(std::move(memory)), shape_(s), first_(part * s.heads * s.dim) {
    const Index row = parts * s.heads * s.dim;
    strides_ = {s.len * row, s.dim, row};
    own();
  }

  [[nodiscard]] bool given() const { return memory_ != nullptr; }
  [[nodiscard]] const heed::Shape& shape() const { return shape_; }
  [[nodiscard]] heed::TensorView<T> view() const {
    return given() ? heed::TensorView<T>(memory_->numbers.get() + first_, shape_, strides_)
                   : heed::TensorView<T>();
  }
  [[nodiscard]] bool untouched() const { return !given() || memory_->untouched(); }

  template <class U>
  void fill(const std::vector<U>& dense) {
    std::size_t n = 0;
    for_each([&](T& x) { x = T(dense[n++]); });
  }
  void fill(T number) {
    for_each([&](T& x) { x = number; });
  }
  [[nodiscard]] std::vector<double> dense() const {
    std::vector<double> numbers;
    for_each([&](T& x) { numbers.push_back(double(x)); });
    return numbers;
  }
  [[nodiscard]] std::string text() const {
    std::ostringstream text;
    text << "strides (" << strides_.batch << "," << strides_.head << "," << strides_.row << ")";
    return text.str();
  }

 private:
  template <class F>
  void for_each(F&& f) const {
    for (Index b = 0; b < shape_.batch; ++b)
      for (Index h = 0; h < shape_.heads; ++h)
        for (Index t = 0; t < shape_.len; ++t)
          for (Index c = 0; c < shape_.dim; ++c)
            f(memory_->numbers[std::size_t(first_ + b * strides_.batch + h * strides_.head +
                                           t * strides_.row + c)]);
  }
  void own() {
    const T* base = memory_->numbers.get();
    for_each([&](T& x) { memory_->owned[std::size_t(&x - base)] = 1; });
  }

  std::shared_ptr<Memory<T>> memory_;
  heed::Shape shape_;
  heed::Strides strides_;
  Index first_ = 0;
};

}  // namespace fuzz
