// SPDX-License-Identifier: Apache-2.0
// Medians, and the probe of the machine's peak.

#include "catch.hpp"

#include <heed/check/machine_peak.hpp>

#include <stdexcept>
#include <vector>

using namespace heed;

TEST_CASE("a median is the middle of the sorted numbers, or the mean of the two in the middle") {
  CHECK(median_of({5}) == 5);
  CHECK(median_of({9, 1}) == 5);
  CHECK(median_of({7, 1, 2}) == 2);
  CHECK(median_of({8, 1, 100, 4}) == 6);
  CHECK(median_of({3, 3, 1, 3, 9, 9}) == 3);
  CHECK_THROWS_AS(median_of({}), std::invalid_argument);
}

TEST_CASE(
    "quartiles lie a quarter, half and three quarters of the way through the sorted numbers") {
  const auto list = [](const Spread& s) {
    return std::vector<double>{s.minimum, s.lower, s.median, s.upper};
  };
  CHECK(list(spread_of({5})) == std::vector<double>{5, 5, 5, 5});
  CHECK(list(spread_of({8, 1, 4, 2})) == std::vector<double>{1, 1.75, 3, 5});
  CHECK(list(spread_of({50, 10, 40, 20, 30})) == std::vector<double>{10, 20, 30, 40});
  CHECK(spread_of({9, 1, 7, 3, 3, 8}).median == median_of({9, 1, 7, 3, 3, 8}));
  CHECK_THROWS_AS(spread_of({}), std::invalid_argument);
}

TEST_CASE("the peak is that of more than one multiply-add at a time") {
  // A scalar unit of the slowest known machine reaches 0.1 Gflop/s; nothing reaches 1 Pflop/s.
  for (const int threads : {1, 2}) {
    CHECK(peak_flops<float>(threads) > 1e8);
    CHECK(peak_flops<double>(threads) > 1e8);
    CHECK(peak_flops<float>(threads) < 1e15);
  }
}

TEST_CASE(
    "the chains of multiply-adds are not left out: twelve sums that move from 0 ... 11 to 2") {
  // After n steps of x <- x / 2 + 1 a sum is 2 + (x - 2) / 2^n.
  const double lanes = kLanes<double>;
  CHECK(detail::multiply_add_chains<double>(0, 0.5, 1) == lanes * 66);
  CHECK(detail::multiply_add_chains<double>(1, 0.5, 1) == lanes * (24 + 42.0 / 2));
  CHECK(detail::multiply_add_chains<double>(3, 0.5, 1) == lanes * (24 + 42.0 / 8));
}
