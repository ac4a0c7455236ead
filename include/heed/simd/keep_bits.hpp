// SPDX-License-Identifier: Apache-2.0
#pragma once

// Drops a fraction `rate` of the places of a row at random, and scales the numbers in the others.
//
//   y = keep ? x / (1 - rate) : 0
//
//   k0, k1 = low and high half of the row's key of 64 random bits
//   h = k0 + column 0x9E3779B9;   h = (h ^ h >> 16) 0x85EBCA6B ^ k1;   h = (h ^ h >> 13) 0xC2B2AE35
//   keep = h < (1 - rate) 2^32
//
// keep is a function of key, column and rate alone. Nothing is stored: any part of a row can be drawn again, in
// vectors along its columns or in vectors across rows, with the same result for float and double.
//
// Bounds    a dropped place is 0 even if x holds NaN there.
// Accuracy  a given column is kept under a fraction 1 - rate of all keys, within 2^-32.
// Source    the multipliers and the first shifts of MurmurHash3's finaliser, with a key in between.

#include <heed/simd/pack.hpp>

#include <algorithm>
#include <array>
#include <cstring>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// The column enters h multiplied by this odd number, 2^32 divided by the golden ratio.
inline constexpr std::uint32_t kColumnStride = 0x9E3779B9;

// The 32 random bits of h = k0 + column * kColumnStride. Words is std::uint32_t or a vector of them.
template <class Words>
[[nodiscard, gnu::always_inline]] inline Words column_bits(Words h, Words k1) {
  h ^= h >> 16;
  h = (h * 0x85EBCA6BU) ^ k1;
  h ^= h >> 13;
  return h * 0xC2B2AE35U;
}

// Number of the 2^32 equally likely values of h that keep a place: (1 - rate) 2^32, at least 1, at most 2^32 - 1.
[[nodiscard]] inline std::uint32_t keep_threshold(double rate) {
  return std::uint32_t(std::clamp((1.0 - rate) * 0x1.0p32, 1.0, 0x1.0p32 - 1.0));
}

}  // namespace detail

// True if the place is kept: the formula above, without vectors.
[[nodiscard]] inline bool keeps(double rate, std::uint64_t key, Index column) {
  const std::uint32_t h = std::uint32_t(key) + std::uint32_t(column) * detail::kColumnStride;
  return detail::column_bits(h, std::uint32_t(key >> 32)) < detail::keep_threshold(rate);
}

// The keys of the rows of a panel, one row per lane, in two arrays of 32-bit halves. A lane of
// double has 64 bits and holds a half in the lower 32.
template <class Real>
struct LaneKeys {
  using Lane = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;
  std::array<Lane, std::size_t(kPanelLanes<Real>)> low{}, high{};

  void set(Index i, std::uint64_t key) {
    low[std::size_t(i)] = std::uint32_t(key);
    high[std::size_t(i)] = std::uint32_t(key >> 32);
  }
  [[nodiscard]] std::uint64_t key(Index i) const {
    return std::uint64_t(high[std::size_t(i)]) << 32 | low[std::size_t(i)];
  }
};

// Drops places, a vector at a time: next() draws the bits of the next vector of places, operator()
// applies them to the numbers in those places; it may be called several times per draw.
template <class Real>
class Dropper {
  using Bits = typename Pack<Real>::Bits;
  using Lane = typename LaneKeys<Real>::Lane;
  using Words =
      Pack<float>::Bits;  // 32-bit words; for double every second word is padding and stays 0

 public:
  // Draws for one row: the first vector covers the columns column, column + 1, ..., column + W - 1.
  [[nodiscard]] static Dropper along_columns(double rate, std::uint64_t key, Index column) {
    Bits first{};
    for (int i = 0; i < kLanes<Real>; ++i) first[i] = std::uint32_t(key) + stride_of(column + i);
    return {rate, Words(first), every_lane(std::uint32_t(key >> 32)), stride_of(kLanes<Real>)};
  }
  // Draws for W rows, the keys of vector `v`: each vector covers one column of all of them, first `column`.
  [[nodiscard]] static Dropper along_rows(double rate, const LaneKeys<Real>& keys, int v,
                                          Index column) {
    Words first, k1;
    std::memcpy(&first, keys.low.data() + v * kLanes<Real>, sizeof(first));
    std::memcpy(&k1, keys.high.data() + v * kLanes<Real>, sizeof(k1));
    return {rate, first + every_lane(stride_of(column)), k1, stride_of(1)};
  }

  void next() {
    keep_ = typename Pack<Real>::Mask(Bits(detail::column_bits(counter_, k1_)) < threshold_);
    counter_ += step_;
  }
  [[nodiscard]] Pack<Real> operator()(Pack<Real> x) const {
    return select(keep_, x * scale_, Pack<Real>(Real(0)));
  }

 private:
  Dropper(double rate, Words first, Words k1, std::uint32_t step)
      : counter_(first),
        k1_(k1),
        step_(every_lane(step)),
        threshold_(Lane(detail::keep_threshold(rate)) - Bits{}),
        scale_(Real(1.0 / (1.0 - rate))) {}
  [[nodiscard]] static std::uint32_t stride_of(Index columns) {
    return std::uint32_t(columns) * detail::kColumnStride;
  }
  [[nodiscard]] static Words every_lane(std::uint32_t word) { return Words(Lane(word) - Bits{}); }

  Words counter_, k1_, step_;
  Bits threshold_;
  Pack<Real> scale_;
  typename Pack<Real>::Mask keep_{};
};

}  // namespace HEED_ABI
}  // namespace heed
