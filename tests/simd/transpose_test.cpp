// SPDX-License-Identifier: Apache-2.0
// pack_lanes(), unpack_lanes() and add_unpacked_lanes() element by element.
#include <heed/simd/instructions.hpp>
#include <heed/simd/transpose.hpp>

#include "catch.hpp"
#include "simd/numbers.hpp"

using heed::Index;
using heed_test::Guarded;
using heed_test::random_numbers;

namespace {

constexpr Index kColumnCounts[] = {0, 1, 3, 4, 5, 8, 9, 15, 16, 17, 33};

// Calls f(rows, columns, lanes) for every number of rows that a tile of one or two vectors can hold.
template <class T, class F>
void for_tiles(const F& f) {
  for (const Index vectors : {1, 2})
    for (Index rows = 0; rows <= vectors * heed::kLanes<T>; ++rows)
      for (const Index columns : kColumnCounts) f(rows, columns, vectors * heed::kLanes<T>);
}

}  // namespace

TEMPLATE_TEST_CASE(
    "pack_lanes turns any number of rows into lanes, times a factor, zeros in the lanes behind",
    "[transpose]", float, double) {
  using T = TestType;
  for_tiles<T>([](Index rows, Index columns, Index lanes) {
    const Index stride = columns + 2;
    const std::vector<T> source = random_numbers<T>(rows * stride, 1);
    Guarded<T> tile(columns * lanes, T(7));
    heed::pack_lanes(source.data(), stride, rows, columns, tile.data(), lanes, T(0.75));
    Index wrong = 0;
    for (Index c = 0; c < columns; ++c)
      for (Index r = 0; r < lanes; ++r)
        wrong += tile[c * lanes + r] !=
                 (r < rows ? T(0.75) * source[std::size_t(r * stride + c)] : T(0));
    INFO(rows << " rows, " << columns << " columns, " << lanes << " lanes");
    CHECK(wrong == 0);
    CHECK(tile.margins_are_untouched());
  });
}

TEMPLATE_TEST_CASE(
    "unpack_lanes turns lanes back into rows, and writes neither other rows nor other columns",
    "[transpose]", float, double) {
  using T = TestType;
  for_tiles<T>([](Index rows, Index columns, Index lanes) {
    const Index stride = columns + 2;
    const std::vector<T> tile = random_numbers<T>(columns * lanes, 2);
    Guarded<T> rows_out(rows * stride, T(7));
    heed::unpack_lanes(tile.data(), lanes, rows, columns, rows_out.data(), stride);
    Index wrong = 0;
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < stride; ++c)
        wrong +=
            rows_out[r * stride + c] != (c < columns ? tile[std::size_t(c * lanes + r)] : T(7));
    INFO(rows << " rows, " << columns << " columns, " << lanes << " lanes");
    CHECK(wrong == 0);
    CHECK(rows_out.margins_are_untouched());
  });
}

TEMPLATE_TEST_CASE("add_unpacked_lanes adds lanes to rows, and to nothing beside them",
                   "[transpose]", float, double) {
  using T = TestType;
  for_tiles<T>([](Index rows, Index columns, Index lanes) {
    const Index stride = columns + 2;
    const std::vector<T> tile = random_numbers<T>(columns * lanes, 3),
                         before = random_numbers<T>(rows * stride, 4);
    Guarded<T> sums(rows * stride, T(0));
    std::copy(before.begin(), before.end(), sums.data());
    heed::add_unpacked_lanes(tile.data(), lanes, rows, columns, sums.data(), stride);
    Index wrong = 0;
    for (Index r = 0; r < rows; ++r)
      for (Index c = 0; c < stride; ++c) {
        const T had = before[std::size_t(r * stride + c)];
        wrong +=
            sums[r * stride + c] != (c < columns ? had + tile[std::size_t(c * lanes + r)] : had);
      }
    INFO(rows << " rows, " << columns << " columns, " << lanes << " lanes");
    CHECK(wrong == 0);
    CHECK(sums.margins_are_untouched());
  });
}

TEMPLATE_TEST_CASE("sums_of_lanes puts sum_lanes of the k-th pack into lane k", "[transpose]",
                   float, double) {
  using T = TestType;
  constexpr Index W = heed::kLanes<T>;
  const std::vector<T> numbers = random_numbers<T>(W * W, 5);
  heed::Pack<T> packs[std::size_t(W)];
  for (Index k = 0; k < W; ++k) packs[k] = heed::Pack<T>::load(numbers.data() + k * W);
  const heed::Pack<T> sums = heed::detail::sums_of_lanes(packs);
  for (Index k = 0; k < W; ++k) {
    double sum = 0, size = 0;
    for (Index i = 0; i < W; ++i) {
      sum += double(numbers[std::size_t(k * W + i)]);
      size += std::abs(double(numbers[std::size_t(k * W + i)]));
    }
    CHECK(std::abs(double(sums.lane(int(k))) - sum) <= heed_test::sum_error<T>(W, size));
    CHECK(sums.lane(int(k)) == heed::sum_lanes(heed::Pack<T>::load(numbers.data() + k * W)));
  }
}
