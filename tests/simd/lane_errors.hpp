// SPDX-License-Identifier: Apache-2.0
#pragma once

// The error of a function of packs, lane by lane, against long double.

#include "catch.hpp"

#include <heed/core/random.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace heed_test {

using heed::Pack;

template <class T>
constexpr double kEps = double(std::numeric_limits<T>::epsilon());
template <class T>
constexpr bool kFloat = sizeof(T) == sizeof(float);
constexpr long kPoints = 60000;  // points of each interval

// The distance of the neighbours of y, which is a normal number.
template <class T>
[[nodiscard]] long double ulp(long double y) {
  int exponent = 0;
  (void)std::frexp(y, &exponent);
  return std::ldexp(1.0L, exponent - std::numeric_limits<T>::digits);
}

// Calls visit(x, f(x)) for kPoints numbers x of [low, high], half of them spread evenly, half random, a vector of
// each in turns.
template <class T, class F, class Visit>
void for_grid(double low, double high, const F& f, const Visit& visit) {
  constexpr int W = heed::kLanes<T>;
  const heed::CounterRandom random(23);
  for (long i = 0; i < kPoints; i += W) {
    T x[W];
    for (int k = 0; k < W; ++k) {
      const double even = std::min(1.0, double(i + k) / double(kPoints - W));
      x[k] = T(low + (high - low) * (i / W % 2 == 0 ? even : random.uniform(std::uint64_t(i + k))));
    }
    const Pack<T> y = f(Pack<T>::load(x));
    for (int k = 0; k < W; ++k) visit(x[k], y.lane(k));
  }
}

// The largest error of f over [low, high], in ulp of the exact result.
template <class T, class F, class Exact>
[[nodiscard]] double ulps(double low, double high, const F& f, const Exact& exact) {
  double worst = 0;
  for_grid<T>(low, high, f, [&](T x, T y) {
    const long double wanted = exact(static_cast<long double>(x));
    const double error = wanted == y ? 0 : double(std::abs(y - wanted) / ulp<T>(wanted));
    if (!(error <= worst)) worst = error;
  });
  return worst;
}

// The same in eps, the ulp of 1.
template <class T, class F, class Exact>
[[nodiscard]] double epsilons(double low, double high, const F& f, const Exact& exact) {
  double worst = 0;
  for_grid<T>(low, high, f, [&](T x, T y) {
    const double error = double(std::abs(y - exact(static_cast<long double>(x)))) / kEps<T>;
    if (!(error <= worst)) worst = error;
  });
  return worst;
}

template <class T, class F>
[[nodiscard]] T one(const F& f, double x) {
  const Pack<T> y = f(Pack<T>(T(x)));
  for (int i = 1; i < heed::kLanes<T>; ++i)
    CHECK(std::memcmp(&y, reinterpret_cast<const char*>(&y) + i * int(sizeof(T)), sizeof(T)) == 0);
  return y.lane(0);
}

}  // namespace heed_test
