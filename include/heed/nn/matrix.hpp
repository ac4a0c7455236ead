// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of numbers, (tokens, width): views of them, and memory that holds them.

#include <heed/core/view.hpp>
#include <heed/simd/scratch.hpp>

#include <algorithm>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Rows of Real or const Real, `stride` apart; the columns of a row lie side by side. Does not own.
template <class Real>
struct MatrixView {
  Real* data = nullptr;
  Index rows = 0, columns = 0, stride = 0;

  MatrixView() = default;
  MatrixView(Real* memory, Index row_count, Index column_count, Index row_stride)
      : data(memory), rows(row_count), columns(column_count), stride(row_stride) {}
  MatrixView(Real* memory, Index row_count, Index column_count)
      : MatrixView(memory, row_count, column_count, column_count) {}
  // A mutable view converts to a const one.
  template <class U>
  requires(std::is_same_v<const U, Real> && !std::is_const_v<U>)
      MatrixView(const MatrixView<U>& other)
      : MatrixView(other.data, other.rows, other.columns, other.stride) {}

  [[nodiscard]] bool given() const { return data != nullptr; }
  [[nodiscard]] Real* row(Index r) const { return data + r * stride; }
  [[nodiscard]] MatrixView column_range(Index first, Index count) const {
    return {data + first, rows, count, stride};
  }
  [[nodiscard]] MatrixView row_range(Index first, Index count) const {
    return {row(first), count, columns, stride};
  }
};

// Throws unless `m` has these extents, for example "Linear::forward: x is 4 x 8, it must be 4 x 16".
template <class Real>
void require_extents(const MatrixView<Real>& m, Index rows, Index columns, const char* where,
                     const char* name) {
  require(m.rows == rows && m.columns == columns, where, ": ", name, " is ", m.rows, " x ",
          m.columns, ", it must be ", rows, " x ", columns);
}

// Tokens of `batch` sequences, one below the other, as (batch, heads, len, dim): head h owns columns
// [h dim, (h + 1) dim).
template <class Real>
[[nodiscard]] TensorView<Real> heads_of(const MatrixView<Real>& tokens, Index batch, Index heads) {
  const Index len = batch > 0 ? tokens.rows / batch : 0,
              dim = heads > 0 ? tokens.columns / heads : 0;
  return {tokens.data, {batch, heads, len, dim}, {len * tokens.stride, dim, tokens.stride}};
}

// Memory for a matrix, aligned to a cache line.
template <class Real>
class Matrix {
 public:
  Matrix() = default;
  // A matrix of undefined contents.
  Matrix(Index rows, Index columns) { resize(rows, columns); }

  // Memory grows and never shrinks; contents are undefined afterwards. Throws std::bad_alloc.
  void resize(Index rows, Index columns) {
    require(rows >= 0 && columns >= 0, "Matrix: ", rows, " x ", columns,
            ", neither may be negative");
    const Index count = checked_product(rows, columns, "Matrix");
    if (count > capacity_) {
      memory_ = Scratch<Real>::lasting(count);
      data_ = memory_.take(count);
      capacity_ = count;
    }
    rows_ = rows;
    columns_ = columns;
  }
  void fill(Real value) { std::fill(data_, data_ + rows_ * columns_, value); }

  [[nodiscard]] Index rows() const { return rows_; }
  [[nodiscard]] Index columns() const { return columns_; }
  [[nodiscard]] MatrixView<Real> view() { return {data_, rows_, columns_}; }
  [[nodiscard]] MatrixView<const Real> view() const { return {data_, rows_, columns_}; }

 private:
  Scratch<Real> memory_;
  Real* data_ = nullptr;
  Index capacity_ = 0, rows_ = 0, columns_ = 0;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
