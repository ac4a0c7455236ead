// SPDX-License-Identifier: Apache-2.0
#pragma once

// Which places dropout keeps.
//
//   y = keep ? x / (1 - rate) : 0
//
//   k0, k1 = low and high half of the row's key
//   h = k0 + column 0x9E3779B9;   h = (h ^ h >> 16) 0x85EBCA6B ^ k1;   h = (h ^ h >> 13) 0xC2B2AE35
//   keep = h < (1 - rate) 2^32
//
// A function of key and column alone: nothing is stored, any part of a row can be drawn again, along its
// columns or beside other rows, the same for float and double.
//
// Bounds    a dropped place is 0 even if x holds NaN there.
// Source    the multipliers and the first shifts of MurmurHash3's finaliser, with a key in between.

#include <heed/core/random.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>
#include <array>
#include <cstring>

namespace heed {
inline namespace HEED_ABI {

// Of the weights of an attention call.
struct Dropout {
  double rate = 0;  // in [0, 1): the share that becomes 0; the others are divided by 1 - rate
  std::uint64_t seed = 0;  // the same one drops the same pairs
  bool operator==(const Dropout&) const = default;

  [[nodiscard]] bool valid() const { return rate >= 0 && rate < 1; }
  // Keys of the rows of a head: number i is that of query i.
  [[nodiscard]] CounterRandom row_keys(Index batch, Index head) const {
    return CounterRandom(CounterRandom(seed, std::uint64_t(batch)).bits(std::uint64_t(head)));
  }
};

namespace detail {

// What the column is multiplied by.
inline constexpr std::uint32_t kColumnStride = 0x9E3779B9;

// Random bits of h = k0 + column * kColumnStride; Words is a number of 32 bits or a vector of them.
template <class Words>
[[nodiscard, gnu::always_inline]] inline Words column_bits(Words h, Words k1) {
  h ^= h >> 16;
  h = (h * 0x85EBCA6BU) ^ k1;
  h ^= h >> 13;
  return h * 0xC2B2AE35U;
}

// The number of 2^32 equally likely values that keep a place, at least 1 and less than all.
[[nodiscard]] inline std::uint32_t keep_threshold(double rate) {
  return std::uint32_t(std::clamp((1.0 - rate) * 0x1.0p32, 1.0, 0x1.0p32 - 1.0));
}

}  // namespace detail

// One place, in long hand.
[[nodiscard]] inline bool keeps(double rate, std::uint64_t key, Index column) {
  const std::uint32_t h = std::uint32_t(key) + std::uint32_t(column) * detail::kColumnStride;
  return detail::column_bits(h, std::uint32_t(key >> 32)) < detail::keep_threshold(rate);
}

// Keys of up to a panel's rows, which lie along lanes; a lane of 64 bits holds 32 of them.
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

// Drops places, a vector at a time: take next(), then apply it to as many numbers as stand there.
template <class Real>
class Dropper {
  using Bits = typename Pack<Real>::Bits;
  using Lane = typename LaneKeys<Real>::Lane;
  using Words = Pack<float>::Bits;  // in lanes of 64 bits the upper ones stay 0

 public:
  // Columns column, column + 1, ... of one row along the lanes.
  [[nodiscard]] static Dropper along_columns(double rate, std::uint64_t key, Index column) {
    Bits first{};
    for (int i = 0; i < kLanes<Real>; ++i) first[i] = std::uint32_t(key) + stride_of(column + i);
    return {rate, Words(first), every_lane(std::uint32_t(key >> 32)), stride_of(kLanes<Real>)};
  }
  // One row per lane, those of vector `v` of the keys; column, column + 1, ... one after the other.
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
