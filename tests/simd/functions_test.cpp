// SPDX-License-Identifier: Apache-2.0
// The functions of simd/functions.hpp against long double, within the errors that the head of that file states.
#include <heed/core/random.hpp>
#include <heed/simd/functions.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"
#include "lane_errors.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace math = heed::math;
using namespace heed_test;

namespace {

const auto sine = [](auto x) { return math::sin(x); };
const auto cosine = [](auto x) { return math::cos(x); };
const auto error_function = [](auto x) { return math::erf(x); };
const auto minus_one = [](auto x) { return math::expm1(x); };
const auto plus_one = [](auto x) { return math::log1p(x); };
const auto soft = [](auto x) { return math::softplus(x); };
const auto exact_soft = [](long double x) {
  return std::log1p(std::exp(-std::abs(x))) + std::max(x, 0.0L);
};

// The sine of x + quarters * pi / 2 for |x| up to 1e5. It is reduced here: mingw's C library takes a pi of 66 bits.
[[nodiscard]] long double exact_sine_from(long double x, int quarters) {
  // pi / 2 is the sum of the three; n * head and n * middle are exact.
  constexpr long double head = 0x1921fb54442dp-44L, middle = 0x308d313198ap-89L,
                        tail = 0x1701b839a25204p-144L;
  const long double n = std::nearbyint(x / (head + middle)),
                    rest = x - n * head - n * middle - n * tail;
  quarters += int(n);
  const long double value = quarters % 2 == 0 ? std::sin(rest) : std::cos(rest);
  return (quarters & 2) == 0 ? value : -value;
}
[[nodiscard]] long double exact_sine(long double x) { return exact_sine_from(x, 0); }
[[nodiscard]] long double exact_cosine(long double x) { return exact_sine_from(x, 1); }

// x^y, within a quarter of an ulp of double. Near 1 mingw's C library has an error of y units of long double.
[[nodiscard]] long double exact_power(long double x, long double y) {
  return std::abs(x - 1) < 1e-3L ? std::exp(y * std::log1p(x - 1)) : std::pow(x, y);
}

// Every NaN is one.
template <class T>
[[nodiscard]] bool same_bits(T a, T b) {
  return std::isnan(b) ? std::isnan(a) : std::memcmp(&a, &b, sizeof(T)) == 0;
}
template <class T, class F>
[[nodiscard]] bool same(const F& f, T x, T wanted) {
  return same_bits(one<T>(f, double(x)), wanted);
}

// Numbers at which functions change their branch: ends, zeros, subnormal and huge ones.
template <class T>
[[nodiscard]] std::vector<T> special_numbers() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> all;
  for (const T x : {T(0), Limits::denorm_min(), Limits::min() / 4, Limits::min(), T(0.5), T(1),
                    T(2), T(3), T(1e30), Limits::max(), Limits::infinity(), Limits::quiet_NaN()}) {
    all.push_back(x);
    all.push_back(-x);
  }
  return all;
}

template <class T>
constexpr double kEnd = kFloat<T> ? 87.33 : 708.39;

}  // namespace

TEMPLATE_TEST_CASE("sin and cos are right within 2 ulp, and as in <cmath> far out", "[functions]",
                   float, double) {
  using T = TestType;
  // The zeros, where the reduction cancels, stand in the small intervals.
  for (const auto& [low, high] : {std::pair{-1.0, 1.0},
                                  {-10.0, 10.0},
                                  {-1e3, 1e3},
                                  {-1e5, 1e5},
                                  {1.5707, 1.5709},
                                  {3.1415, 3.1417},
                                  {99999.0, 1e5}}) {
    CAPTURE(low, high);
    CHECK(ulps<T>(low, high, sine, exact_sine) < 2);
    CHECK(ulps<T>(low, high, cosine, exact_cosine) < 2);
  }
  // The nearest numbers to whole quarters of a turn, the hardest to reduce.
  double worst = 0;
  for (int n = 1; n < 63000; n += kFloat<T> ? 1 : 7) {
    const T x = T(n * 1.57079632679489661923L);
    for (const auto& [f, exact] :
         {std::pair{+[](Pack<T> p) { return math::sin(p); }, exact_sine(x)},
          {+[](Pack<T> p) { return math::cos(p); }, exact_cosine(x)}})
      worst = std::max(worst, double(std::abs(f(Pack<T>(x)).lane(0) - exact) / ulp<T>(exact)));
  }
  CHECK(worst < 2);
  for (const T x : {T(100001), T(-123456.75), T(1e6), T(-1e9), T(1e30)}) {
    CHECK(same(sine, x, std::sin(x)));
    CHECK(same(cosine, x, std::cos(x)));
  }
}

TEMPLATE_TEST_CASE("erf is right within 2 ulp, and reaches -1 and 1", "[functions]", float,
                   double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::erf(x); };
  for (const auto& [low, high] :
       {std::pair{-1.0, 1.0}, {-7.0, 7.0}, {0.95, 1.05}, {1.0, 2.0}, {1e-9, 1e-6}})
    CHECK(ulps<T>(low, high, error_function, exact) < 2);
  CHECK(same(error_function, T(6), T(1)));
  CHECK(same(error_function, T(-1e30), T(-1)));
}

TEMPLATE_TEST_CASE("expm1 is right within 2.5 ulp, -1 far below, and infinity where exp is",
                   "[functions]", float, double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::expm1(x); };
  const double end = kEnd<T>;
  for (const auto& [low, high] :
       {std::pair{-1.0, 1.0}, {-7.0, 7.0}, {0.3, 0.4}, {-0.6, -0.3}, {-1e-5, 1e-5}, {-end, end}})
    CHECK(ulps<T>(low, high, minus_one, exact) < 2.5);
  CHECK(same(minus_one, T(-1000), T(-1)));
  CHECK(same(minus_one, T(1000), heed::kInfinity<T>));
  CHECK(one<T>(minus_one, end) < heed::kInfinity<T>);
}

