// SPDX-License-Identifier: Apache-2.0
// The functions of simd/exp.hpp and simd/log.hpp against long double, within the errors that the heads of these files state.
#include <heed/simd/instructions.hpp>
#include <heed/simd/log.hpp>

#include "catch.hpp"
#include "lane_errors.hpp"

#include <cmath>
#include <cstring>
#include <limits>

namespace math = heed::math;
using namespace heed_test;

namespace {

const auto weight = [](auto x) { return heed::exp2_weight(x); };
const auto exponential = [](auto x) { return math::exp(x); };
const auto logarithm = [](auto x) { return math::log(x); };
const auto tangent = [](auto x) { return math::tanh(x); };
const auto gate = [](auto x) { return math::sigmoid(x); };
const auto falling = [](auto x) { return math::falling_sigmoid(x); };
const auto exact_gate = [](long double x) { return 1 / (1 + std::exp(-x)); };

// Exponents of the smallest normal number, and the largest arguments of exp and sigmoid.
template <class T>
constexpr double kLowest = kFloat<T> ? -126 : -1022;
template <class T>
constexpr double kExpEnd = -kLowest<T>* heed::kLn2*(1 - 1e-7);

}  // namespace

TEMPLATE_TEST_CASE("exp2_weight is 2^x within 1.8 ulp, and 1 at 0", "[exp]", float, double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::exp2(x); };
  CHECK(ulps<T>(kLowest<T>, 0, weight, exact) < 1.8);
  CHECK(ulps<T>(-3, 0, weight, exact) < 1.8);
  CHECK(ulps<T>(-1e-5, 0, weight, exact) < 1.8);
  CHECK(ulps<T>(0, 100, weight, exact) < 1.8);
  CHECK(one<T>(weight, 0) == T(1));
  CHECK(one<T>(weight, -0.0) == T(1));
}

TEMPLATE_TEST_CASE(
    "exp2_weight vanishes below the normal numbers, exactly so from one below them on", "[exp]",
    float, double) {
  using T = TestType;
  double worst = 0;
  for_grid<T>(kLowest<T> - 1, kLowest<T>, weight, [&](T x, T value) {
    worst = std::max(worst, double(std::abs(value - std::exp2(static_cast<long double>(x)))));
  });
  CHECK(worst < double(std::numeric_limits<T>::min()));
  for (const double x : {kLowest<T> - 1, kLowest<T> - 1.5, -1e4, -1e30, -HUGE_VAL})
    CHECK(one<T>(weight, x) == T(0));
}

TEMPLATE_TEST_CASE("exp is e^x within 2 ulp, 0 below its range and infinity above it", "[exp]",
                   float, double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::exp(x); };
  CHECK(ulps<T>(-kExpEnd<T>, kExpEnd<T>, exponential, exact) < 2);
  CHECK(ulps<T>(-2, 2, exponential, exact) < 2);
  CHECK(ulps<T>(-1e-5, 1e-5, exponential, exact) < 2);
  const double end = kFloat<T> ? 87.34 : 708.40;
  for (const double x : {-end, -1e4, -1e30, -HUGE_VAL}) CHECK(one<T>(exponential, x) == T(0));
  for (const double x : {end, 1e4, 1e30, HUGE_VAL})
    CHECK(one<T>(exponential, x) == heed::kInfinity<T>);
  CHECK(one<T>(exponential, kFloat<T> ? -87.33 : -708.39) > T(0));
  CHECK(one<T>(exponential, kFloat<T> ? 87.33 : 708.39) < heed::kInfinity<T>);
  CHECK(one<T>(exponential, 0) == T(1));
}

TEMPLATE_TEST_CASE("sigmoid is 1 / (1 + e^-x) within 2.6 ulp, and never 0", "[exp]", float,
                   double) {
  using T = TestType;
  const double end = (-kLowest<T> - 1) * heed::kLn2 * (1 - 1e-6);
  CHECK(ulps<T>(-end, 0, gate, exact_gate) < 2.6);
  CHECK(ulps<T>(0, end, gate, exact_gate) < 2.6);
  CHECK(ulps<T>(-4, 4, gate, exact_gate) < 2.6);
  CHECK(one<T>(gate, 0) == T(0.5));
  CHECK(one<T>(gate, HUGE_VAL) == T(1));
  CHECK(one<T>(gate, -HUGE_VAL) > T(0));
  CHECK(double(one<T>(gate, -HUGE_VAL)) < (kFloat<T> ? 2.5e-38 : 4.6e-308));
}

