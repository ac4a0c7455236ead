// SPDX-License-Identifier: Apache-2.0
#pragma once

// Functions that read and write rows of numbers stored in another type than they are computed in. A view of such rows
// points to them (stored_view.hpp), so that a file which makes no such view compiles none of them.

#include <heed/simd/few_products.hpp>

namespace heed {
inline namespace HEED_ABI {

// Rows of one head, a stride apart: StoredRows or ScaledRows, whose type the Storage knows.
struct UntypedRows {
  const void* data;
  Index stride;
  const float* scales = nullptr;
  Index scale_stride = 0;

  template <class Number>
  explicit UntypedRows(const StoredRows<Number>& rows) : data(rows.data), stride(rows.stride) {}
  explicit UntypedRows(const ScaledRows& rows)
      : data(rows.data),
        stride(rows.stride),
        scales(rows.scales),
        scale_stride(rows.scale_stride) {}

  template <class Rows>
  [[nodiscard]] Rows as() const {
    const auto* numbers = static_cast<const typename Rows::Number*>(data);
    if constexpr (std::is_same_v<Rows, ScaledRows>)
      return {numbers, stride, scales, scale_stride};
    else
      return {numbers, stride};
  }
};

template <class Real>
struct Storage {
  // row_dots() with the columns from `column` on.
  void (*dots)(const UntypedRows& rows, Index column, Index keys, Index columns,
               const DotQuery<Real>* queries, Index count);
  // row_accumulate()
  void (*mix)(const UntypedRows& rows, Index keys, Index columns,
              const AccumulateQuery<Real>* queries, Index count, Index weight_step, Index out_step);
  // to[r][c] = rows[r][c]
  void (*widen)(const UntypedRows& rows, Index count, Index columns, Real* to, Index to_stride);
  // rows[r][c] = from[r][c], rounded to nearest; null where rows are only read.
  void (*narrow)(const Real* from, Index from_stride, Index count, Index columns,
                 const UntypedRows& rows);
};

namespace detail {

template <class Real, class Rows>
struct StorageOf {
  using Number = typename Rows::Number;
  static constexpr bool read_only = std::is_same_v<Rows, ScaledRows>;

  static void dots(const UntypedRows& rows, Index column, Index keys, Index columns,
                   const DotQuery<Real>* queries, Index count) {
    row_dots(rows.as<Rows>().from(0, column), keys, columns, queries, count);
  }
  static void mix(const UntypedRows& rows, Index keys, Index columns,
                  const AccumulateQuery<Real>* queries, Index count, Index weight_step,
                  Index out_step) {
    row_accumulate(rows.as<Rows>(), keys, columns, queries, count, weight_step, out_step);
  }
  static void widen(const UntypedRows& rows, Index count, Index columns, Real* to,
                    Index to_stride) {
    for (Index r = 0; r < count; ++r)
      convert(rows.as<Rows>().from(r, 0), columns, to + r * to_stride);
  }
  static void narrow(const Real* from, Index from_stride, Index count, Index columns,
                     const UntypedRows& rows) {
    // The view that points to this function was made of writable numbers.
    auto* to = const_cast<Number*>(static_cast<const Number*>(rows.data));
    if constexpr (!read_only)
      for (Index r = 0; r < count; ++r)
        convert(from + r * from_stride, columns, to + r * rows.stride);
  }
  [[nodiscard]] static constexpr Storage<Real> make() {
    if constexpr (read_only)
      return {&dots, &mix, &widen, nullptr};
    else
      return {&dots, &mix, &widen, &narrow};
  }
  static constexpr Storage<Real> table = make();
};

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