TEMPLATE_TEST_CASE("log1p is right within 1.6 ulp, and as in <cmath> at its ends", "[functions]",
                   float, double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::log1p(x); };
  for (const auto& [low, high] :
       {std::pair{-0.9999999, 1.0}, {-0.3, 0.5}, {0.0, 100.0}, {-1e-5, 1e-5}, {0.0, 1e30}})
    CHECK(ulps<T>(low, high, plus_one, exact) < 1.6);
  CHECK(same(plus_one, T(-1), -heed::kInfinity<T>));
  CHECK(std::isnan(one<T>(plus_one, -1.5)));
}

TEMPLATE_TEST_CASE("softplus is right within 3 ulp, 0 far below and x far above", "[functions]",
                   float, double) {
  using T = TestType;
  const double end = kEnd<T>;
  for (const auto& [low, high] : {std::pair{-1.0, 1.0}, {-6.0, 6.0}, {-40.0, 40.0}, {-end, end}})
    CHECK(ulps<T>(low, high, soft, exact_soft) < 3);
  for (const T x : {T(1000), T(1e30), heed::kInfinity<T>}) {
    CHECK(same(soft, x, x));
    CHECK(same(soft, -x, T(0)));
  }
}

TEMPLATE_TEST_CASE("pow is right within 2.5 ulp wherever the result is a normal number",
                   "[functions]", float, double) {
  using T = TestType;
  const auto powers = [](double low, double high, double exponent) {
    const T y = T(exponent);
    CAPTURE(low, high, exponent);
    CHECK(ulps<T>(
              low, high, [=](Pack<T> x) { return math::pow(x, y); },
              [=](long double x) { return exact_power(x, y); }) < 2.5);
  };
  for (const double y : {0.5, 1.0, 2.0, -1.0, 3.7, -2.3, 10.0, 1e-3})
    for (const auto& [low, high] :
         {std::pair{1e-3, 1.0}, {0.9, 1.1}, {1.0, 2.0}, {1.0, 1e3}, {0.7, 0.71}})
      powers(low, high, y);
  powers(1.1, 1.2, kFloat<T> ? 400 : 3800);   // results up to 2^105 and 2^999
  powers(1.3, 1.41, kFloat<T> ? 240 : 2000);  // far from the powers of 2 between
  powers(1 - 1e-4, 1 + 1e-4, kFloat<T> ? 5e5 : 5e6);
  for (const double base : {0.5, 2.0, 0.1, 10.0, 1.0001, 1e-30}) {
    const T x = T(base);
    const double end = base < 1e-20 ? 1.2 : 30;
    CHECK(ulps<T>(
              -end, end, [=](Pack<T> y) { return math::pow(x, y); },
              [=](long double y) { return exact_power(x, y); }) < 2.5);
  }
}

TEMPLATE_TEST_CASE("special values are those of <cmath>, the sign of 0 included", "[functions]",
                   float, double) {
  using T = TestType;
  for (const T x : special_numbers<T>()) {
    CAPTURE(x);
    if (std::abs(x) <= std::numeric_limits<T>::min() || std::abs(x) > T(1e29) || std::isnan(x)) {
      CHECK(same(sine, x, std::sin(x)));
      CHECK(same(cosine, x, std::cos(x)));
      CHECK(same(minus_one, x, std::expm1(x)));
      CHECK(same(soft, x, x > T(1) ? x : T(std::log1p(std::exp(x)))));
    }
    if (std::abs(x) <= std::numeric_limits<T>::min() || x <= T(-1) || !std::isfinite(x))
      CHECK(same(plus_one, x, std::log1p(x)));
    if (x == 0 || std::abs(x) > T(1e29) || std::isnan(x))
      CHECK(same(error_function, x, std::erf(x)));
    for (const T y : special_numbers<T>()) {
      CAPTURE(y);
      const T wanted = std::pow(x, y);
      const auto power = [=](Pack<T> base) { return math::pow(base, Pack<T>(y)); };
      if (wanted == 0 || !std::isnormal(wanted))
        CHECK(same(power, x, wanted));
      else
        CHECK(std::abs(one<T>(power, double(x)) - wanted) <= 2 * ulp<T>(wanted));
    }
  }
}

TEMPLATE_TEST_CASE("A lane has the same bits whatever stands in the others", "[functions]", float,
                   double) {
  using T = TestType;
  constexpr int W = heed::kLanes<T>;
  const heed::CounterRandom random(11);
  const std::vector<T> special = special_numbers<T>();
  const auto number = [&](std::uint64_t i) {
    return i % 5 == 0 ? special[std::size_t(i / 5) % special.size()] : T(4 * random.normal(i));
  };
  const auto check = [&](const auto& f) {
    for (std::uint64_t i = 0; i < 2000; ++i) {
      T x[W];
      for (int k = 0; k < W; ++k) x[k] = number(i * 7 + std::uint64_t(k));
      const Pack<T> y = f(Pack<T>::load(x));
      for (int k = 0; k < W; ++k) {
        const T alone = f(Pack<T>(x[k])).lane(k), together = y.lane(k);
        CAPTURE(x[k], k);
        if (!same_bits(together, alone)) CHECK(together == alone);
      }
    }
  };
  check(sine);
  check(cosine);
  check(error_function);
  check(minus_one);
  check(plus_one);
  check(soft);
  check([](Pack<T> x) { return math::pow(x, T(1.7)); });
  check([](Pack<T> x) { return math::pow(T(1.7), x); });
}