TEMPLATE_TEST_CASE("falling_sigmoid is 1 / (1 + e^x) within 1 eps in its range", "[exp]", float,
                   double) {
  using T = TestType;
  const auto exact = [](long double x) { return exact_gate(-x); };
  const double end = math::kFallingRange<T>;
  CHECK(epsilons<T>(-end, end, falling, exact) < 1);
  CHECK(epsilons<T>(-8, 8, falling, exact) < 1);
  CHECK(one<T>(falling, 0) == T(0.5));
  CHECK(one<T>(falling, -end) == T(1));
  CHECK(one<T>(falling, end) > T(0));
}

TEMPLATE_TEST_CASE("tanh is right within 10 ulp and 1.6 eps, and reaches -1 and 1", "[exp]", float,
                   double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::tanh(x); };
  CHECK(ulps<T>(-12, 12, tangent, exact) < 10);
  CHECK(ulps<T>(-0.5, 0.5, tangent, exact) < 10);
  CHECK(ulps<T>(0.17, 0.18, tangent, exact) < 10);  // where it changes its formula
  CHECK(ulps<T>(1e-9, 1e-6, tangent, exact) < 10);
  CHECK(epsilons<T>(-12, 12, tangent, exact) < 1.6);
  CHECK(one<T>(tangent, 0) == T(0));
  CHECK(one<T>(tangent, 1e30) == T(1));
  CHECK(one<T>(tangent, -HUGE_VAL) == T(-1));
}

TEMPLATE_TEST_CASE("log is right within 1 ulp, -infinity at 0 and NaN below", "[exp]", float,
                   double) {
  using T = TestType;
  const auto exact = [](long double x) { return std::log(x); };
  for (const auto& [low, high] :
       {std::pair{1e-3, 4.0}, {4.0, 1e6}, {0.9, 1.1}, {0.7, 0.71}, {1e-36, 1e-35}, {1e37, 1e38}})
    CHECK(ulps<T>(low, high, logarithm, exact) < 1);
  CHECK(one<T>(logarithm, 1) == T(0));
  CHECK(one<T>(logarithm, 0) == -heed::kInfinity<T>);
  CHECK(std::isnan(one<T>(logarithm, -1)));
  CHECK(one<T>(logarithm, HUGE_VAL) == heed::kInfinity<T>);
  const T least = std::numeric_limits<T>::min();
  for (const T x : {least, least / 2, std::numeric_limits<T>::denorm_min()})
    CHECK(std::abs(one<T>(logarithm, double(x)) / std::log(x) - 1) <
          std::numeric_limits<T>::epsilon());
}

TEMPLATE_TEST_CASE(
    "NaN stays NaN in every function, whatever its payload, and spoils no other lane", "[exp]",
    float, double) {
  using T = TestType;
  T nans[3] = {std::numeric_limits<T>::quiet_NaN(), -std::numeric_limits<T>::quiet_NaN(), T(0)};
  std::memset(&nans[2], 0xFF, sizeof(T));  // all ones, as in memory filled with -1
  const auto check = [&](const auto& f) {
    for (const T nan : nans)
      for (int lane = 0; lane < heed::kLanes<T>; ++lane) {
        Pack<T> x = T(0.25);
        x.v[lane] = nan;
        const Pack<T> y = f(x);
        for (int i = 0; i < heed::kLanes<T>; ++i) {
          if (i == lane)
            CHECK(std::isnan(y.lane(i)));
          else
            CHECK(y.lane(i) == f(Pack<T>(T(0.25))).lane(i));
        }
      }
  };
  check(weight);
  check(exponential);
  check(logarithm);
  check(tangent);
  check(gate);
  check(falling);
}
