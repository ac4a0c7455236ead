// SPDX-License-Identifier: Apache-2.0
// The operations of pack.hpp that instructions.hpp computes with intrinsics, and row_norm().
#include <heed/simd/instructions.hpp>
#include <heed/simd/row_norm.hpp>

#include "catch.hpp"
#include "simd/numbers.hpp"

using heed::Index;
using heed::Pack;

namespace {

template <class T>
constexpr T kNan = std::numeric_limits<T>::quiet_NaN();

}  // namespace

TEMPLATE_TEST_CASE(
    "max and min return the larger and the smaller lane, and the second operand beside a NaN",
    "[pack]", float, double) {
  using T = TestType;
  const auto pair = [](T a, T b, T larger, T smaller) {
    CHECK(max(Pack<T>(a), Pack<T>(b)).lane(0) == larger);
    CHECK(min(Pack<T>(a), Pack<T>(b)).lane(0) == smaller);
  };
  pair(T(1), T(2), T(2), T(1));
  pair(T(2), T(1), T(2), T(1));
  pair(-heed::kInfinity<T>, T(-3), T(-3), -heed::kInfinity<T>);
  pair(kNan<T>, T(5), T(5), T(5));
  CHECK(std::isnan(max(Pack<T>(T(5)), Pack<T>(kNan<T>)).lane(0)));
  CHECK(std::isnan(min(Pack<T>(T(5)), Pack<T>(kNan<T>)).lane(0)));
}

TEMPLATE_TEST_CASE("select takes each lane from its side, and leaves no trace of the other",
                   "[pack]", float, double) {
  using T = TestType;
  const Pack<T> lanes = Pack<T>::iota();
  const Pack<T> y = select(lanes < Pack<T>(T(2)), lanes, Pack<T>(T(-1)));
  for (int i = 0; i < heed::kLanes<T>; ++i) CHECK(y.lane(i) == (i < 2 ? T(i) : T(-1)));
  CHECK(select(lanes == lanes, Pack<T>(T(3)), Pack<T>(kNan<T>)).lane(0) == T(3));
}

TEMPLATE_TEST_CASE("any_lane finds a single lane wherever it is", "[pack]", float, double) {
  using T = TestType;
  const Pack<T> lanes = Pack<T>::iota();
  for (int i = 0; i < heed::kLanes<T>; ++i) CHECK(heed::any_lane(lanes == Pack<T>(T(i))));
  CHECK_FALSE(heed::any_lane(lanes == Pack<T>(T(-1))));
}

TEMPLATE_TEST_CASE("sum_lanes adds every lane once, max_lanes looks at all, square_root is exact",
                   "[pack]", float, double) {
  using T = TestType;
  const int W = heed::kLanes<T>;
  CHECK(heed::sum_lanes(Pack<T>::iota()) == T(W * (W - 1) / 2));
  for (int i = 0; i < W; ++i)
    CHECK(heed::max_lanes(select(Pack<T>::iota() == Pack<T>(T(i)), Pack<T>(T(-1)),
                                 Pack<T>(-heed::kInfinity<T>))) == T(-1));
  for (const double x : {0.0, 2.0, 9.0, 1e-12, 1e12})
    CHECK(square_root(Pack<T>(T(x))).lane(W - 1) == std::sqrt(T(x)));
  CHECK(std::isnan(square_root(Pack<T>(T(-1))).lane(0)));
}

TEMPLATE_TEST_CASE("fused_multiply_add is a b + c within one rounding of each", "[pack]", float,
                   double) {
  using T = TestType;
  const double eps = double(std::numeric_limits<T>::epsilon());
  const std::vector<T> x = heed_test::random_numbers<T>(300, 1);
  for (std::size_t i = 0; i + 3 <= x.size(); i += 3) {
    const double product = double(x[i]) * double(x[i + 1]), sum = product + double(x[i + 2]);
    const T y = mul_add(Pack<T>(x[i]), Pack<T>(x[i + 1]), Pack<T>(x[i + 2])).lane(0);
    CHECK(std::abs(double(y) - sum) <= eps * (std::abs(product) + std::abs(sum)));
  }
}

TEMPLATE_TEST_CASE("row_norm is the Euclidean norm of rows of any length and size, lane by lane",
                   "[row_norm]", float, double) {
  using T = TestType;
  const double eps = double(std::numeric_limits<T>::epsilon());
  const double largest = double(std::numeric_limits<T>::max()) / 64;
  for (const Index n : {1, 2, 5, 64})
    for (const double size : {1.0, 1e-30, 1e30, largest, 1 / largest}) {
      const std::vector<T> x = heed_test::random_numbers<T>(n, 2);
      long double squares = 0;
      for (const T one : x) {
        const long double number = T(double(one) * size);
        squares += number / size * (number / size);
      }
      const double norm = double(std::sqrt(squares)) * size;
      const auto at = [&](Index c) { return T(double(x[std::size_t(c)]) * size); };
      INFO(n << " numbers of size " << size);
      CHECK(std::abs(double(heed::row_norm<T>(n, at)) - norm) <= eps * double(n + 4) * norm);
      const Pack<T> packed = heed::row_norm<Pack<T>>(n, [&](Index c) {
        Pack<T> lanes = T(0);
        lanes.v[1] = at(c);
        return lanes;
      });
      CHECK(std::abs(double(packed.lane(1)) - norm) <= eps * double(n + 4) * norm);
      CHECK(packed.lane(0) == T(0));
    }
}

TEMPLATE_TEST_CASE(
    "row_norm of zeros is 0 and of a NaN is NaN; over_norm divides, and gives 0 over 0",
    "[row_norm]", float, double) {
  using T = TestType;
  CHECK(heed::row_norm<T>(3, [](Index) { return T(0); }) == T(0));
  CHECK(heed::row_norm<T>(0, [](Index) { return T(1); }) == T(0));
  CHECK(std::isnan(heed::row_norm<T>(3, [](Index c) { return c == 1 ? kNan<T> : T(1); })));
  CHECK(heed::over_norm(T(3), T(2)) == T(1.5));
  CHECK(heed::over_norm(T(3), T(0)) == T(0));
}
