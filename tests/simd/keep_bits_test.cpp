// SPDX-License-Identifier: Apache-2.0
// The places that keep_bits.hpp keeps: their number, and that they are the same in every run and however they are drawn.
#include <heed/core/random.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/keep_bits.hpp>

#include "catch.hpp"

#include <cmath>
#include <limits>
#include <vector>

using heed::Dropper;
using heed::Index;
using heed::Pack;

namespace {

constexpr double kRates[] = {0, 0.1, 0.5, 0.9};

// The formula at the head of keep_bits.hpp, once more.
bool kept_by_hand(double rate, std::uint64_t key, Index column) {
  std::uint32_t h = std::uint32_t(key) + std::uint32_t(column) * 0x9E3779B9U;
  h = ((h ^ (h >> 16)) * 0x85EBCA6BU) ^ std::uint32_t(key >> 32);
  h = (h ^ (h >> 13)) * 0xC2B2AE35U;
  return double(h) < (1 - rate) * 0x1.0p32;
}

}  // namespace

TEST_CASE("keeps() is the formula at the head of its file", "[keep_bits]") {
  const heed::CounterRandom keys(1);
  Index wrong = 0;
  for (const double rate : kRates)
    for (std::uint64_t row = 0; row < 40; ++row)
      for (Index column = 0; column < 100; ++column)
        wrong +=
            heed::keeps(rate, keys.bits(row), column) != kept_by_hand(rate, keys.bits(row), column);
  CHECK(wrong == 0);
}

TEST_CASE("a share 1 - rate of all places is kept, in every column and in every row",
          "[keep_bits]") {
  constexpr Index size = 600;
  const heed::CounterRandom keys(2);
  for (const double rate : {0.1, 0.5, 0.9}) {
    std::vector<double> rows(size), columns(size);
    for (Index r = 0; r < size; ++r)
      for (Index c = 0; c < size; ++c)
        if (heed::keeps(rate, keys.bits(std::uint64_t(r)), c)) {
          rows[std::size_t(r)] += 1.0 / size;
          columns[std::size_t(c)] += 1.0 / size;
        }
    // One in 16,000 shares lies beyond four standard deviations; for 1,200 shares five leave room for another seed.
    const double deviation = std::sqrt(rate * (1 - rate) / size);
    double mean = 0, farthest = 0;
    for (const auto* shares : {&rows, &columns})
      for (const double share : *shares) {
        mean += share / (2 * size);
        farthest = std::max(farthest, std::abs(share - (1 - rate)));
      }
    INFO("rate " << rate << ", farthest " << farthest / deviation << " standard deviations");
    CHECK(farthest < 5 * deviation);
    CHECK(std::abs(mean - (1 - rate)) < 4 * deviation / std::sqrt(double(size)));
  }
}

TEST_CASE("a rate of almost 1 keeps something, a rate of 0 drops next to nothing", "[keep_bits]") {
  CHECK(heed::detail::keep_threshold(1 - 1e-12) == 1);
  CHECK(heed::detail::keep_threshold(0) == 0xFFFFFFFFU);
  CHECK(heed::detail::keep_threshold(0.5) == 0x80000000U);
}

TEMPLATE_TEST_CASE("a Dropper along columns keeps what keeps() keeps, from any column on",
                   "[keep_bits]", float, double) {
  using T = TestType;
  const std::uint64_t key = heed::CounterRandom(3).bits(0);
  for (const double rate : kRates)
    for (const Index first : {0, 1, 7, 1000}) {
      Dropper<T> dropper = Dropper<T>::along_columns(rate, key, first);
      Index wrong = 0;
      for (Index step = 0; step < 20; ++step) {
        dropper.next();
        const Pack<T> y = dropper(Pack<T>(T(3)));
        for (int i = 0; i < heed::kLanes<T>; ++i) {
          const bool keep = heed::keeps(rate, key, first + step * heed::kLanes<T> + i);
          wrong += y.lane(i) != (keep ? T(3) * T(1 / (1 - rate)) : T(0));
        }
      }
      INFO("rate " << rate << " from column " << first);
      CHECK(wrong == 0);
    }
}

TEMPLATE_TEST_CASE("a Dropper along rows keeps what keeps() keeps, in every vector of a panel",
                   "[keep_bits]", float, double) {
  using T = TestType;
  const heed::CounterRandom random(4);
  heed::LaneKeys<T> keys;
  for (Index i = 0; i < heed::kPanelLanes<T>; ++i) {
    keys.set(i, random.bits(std::uint64_t(i)));
    CHECK(keys.key(i) == random.bits(std::uint64_t(i)));
  }
  for (const double rate : kRates)
    for (int v = 0; v < heed::kPanelVectors; ++v) {
      Dropper<T> dropper = Dropper<T>::along_rows(rate, keys, v, 5);
      Index wrong = 0;
      for (Index column = 5; column < 60; ++column) {
        dropper.next();
        const Pack<T> y = dropper(Pack<T>(T(1)));
        for (int i = 0; i < heed::kLanes<T>; ++i)
          wrong +=
              (y.lane(i) != T(0)) != heed::keeps(rate, keys.key(v * heed::kLanes<T> + i), column);
      }
      INFO("rate " << rate << ", vector " << v);
      CHECK(wrong == 0);
    }
}

TEMPLATE_TEST_CASE("a dropped place is 0 even where NaN or infinity stood", "[keep_bits]", float,
                   double) {
  using T = TestType;
  Dropper<T> dropper = Dropper<T>::along_columns(0.5, 77, 0);
  Index dropped = 0;
  for (Index step = 0; step < 8; ++step) {
    dropper.next();
    for (const T bad : {std::numeric_limits<T>::quiet_NaN(), heed::kInfinity<T>})
      for (int i = 0; i < heed::kLanes<T>; ++i) {
        if (heed::keeps(0.5, 77, step * heed::kLanes<T> + i)) continue;
        CHECK(dropper(Pack<T>(bad)).lane(i) == T(0));
        ++dropped;
      }
  }
  CHECK(dropped > 0);
}
