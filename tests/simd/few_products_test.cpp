// SPDX-License-Identifier: Apache-2.0
// The products of decoding, row_dots(), few_dots(), row_accumulate() and few_accumulate(), against plain
// loops in double; and the same bits for a query alone or among others, on rows of any type.
#include <heed/simd/few_products.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>

#include "catch.hpp"
#include "simd/numbers.hpp"

using heed::Index;
using heed_test::Guarded;
using heed_test::random_numbers;
using heed_test::sum_error;

namespace {

constexpr Index kKeyCounts[] = {0, 1, 2, 3, 5, 8, 15, 16, 17, 33};
constexpr Index kColumnCounts[] = {0, 1, 3, 4, 7, 8, 9, 16, 31, 32, 40, 63, 64, 65, 100, 129};
constexpr Index kLanesOfOut = 2 * heed::kLanes<float>;  // a tile is wider than its queries

// Rows of keys or values, longer than the part that is read.
template <class T>
struct Rows {
  Index keys, columns, stride;
  std::vector<T> numbers;
  Rows(Index k, Index c)
      : keys(k), columns(c), stride(c + 3), numbers(random_numbers<T>((k + 1) * stride, 4)) {}
  [[nodiscard]] heed::StoredRows<T> stored() const { return {numbers.data(), stride}; }
  [[nodiscard]] double at(Index key, Index c) const {
    return double(numbers[std::size_t(key * stride + c)]);
  }
};

template <class T>
[[nodiscard]] Index whole_vectors(Index n) {
  return (n + heed::kLanes<T> - 1) / heed::kLanes<T> * heed::kLanes<T>;
}

// True if `has` is the dot product of a key's row with a query, up to rounding.
template <class T>
[[nodiscard]] bool is_dot(const Rows<T>& rows, Index key, const T* query, T has) {
  double sum = 0, size = 0;
  for (Index c = 0; c < rows.columns; ++c) {
    sum += rows.at(key, c) * double(query[c]);
    size += std::abs(rows.at(key, c) * double(query[c]));
  }
  return std::abs(double(has) - sum) <= sum_error<T>(rows.columns, size);
}

}  // namespace

TEMPLATE_TEST_CASE("row_dots is a dot product per key and query, with zeros behind the last key",
                   "[few_products]", float, double) {
  using T = TestType;
  for (const Index keys : kKeyCounts)
    for (const Index columns : kColumnCounts)
      for (const Index count : {1, 2, 3, 4, 7}) {
        const Rows<T> rows(keys, columns);
        const std::vector<T> queries = random_numbers<T>(count * columns, 5);
        std::vector<Guarded<T>> out(std::size_t(count), Guarded<T>(whole_vectors<T>(keys), T(7)));
        std::vector<heed::DotQuery<T>> all;
        for (Index i = 0; i < count; ++i)
          all.push_back({queries.data() + i * columns, out[std::size_t(i)].data()});
        heed::row_dots(rows.stored(), keys, columns, all.data(), count);
        INFO(keys << " keys, " << columns << " columns, " << count << " queries");
        Index wrong = 0;
        for (Index i = 0; i < count; ++i) {
          const Guarded<T>& dots = out[std::size_t(i)];
          for (Index j = 0; j < keys; ++j)
            wrong += !is_dot(rows, j, queries.data() + i * columns, dots[j]);
          for (Index j = keys; j < whole_vectors<T>(keys); ++j) wrong += dots[j] != T(0);
          wrong += !dots.margins_are_untouched();
        }
        CHECK(wrong == 0);
      }
}

