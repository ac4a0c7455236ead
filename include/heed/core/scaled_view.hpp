// SPDX-License-Identifier: Apache-2.0
#pragma once

// Views of rows as they are stored, and of int8 numbers with a scale per row.

#include <heed/core/narrow.hpp>
#include <heed/core/view.hpp>

#include <cstdint>

namespace heed {
inline namespace HEED_ABI {

// Rows of one head, `stride` apart, from some column on.
template <class Stored>
struct StoredRows {
  using Number = Stored;
  const Number* data;
  Index stride;

  [[nodiscard]] StoredRows from(Index row, Index column) const {
    return {data + row * stride + column, stride};
  }
};

// The same for int8 numbers: row k stands for its numbers times scales[k * scale_stride].
struct ScaledRows {
  using Number = std::int8_t;
  const Number* data;
  Index stride;
  const float* scales;
  Index scale_stride;

  [[nodiscard]] ScaledRows from(Index row, Index column) const {
    return {data + row * stride + column, stride, scales + row * scale_stride, scale_stride};
  }
};

// A view of int8 numbers (batch, heads, len, dim), which stand for floats: number x scale of the row, rounded to float.
class ScaledView {
 public:
  ScaledView() = default;
  // scales (batch, heads, len, 1), in pages of as many rows as the numbers. Throws std::invalid_argument.
  ScaledView(const TensorView<const std::int8_t>& numbers, const TensorView<const float>& scales)
      : numbers_(numbers), scales_(scales) {
    Shape wanted = numbers.shape();
    wanted.dim = 1;
    require(scales.shape() == wanted, "ScaledView: scales have shape ", scales.shape(),
            ", they must be ", wanted);
    require(scales.page_rows() == numbers.page_rows(), "ScaledView: scales have pages of ",
            scales.page_rows(), " rows, the numbers of ", numbers.page_rows());
    require(!scales.has_elements() || scales.row(0, 0, 0) != nullptr,
            "ScaledView: scales have a null pointer and shape ", scales.shape());
  }

  [[nodiscard]] const TensorView<const std::int8_t>& numbers() const { return numbers_; }
  [[nodiscard]] const TensorView<const float>& scales() const { return scales_; }

  [[nodiscard]] const Shape& shape() const { return numbers_.shape(); }
  [[nodiscard]] Index page_rows() const { return numbers_.page_rows(); }
  [[nodiscard]] bool given() const { return numbers_.given(); }
  [[nodiscard]] bool has_elements() const { return numbers_.has_elements(); }
  [[nodiscard]] float operator()(Index b, Index h, Index t, Index c) const {
    return scales_(b, h, t, 0) * float(numbers_(b, h, t, c));
  }
  // Address and sizes of the numbers, for checks; valid as long as the view.
  operator MemoryView() const { return numbers_; }

 private:
  TensorView<const std::int8_t> numbers_;
  TensorView<const float> scales_;
};

// Rows t, t + 1, ... of head (b, h), up to the end of their page.
template <class Number>
[[nodiscard]] StoredRows<std::remove_const_t<Number>> rows_of(const TensorView<Number>& view,
                                                              Index b, Index h, Index t) {
  return {view.row(b, h, t), view.strides().row};
}
[[nodiscard]] inline ScaledRows rows_of(const ScaledView& view, Index b, Index h, Index t) {
  return {view.numbers().row(b, h, t), view.numbers().strides().row, view.scales().row(b, h, t),
          view.scales().strides().row};
}

}  // namespace HEED_ABI
}  // namespace heed
