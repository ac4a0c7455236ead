// SPDX-License-Identifier: Apache-2.0
// The products of decoding, row_dots(), narrow_dots(), row_mix() and narrow_mix(), against plain loops in double.
#include <heed/simd/instructions.hpp>
#include <heed/simd/narrow_product.hpp>

#include "catch.hpp"
#include "simd/numbers.hpp"

using heed::Index;
using heed_test::Guarded;
using heed_test::random_numbers;
using heed_test::sum_error;

namespace {

constexpr Index kKeyCounts[] = {0, 1, 2, 3, 5, 8, 15, 16, 17, 33};
constexpr Index kColumnCounts[] = {0, 1, 3, 4, 7, 8, 9, 16, 31, 32, 40, 63, 64, 65, 100, 129};
constexpr Index kLanesOfOut = 2 * heed::kLanes<float>;  // of a tile that is wider than its queries

// Rows of keys or values, longer than what is read of them.
template <class T>
struct Rows {
  Index keys, columns, stride;
  std::vector<T> numbers;
  Rows(Index k, Index c)
      : keys(k), columns(c), stride(c + 3), numbers(random_numbers<T>((k + 1) * stride, 4)) {}
  [[nodiscard]] double at(Index key, Index c) const {
    return double(numbers[std::size_t(key * stride + c)]);
  }
};

template <class T>
[[nodiscard]] Index whole_vectors(Index n) {
  return (n + heed::kLanes<T> - 1) / heed::kLanes<T> * heed::kLanes<T>;
}

// Is `has` the dot product of a key's row with a query, up to rounding?
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

TEMPLATE_TEST_CASE("row_dots is a dot product per key, with zeros behind the last key",
                   "[narrow_product]", float, double) {
  using T = TestType;
  for (const Index keys : kKeyCounts)
    for (const Index columns : kColumnCounts) {
      const Rows<T> rows(keys, columns);
      const std::vector<T> query = random_numbers<T>(columns, 5);
      Guarded<T> out(whole_vectors<T>(keys), T(7));
      heed::row_dots(rows.numbers.data(), rows.stride, keys, columns, query.data(), out.data());
      INFO(keys << " keys, " << columns << " columns");
      Index wrong = 0;
      for (Index j = 0; j < keys; ++j) wrong += !is_dot(rows, j, query.data(), out[j]);
      for (Index j = keys; j < whole_vectors<T>(keys); ++j) wrong += out[j] != T(0);
      CHECK(wrong == 0);
      CHECK(out.margins_are_untouched());
    }
}

TEMPLATE_TEST_CASE("narrow_dots is a dot product per key and query, with zeros in the lanes behind",
                   "[narrow_product]", float, double) {
  using T = TestType;
  for (const Index queries : {1, 2, 3, 4})
    for (const Index keys : kKeyCounts)
      for (const Index columns : {1, 8, 40, 65}) {
        const Rows<T> rows(keys, columns);
        const std::vector<T> query = random_numbers<T>(queries * columns, 6);
        Guarded<T> out(keys * kLanesOfOut, T(7)), row(whole_vectors<T>(keys), T(7));
        heed::narrow_dots(rows.numbers.data(), rows.stride, keys, columns, query.data(), queries,
                          out.data(), kLanesOfOut, row.data());
        INFO(queries << " queries, " << keys << " keys, " << columns << " columns");
        Index wrong = 0;
        for (Index j = 0; j < keys; ++j)
          for (Index i = 0; i < kLanesOfOut; ++i)
            wrong += i < queries
                         ? !is_dot(rows, j, query.data() + i * columns, out[j * kLanesOfOut + i])
                         : out[j * kLanesOfOut + i] != T(0);
        CHECK(wrong == 0);
        CHECK((out.margins_are_untouched() && row.margins_are_untouched()));
      }
}

TEMPLATE_TEST_CASE("row_mix adds the weighted sum of all rows, at any step of weights and output",
                   "[narrow_product]", float, double) {
  using T = TestType;
  for (const Index keys : kKeyCounts)
    for (const Index columns : kColumnCounts)
      for (const Index step : {1, 5}) {
        const Rows<T> rows(keys, columns);
        const std::vector<T> weights = random_numbers<T>(keys * step, 7);
        Guarded<T> out(columns * step, T(0.5));
        heed::row_mix(rows.numbers.data(), rows.stride, keys, columns, weights.data(), step,
                      out.data(), step);
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

TEMPLATE_TEST_CASE("narrow_mix is row_mix for each of its queries, in every bit",
                   "[narrow_product]", float, double) {
  using T = TestType;
  const Index queries = 3, keys = 17, columns = 45;
  const Rows<T> rows(keys, columns);
  const std::vector<T> weights = random_numbers<T>(keys * kLanesOfOut, 8);
  Guarded<T> together(columns * kLanesOfOut, T(0)), alone(columns * kLanesOfOut, T(0));
  heed::narrow_mix(rows.numbers.data(), rows.stride, keys, columns, weights.data(), queries,
                   together.data(), kLanesOfOut);
  for (Index i = 0; i < queries; ++i)
    heed::row_mix(rows.numbers.data(), rows.stride, keys, columns, weights.data() + i, kLanesOfOut,
                  alone.data() + i, kLanesOfOut);
  CHECK(std::equal(together.data(), together.data() + columns * kLanesOfOut, alone.data()));
  CHECK(together[queries] == T(0));
  CHECK(together[0] != T(0));
}

TEMPLATE_TEST_CASE("load_part reads as many numbers as it is told and fills the rest with zeros",
                   "[narrow_product]", float, double) {
  using T = TestType;
  const std::vector<T> numbers = random_numbers<T>(heed::kLanes<T>, 9);
  for (int count = 0; count < heed::kLanes<T>; ++count)
    for (int i = 0; i < heed::kLanes<T>; ++i)
      CHECK(heed::load_part<T>(numbers.data(), count).lane(i) ==
            (i < count ? numbers[std::size_t(i)] : T(0)));
}
