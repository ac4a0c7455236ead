// SPDX-License-Identifier: Apache-2.0
// Rows of floats as int8 numbers with a scale: values by hand, the stated error, and rows at the ends of the range.

#include <heed/simd/quantise.hpp>
#include <heed/simd/widen.hpp>

#include <cmath>

#include "catch.hpp"
#include "simd/numbers.hpp"

using heed::Index;
using heed_test::random_numbers;

namespace {

struct Quantised {
  float scale;
  std::vector<std::int8_t> numbers;
  std::vector<float> floats;  // the floats that they stand for

  explicit Quantised(const std::vector<float>& row) : numbers(row.size()), floats(row.size()) {
    scale = heed::quantise(row.data(), Index(row.size()), numbers.data());
    convert(heed::ScaledRows{numbers.data(), 0, &scale, 0}, Index(row.size()), floats.data());
  }
};

}  // namespace

TEST_CASE("quantise gives the numbers that one finds by hand", "[quantise]") {
  const Quantised q({-254.0f, 0.0f, 1.0f, 3.0f, 4.9f, 126.9f, 254.0f, -5.0f});
  CHECK(q.scale == 2.0f);
  // 0.5, 1.5 and -2.5 are ties
  CHECK(q.numbers == std::vector<std::int8_t>{-127, 0, 0, 2, 2, 63, 127, -2});
  CHECK(q.floats == std::vector<float>{-254.0f, 0.0f, 0.0f, 4.0f, 4.0f, 126.0f, 254.0f, -4.0f});
}

TEST_CASE("no number is further from its row than quantise says", "[quantise]") {
  const std::vector<float> base = random_numbers<float>(300, 3);
  for (int exponent = -149; exponent < 128; ++exponent) {
    INFO("2^" << exponent);
    std::vector<float> row;
    double largest = 0;
    for (const float x : base) {
      row.push_back(std::ldexp(x, exponent));
      largest = std::max(largest, double(std::abs(row.back())));
    }
    const Quantised q(row);
    double worst = 0;
    for (std::size_t c = 0; c < row.size(); ++c)
      worst = std::max(worst, std::abs(double(row[c]) - double(q.floats[c])));
    CHECK(worst <= (0.5 + 0x1p-16) * double(q.scale));
    CHECK(worst < std::max(largest / 253, 0x1p-126));
    CHECK(worst > 0);
  }
}

TEST_CASE("rows at the ends of the range stay finite, and rows of zeros are zeros", "[quantise]") {
  const float most = std::numeric_limits<float>::max();
  for (const float x : {most, std::nextafter(most, 0.0f), 0x1p127f, 0x1p-149f, 0x1p-126f}) {
    const Quantised q({x, -x, x / 2});
    INFO("x = " << x);
    for (const float y : q.floats) CHECK(std::isfinite(y));
    CHECK(std::abs(double(q.floats[0]) - double(x)) <= (0.5 + 0x1p-16) * double(q.scale));
    CHECK(q.floats[1] == -q.floats[0]);
  }
  CHECK(Quantised({0.0f, -0.0f, 0.0f}).floats == std::vector<float>(3, 0.0f));
  CHECK(Quantised({}).scale > 0);
}

TEST_CASE("a row that holds a NaN or an infinity is NaN as a whole", "[quantise]") {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float x : {inf, -inf, std::nanf(""), -std::nanf("")})
    for (std::size_t at = 0; at < 20; at += 19) {
      std::vector<float> row(20, 1.0f);
      row[at] = x;
      for (const float y : Quantised(row).floats) CHECK(std::isnan(y));
    }
}
