// SPDX-License-Identifier: Apache-2.0
#pragma once

// The arithmetic of large products. Precision points to the products of pairs of bfloat16, so that
// a file which never names Precision::mixed compiles none of them.

#include <heed/simd/bfloat_pairs.hpp>

namespace heed {
inline namespace HEED_ABI {

// The products of pairs of bfloat16, and the functions that make and clear pairs (simd/bfloat_pairs.hpp).
struct PairProducts {
  decltype(&pair_columns) by_columns;
  decltype(&pair_rows) by_rows;
  bool (*finite)(const BfloatPair* pairs, Index stride, Index count, Index columns);
  decltype(&clear_non_finite) clear;
  // C = A B, or C += A B; as panel_gemm().
  void (*panel)(Store store, Index rows, Index depth, int vectors, const Broadcast<BfloatPair>& a,
                const BfloatPair* b, Index b_row, float* c, Index c_row, float* running_max,
                const float* first_row);
  // C += A B for any number of columns; as gemm_add().
  void (*add)(Index rows, Index depth, Index columns, const Broadcast<BfloatPair>& a,
              const BfloatPair* b, Index b_row, float* c, Index c_row);
};

namespace detail {

inline void panel_of_pairs(Store store, Index rows, Index depth, int vectors,
                           const Broadcast<BfloatPair>& a, const BfloatPair* b, Index b_row,
                           float* c, Index c_row, float* running_max, const float* first_row) {
  panel_product<BfloatPair>(store, rows, depth, vectors, in_segments(a, depth), b, b_row, c, c_row,
                            running_max, first_row);
}

inline constexpr PairProducts kPairProducts{
    &pair_columns,     &pair_rows,      &all_finite,
    &clear_non_finite, &panel_of_pairs, &gemm_add<BfloatPair, Broadcast>,
};

}  // namespace detail

// The arithmetic of q.k and weights times values, and of backward's products with queries, keys, values and the gradient of
// the output. Everything else, scores and weights above all, is computed in the op's Real.
//
//   Precision::storage   the op's Real
//   Precision::mixed     for ops of float: numbers rounded to bfloat16, sums of their products in float
class Precision {
 public:
  static const Precision storage, mixed;

  constexpr Precision() = default;  // storage
  [[nodiscard]] constexpr bool mixes() const { return products_ != nullptr; }
  // The products where mixes(), else null.
  [[nodiscard]] constexpr const PairProducts* products() const { return products_; }
  [[nodiscard]] constexpr const char* name() const { return mixes() ? "mixed" : "storage"; }
  [[nodiscard]] friend constexpr bool operator==(const Precision& a, const Precision& b) {
    return a.mixes() == b.mixes();
  }

 private:
  explicit constexpr Precision(const PairProducts* products) : products_(products) {}
  const PairProducts* products_ = nullptr;
};

inline constexpr Precision Precision::storage{};
inline constexpr Precision Precision::mixed{&detail::kPairProducts};

}  // namespace HEED_ABI
}  // namespace heed