TEMPLATE_TEST_CASE("few_dots is a dot product per key and query, with zeros in the lanes behind",
                   "[few_products]", float, double) {
  using T = TestType;
  for (Index queries = 1; queries <= heed::kFewRows<T>; ++queries)
    for (const Index keys : kKeyCounts)
      for (const Index columns : {1, 8, 40, 65}) {
        const Rows<T> rows(keys, columns);
        const std::vector<T> query = random_numbers<T>(queries * columns, 6);
        Guarded<T> out(keys * kLanesOfOut, T(7)), dots(queries * whole_vectors<T>(keys), T(7));
        heed::few_dots(rows.numbers.data(), rows.stride, keys, columns, query.data(), queries,
                       out.data(), kLanesOfOut, dots.data());
        INFO(queries << " queries, " << keys << " keys, " << columns << " columns");
        Index wrong = 0;
        for (Index j = 0; j < keys; ++j)
          for (Index i = 0; i < kLanesOfOut; ++i)
            wrong += i < queries
                         ? !is_dot(rows, j, query.data() + i * columns, out[j * kLanesOfOut + i])
                         : out[j * kLanesOfOut + i] != T(0);
        CHECK(wrong == 0);
        CHECK((out.margins_are_untouched() && dots.margins_are_untouched()));
      }
}

TEMPLATE_TEST_CASE(
    "row_accumulate adds the weighted sum of all rows, at any step of weights and output",
    "[few_products]", float, double) {
  using T = TestType;
  for (const Index keys : kKeyCounts)
    for (const Index columns : kColumnCounts)
      for (const Index step : {1, 5}) {
        const Rows<T> rows(keys, columns);
        const std::vector<T> weights = random_numbers<T>(keys * step, 7);
        Guarded<T> out(columns * step, T(0.5));
        const heed::AccumulateQuery<T> query{weights.data(), out.data()};
        heed::row_accumulate(rows.stored(), keys, columns, &query, 1, step, step);
        INFO(keys << " keys, " << columns << " columns, step " << step);
        Index wrong = 0;
        for (Index n = 0; n < columns * step; ++n) {
          double sum = 0.5, size = 0.5;
          for (Index j = 0; j < keys && n % step == 0; ++j) {
            const double term = double(weights[std::size_t(j * step)]) * rows.at(j, n / step);
            sum += term;
            size += std::abs(term);
          }
          wrong += !(std::abs(double(out[n]) - sum) <= sum_error<T>(keys, size));
        }
        CHECK(wrong == 0);
        CHECK(out.margins_are_untouched());
      }
}

TEMPLATE_TEST_CASE("queries side by side have the bits that each has alone", "[few_products]",
                   float, double) {
  using T = TestType;
  constexpr Index most = 9;
  for (const Index keys : {1, 7, 16, 37})
    for (const Index columns : {3, 8, 45, 64, 129}) {
      INFO(keys << " keys, " << columns << " columns");
      const Rows<T> rows(keys, columns);
      const Index row = whole_vectors<T>(keys);
      const std::vector<T> queries = random_numbers<T>(most * columns, 10);
      std::vector<T> alone(std::size_t(most * row)), mixed(std::size_t(most * columns));
      for (Index i = 0; i < most; ++i) {
        const heed::DotQuery<T> dot{queries.data() + i * columns, alone.data() + i * row};
        heed::row_dots(rows.stored(), keys, columns, &dot, 1);
        const heed::AccumulateQuery<T> mix{alone.data() + i * row, mixed.data() + i * columns};
        heed::row_accumulate(rows.stored(), keys, columns, &mix, 1, 1, 1);
      }
      for (Index count = 2; count <= most; ++count) {
        std::vector<T> dots(alone.size()), out(mixed.size());
        std::vector<heed::DotQuery<T>> all;
        std::vector<heed::AccumulateQuery<T>> mixes;
        for (Index i = 0; i < count; ++i) {
          all.push_back({queries.data() + i * columns, dots.data() + i * row});
          mixes.push_back({dots.data() + i * row, out.data() + i * columns});
        }
        heed::row_dots(rows.stored(), keys, columns, all.data(), count);
        heed::row_accumulate(rows.stored(), keys, columns, mixes.data(), count, 1, 1);
        CHECK(std::equal(alone.begin(), alone.begin() + count * row, dots.begin()));
        CHECK(std::equal(mixed.begin(), mixed.begin() + count * columns, out.begin()));
      }
    }
}

