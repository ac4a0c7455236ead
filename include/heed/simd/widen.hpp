// SPDX-License-Identifier: Apache-2.0
#pragma once

// Rows of 16-bit numbers to rows of Real and back, a vector at a time, in integer arithmetic that every processor has.

#include <heed/core/narrow.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

typedef std::uint16_t NarrowBits __attribute__((vector_size(kRegisterBytes / 2)));
typedef std::uint16_t NarrowMemory
    __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));

}  // namespace detail

// to[i] = from[i]
template <NarrowNumber Narrow, class Real>
void widen(const Narrow* from, Index count, Real* to) {
  const Index whole = std::is_same_v<Real, float> ? count / kLanes<float> * kLanes<float> : 0;
  if constexpr (std::is_same_v<Real, float>)
    for (Index i = 0; i < whole; i += kLanes<float>) {
      const detail::NarrowBits narrow = *reinterpret_cast<const detail::NarrowMemory*>(from + i);
      using P = Pack<float>;
      const auto wide =
          Narrow::template widened<P::Vector>(__builtin_convertvector(narrow, P::Bits));
      P(P::Vector(wide)).store(to + i);
    }
  for (Index i = whole; i < count; ++i) to[i] = Real(float(from[i]));
}

// to[i] = from[i], rounded to the nearest; a double is rounded to float before.
template <NarrowNumber Narrow, class Real>
void narrow(const Real* from, Index count, Narrow* to) {
  const Index whole = std::is_same_v<Real, float> ? count / kLanes<float> * kLanes<float> : 0;
  if constexpr (std::is_same_v<Real, float>)
    for (Index i = 0; i < whole; i += kLanes<float>) {
      using P = Pack<float>;
      const auto bits = Narrow::template narrowed<P::Vector>(P::Bits(P::load(from + i).v));
      *reinterpret_cast<detail::NarrowMemory*>(to + i) =
          __builtin_convertvector(bits, detail::NarrowBits);
    }
  for (Index i = whole; i < count; ++i) to[i] = Narrow(float(from[i]));
}

// to[i] = from[i], rounded to the nearest where To is the narrower type.
template <class From, class To>
void convert(const From* from, Index count, To* to) {
  if constexpr (std::is_same_v<From, To>)
    std::copy_n(from, count, to);
  else if constexpr (NarrowNumber<From> && NarrowNumber<To>)
    for (Index i = 0; i < count; ++i) to[i] = To(float(from[i]));
  else if constexpr (NarrowNumber<From>)
    widen(from, count, to);
  else
    narrow(from, count, to);
}

}  // namespace HEED_ABI
}  // namespace heed
