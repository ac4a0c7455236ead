// SPDX-License-Identifier: Apache-2.0
#pragma once

//   y = keep ? x / (1 - rate) : 0      dx = keep ? dy / (1 - rate) : 0
//
// keep is a function of (seed, step, stream, row, column) alone: nothing is stored, backward draws
// the same again, for float and double and for any number of threads.
//
//   k0, k1 = 64 random bits of (seed, step, stream, row)
//   h = k0 + column 0x9E3779B9;   h = (h ^ h >> 16) 0x85EBCA6B ^ k1;   h = (h ^ h >> 13) 0xC2B2AE35
//   keep = h < (1 - rate) 2^32
//
// Bounds    a dropped place is 0 even if x holds NaN there.
// Source    the multipliers and the first shifts of MurmurHash3's finaliser, with a key in between.

#include <heed/core/parallel.hpp>
#include <heed/core/random.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>

namespace heed::inline HEED_ABI::nn {

namespace detail {

// Random bits of the columns of a row, kLanes<T> after kLanes<T>; 32 of them in each lane.
template <class T>
class ColumnBits {
 public:
  using Bits = typename Pack<T>::Bits;
  using Lane = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

  explicit ColumnBits(std::uint64_t key) : inner_(Lane(key >> 32)) {
    for (int i = 0; i < kLanes<T>; ++i) counter_[i] = Lane(key & kLow) + Lane(i) * kStride;
  }

  [[nodiscard]] Bits next() {
    Bits h = counter_ & kLow;
    counter_ += Lane(kLanes<T>) * kStride;
    h ^= h >> 16;
    h = ((h * Lane(0x85EBCA6B)) & kLow) ^ inner_;
    h ^= h >> 13;
    return (h * Lane(0xC2B2AE35)) & kLow;
  }

 private:
  static constexpr Lane kLow = 0xFFFFFFFF;
  static constexpr Lane kStride = 0x9E3779B9;
  Bits counter_;
  Lane inner_;
};

// The number of 2^32 equally likely values that keep an element, at least 1 and less than all.
[[nodiscard]] inline std::uint32_t keep_threshold(double rate) {
  return std::uint32_t(std::clamp((1.0 - rate) * 0x1.0p32, 1.0, 0x1.0p32 - 1.0));
}

template <class T>
void drop_row(std::uint64_t key, double rate, const T* x, Index count, T* y) {
  constexpr Index W = kLanes<T>;
  ColumnBits<T> bits(key);
  const typename Pack<T>::Bits threshold =
      typename ColumnBits<T>::Lane(keep_threshold(rate)) - typename Pack<T>::Bits{};
  const Pack<T> scale = T(1.0 / (1.0 - rate));
  const auto drop = [&](const T* from, T* to) {
    const auto keep = typename Pack<T>::Mask(bits.next() < threshold);
    select(keep, Pack<T>::load(from) * scale, Pack<T>(T(0))).store(to);
  };
  Index j = 0;
  for (; j + W <= count; j += W) drop(x + j, y + j);
  if (j == count) return;
  T lanes[W] = {};
  std::copy(x + j, x + count, lanes);
  drop(lanes, lanes);
  std::copy(lanes, lanes + (count - j), y + j);
}

}  // namespace detail

// Drops elements of x, or of a gradient, with probability `rate` in [0, 1) and scales the others; a
// copy when rate is 0 or the context is not training. y may be x. Calls with the same stream in the
// same step drop the same places: every layer needs a stream of its own.
template <class T>
void apply_dropout(Context<T>& c, double rate, std::uint64_t stream,
                   const std::type_identity_t<MatrixView<const T>>& x,
                   const std::type_identity_t<MatrixView<T>>& y) {
  require(rate >= 0 && rate < 1, "apply_dropout: rate is ", rate, ", it must be in [0, 1)");
  require_extents(y, x.rows, x.columns, "apply_dropout", "y");
  const bool copies = !c.training || rate == 0;
  if (copies && x.data == y.data) return;
  const CounterRandom rows(CounterRandom(c.seed, stream).bits(c.step));
  detail::for_row_blocks(c, x.rows, x.columns, [&](Index first, Index last) {
    for (Index r = first; r < last; ++r) {
      if (copies)
        std::copy(x.row(r), x.row(r) + x.columns, y.row(r));
      else
        detail::drop_row(rows.bits(std::uint64_t(r)), rate, x.row(r), x.columns, y.row(r));
    }
  });
}

}  // namespace heed::inline HEED_ABI::nn