TEMPLATE_TEST_CASE("products of narrow rows have the bits of products of what they stand for",
                   "[few_products]", heed::bfloat16, heed::half, std::int8_t) {
  const auto check = [&]<class T>(T) {
    for (const Index keys : {1, 16, 37})
      for (const Index columns : {3, 64, 100})
        for (const Index count : {1, 2, 4, 5}) {
          INFO(keys << " keys, " << columns << " columns, " << count << " queries");
          const Index stride = columns + 3;
          const std::vector<float> source = random_numbers<float>(keys * stride, 4);
          std::vector<TestType> narrow(source.size());
          std::vector<float> scales(std::size_t(keys * 2));
          std::vector<T> wide(source.size());
          for (Index j = 0; j < keys; ++j)
            for (Index c = 0; c < columns; ++c) {
              const auto at = std::size_t(j * stride + c);
              if constexpr (std::is_same_v<TestType, std::int8_t>) {
                scales[std::size_t(j * 2)] = 0.01f * float(j + 1);
                narrow[at] = std::int8_t(127 * source[at]);
                wide[at] = T(0.01f * float(j + 1) * float(narrow[at]));
              } else {
                narrow[at] = TestType(source[at]);
                wide[at] = T(float(narrow[at]));
              }
            }
          const auto stored = [&] {
            if constexpr (std::is_same_v<TestType, std::int8_t>)
              return heed::ScaledRows{narrow.data(), stride, scales.data(), 2};
            else
              return heed::StoredRows<TestType>{narrow.data(), stride};
          }();
          const Index row = whole_vectors<T>(keys);
          const std::vector<T> queries = random_numbers<T>(count * columns, 12);
          const auto products = [&](const auto& rows) {
            std::vector<T> dots(std::size_t(count * row)), out(std::size_t(count * columns));
            std::vector<heed::DotQuery<T>> all;
            std::vector<heed::AccumulateQuery<T>> mixes;
            for (Index i = 0; i < count; ++i) {
              all.push_back({queries.data() + i * columns, dots.data() + i * row});
              mixes.push_back({dots.data() + i * row, out.data() + i * columns});
            }
            heed::row_dots(rows, keys, columns, all.data(), count);
            heed::row_accumulate(rows, keys, columns, mixes.data(), count, 1, 1);
            dots.insert(dots.end(), out.begin(), out.end());
            return dots;
          };
          CHECK(products(stored) == products(heed::StoredRows<T>{wide.data(), stride}));
        }
  };
  check(float());
  check(double());
}

TEMPLATE_TEST_CASE("few_accumulate is row_accumulate for each of its queries, in every bit",
                   "[few_products]", float, double) {
  using T = TestType;
  const Index queries = std::min<Index>(3, heed::kFewRows<T>), keys = 17, columns = 45;
  const Rows<T> rows(keys, columns);
  const std::vector<T> weights = random_numbers<T>(keys * kLanesOfOut, 8);
  Guarded<T> together(columns * kLanesOfOut, T(0)), alone(columns * kLanesOfOut, T(0));
  heed::few_accumulate(rows.numbers.data(), rows.stride, keys, columns, weights.data(), queries,
                       together.data(), kLanesOfOut);
  for (Index i = 0; i < queries; ++i) {
    const heed::AccumulateQuery<T> query{weights.data() + i, alone.data() + i};
    heed::row_accumulate(rows.stored(), keys, columns, &query, 1, kLanesOfOut, kLanesOfOut);
  }
  CHECK(std::equal(together.data(), together.data() + columns * kLanesOfOut, alone.data()));
  CHECK(together[queries] == T(0));
  CHECK(together[0] != T(0));
}

TEMPLATE_TEST_CASE("load_part reads as many numbers as it is told and fills the rest with zeros",
                   "[few_products]", float, double) {
  using T = TestType;
  const std::vector<T> numbers = random_numbers<T>(heed::kLanes<T>, 9);
  for (int count = 0; count < heed::kLanes<T>; ++count)
    for (int i = 0; i < heed::kLanes<T>; ++i)
      CHECK(heed::load_part<T>(numbers.data(), count).lane(i) ==
            (i < count ? numbers[std::size_t(i)] : T(0)));
}
