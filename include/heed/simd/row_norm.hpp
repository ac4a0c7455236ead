// SPDX-License-Identifier: Apache-2.0
#pragma once

// The Euclidean norm of a row, |x|, for any scalar.
//
//   d|x| = x . dx / |x|,   0 at x = 0
//
// Bounds    any finite row: squares neither overflow nor vanish. A row with a NaN has norm NaN.
// Accuracy  that of the plain sum of squares, and the same bits where the largest |x(c)| lies
//           between 2^-50 and 2^50 (float) or 2^-400 and 2^400 (double).

#include <heed/core/scalar.hpp>
#include <heed/simd/exp.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// A row with a component above `edge` is divided by `factor` before it is squared, a row whose components are all below 1 /
// edge is multiplied by `factor`, a power of two, so that nothing is rounded.
template <class V>
struct NormRange {
  static constexpr double edge = 0x1p400, factor = 0x1p600;
};
template <>
struct NormRange<float> {
  static constexpr double edge = 0x1p50, factor = 0x1p80;
};
template <>
struct NormRange<Pack<float>> : NormRange<float> {};

}  // namespace detail

// |x| for x(0), ..., x(n - 1), which are S.
template <class S, class X>
[[nodiscard]] S row_norm(Index n, const X& x) {
  if constexpr (IsPack<S>::value) {
    // If the sum of squares of every lane is far from overflow and underflow, no row needs a factor.
    constexpr double square = detail::NormRange<S>::edge * detail::NormRange<S>::edge;
    const S sum = math::dot_product(n, x, x);
    if (!any_lane(~((sum >= S(double(n) / square)) & (sum <= S(square))))) return math::sqrt(sum);
  }
  using Value = std::remove_cvref_t<decltype(math::value_of(x(0)))>;
  using Limits = detail::NormRange<Value>;
  const auto number = [](double c) { return math::constant<Value>(c); };
  Value top = number(0);
  for (Index c = 0; c < n; ++c)
    top = math::maximum(top, math::absolute(Value(math::value_of(x(c)))));
  const Value up = math::select(top < number(1 / Limits::edge), number(Limits::factor), number(1));
  const S scale(math::select(top > number(Limits::edge), number(1 / Limits::factor), up));
  const auto scaled = [&](Index c) { return S(x(c) * scale); };
  const S sum = math::dot_product(n, scaled, scaled);
  const auto none = top == number(0);
  const S root = math::sqrt(math::select(none, math::constant<S>(1), sum)) / scale;
  return math::select(none, math::constant<S>(0), root);
}

// a / norm, 0 where the norm is 0.
template <class S>
[[nodiscard]] S over_norm(const S& a, const S& norm) {
  const S zero = math::constant<S>(0);
  const auto none = math::value_of(norm) == math::value_of(zero);
  return math::select(none, zero, S(a / math::select(none, math::constant<S>(1), norm)));
}

}  // namespace HEED_ABI
}  // namespace heed
