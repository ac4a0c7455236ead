// SPDX-License-Identifier: Apache-2.0
// panel_gemm() and gemm_add() against three plain loops in double.
#include <heed/simd/instructions.hpp>
#include <heed/simd/panel_gemm.hpp>

#include "catch.hpp"
#include "simd/numbers.hpp"

#include <algorithm>
#include <iterator>

using heed::Broadcast;
using heed::Index;
using heed::SegmentedBroadcast;
using heed::Store;
using heed_test::Guarded;
using heed_test::random_numbers;
using heed_test::sum_error;

namespace {

constexpr Index kRowCounts[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 23, 25, 28};

// The place of A, and its segments; a period of 0 means no segments.
struct Left {
  Index row, depth, period = 0, segment = 0;
};

// A product of random numbers, its plain value and the size of its terms.
template <class T>
struct Product {
  Index rows, depth, columns, b_row, c_row;
  std::vector<T> a, b, before;
  Left left;

  Product(Index rows_, Index depth_, Index columns_, const Left& walk, Index gap)
      : rows(rows_), depth(depth_), columns(columns_), left(walk) {
    const Index whole = (columns + heed::kLanes<T> - 1) / heed::kLanes<T> * heed::kLanes<T>;
    b_row = whole + gap;
    c_row = columns + gap;
    a = random_numbers<T>(4000, 1);
    b = random_numbers<T>(depth * b_row + whole, 2);
    before = random_numbers<T>(rows * c_row, 3);
  }
  [[nodiscard]] Broadcast<T> in_one_piece() const { return {a.data(), left.row, left.depth}; }
  // Calls f(A in the form that the product takes).
  template <class F>
  void with_left(F&& f) const {
    if (left.period == 0)
      f(in_one_piece());
    else
      f(SegmentedBroadcast<T>{a.data(), left.row, left.depth, left.period, left.segment});
  }
  [[nodiscard]] double a_at(Index i, Index k) const {
    const Index segment = left.period == 0 ? 0 : k / left.period;
    return double(a.at(std::size_t(i * left.row + (k - segment * left.period) * left.depth +
                                   segment * left.segment)));
  }
  [[nodiscard]] double plain(Index i, Index c) const {
    double sum = 0;
    for (Index k = 0; k < depth; ++k) sum += a_at(i, k) * double(b[std::size_t(k * b_row + c)]);
    return sum;
  }
  [[nodiscard]] double slack(Index i, Index c) const {
    double size = 1;
    for (Index k = 0; k < depth; ++k)
      size += std::abs(a_at(i, k) * double(b[std::size_t(k * b_row + c)]));
    return sum_error<T>(depth, size);
  }
  // Number of entries of C that differ from `old` * earlier contents + the plain product, or that lie in a gap and changed.
  [[nodiscard]] Index wrong(const Guarded<T>& c, double old) const {
    Index count = 0;
    for (Index i = 0; i < rows; ++i)
      for (Index col = 0; col < c_row; ++col) {
        const double had = double(before[std::size_t(i * c_row + col)]),
                     has = double(c[i * c_row + col]);
        if (col >= columns)
          count += has != had;
        else
          count += !(std::abs(has - (old * had + plain(i, col))) <= slack(i, col));
      }
    return count;
  }
  [[nodiscard]] Guarded<T> output() const {
    Guarded<T> c(rows * c_row, T(0));
    std::copy(before.begin(), before.end(), c.data());
    return c;
  }
};

const Left kWalks[] = {
    {19, 1},         // rows of A lie in memory one after the other
    {1, 40},         // A is transposed
    {7, 3, 5, 400},  // segments of five columns each
};

}  // namespace

TEMPLATE_TEST_CASE("panel_gemm equals three plain loops for every width, mode, size and stride",
                   "[panel_gemm]", float, double) {
  using T = TestType;
  for (int vectors = 1; vectors <= heed::kPanelVectors; ++vectors)
    for (const Left& walk : kWalks)
      for (const Index depth : {0, 1, 5, 12})
        for (const Index rows : kRowCounts) {
          const Product<T> product(rows, depth, vectors * heed::kLanes<T>, walk, depth % 3);
          INFO(vectors << " vectors, " << rows << " rows, depth " << depth << ", row stride "
                       << walk.row);
          const auto run = [&](Store store, Guarded<T>& c, T* maxima,
                               const T* first_row = nullptr) {
            product.with_left([&](const auto& left) {
              heed::panel_gemm(store, rows, depth, vectors, left, product.b.data(), product.b_row,
                               c.data(), product.c_row, maxima, first_row);
            });
          };
          Guarded<T> written = product.output(), added = product.output(),
                     raised = product.output();
          run(Store::overwrite, written, nullptr);
          run(Store::add, added, nullptr);
          Guarded<T> maxima(product.columns, T(-0.25));
          run(Store::overwrite_and_max, raised, maxima.data());
          CHECK(product.wrong(written, 0) == 0);
          CHECK(product.wrong(added, 1) == 0);
          CHECK(product.wrong(raised, 0) == 0);
          // Rows of the product begin with a row: the same as if it had stood in each row of C.
          Guarded<T> row(product.columns, T(0)), begun = product.output(), stood = product.output();
          for (Index c = 0; c < product.columns; ++c) row.data()[c] = T(c % 7) - T(2.5);
          for (Index i = 0; i < rows; ++i)
            std::copy(row.data(), row.data() + product.columns, stood.data() + i * product.c_row);
          run(Store::add, stood, nullptr);
          run(Store::overwrite, begun, nullptr, row.data());
          CHECK(std::equal(begun.data(), begun.data() + rows * product.c_row, stood.data()));
          Index low = 0;
          for (Index c = 0; c < product.columns; ++c) {
            T largest = T(-0.25);
            for (Index i = 0; i < rows; ++i)
              largest = std::max(largest, raised[i * product.c_row + c]);
            low += maxima[c] != largest;
          }
          CHECK(low == 0);
          CHECK((written.margins_are_untouched() && added.margins_are_untouched() &&
                 raised.margins_are_untouched() && maxima.margins_are_untouched()));
        }
}

TEMPLATE_TEST_CASE("panel_gemm passes over NaN when it raises the running maximum", "[panel_gemm]",
                   float, double) {
  using T = TestType;
  constexpr Index rows = 5, W = heed::kLanes<T>;
  const std::vector<T> a = {T(1), T(3), std::numeric_limits<T>::quiet_NaN(), T(2), T(-4)};
  const std::vector<T> b(std::size_t(W), T(1));
  std::vector<T> c(std::size_t(rows * W)), maxima(std::size_t(W), -heed::kInfinity<T>);
  heed::panel_gemm(Store::overwrite_and_max, rows, 1, 1, Broadcast<T>{a.data(), 1, 1}, b.data(), W,
                   c.data(), W, maxima.data());
  for (const T maximum : maxima) CHECK(maximum == T(3));
  CHECK(std::isnan(c[std::size_t(2 * W)]));
}

TEMPLATE_TEST_CASE(
    "no row of a panel_gemm depends on how many rows are computed with it, in no bit",
    "[panel_gemm]", float, double) {
  using T = TestType;
  const Index all = *std::max_element(std::begin(kRowCounts), std::end(kRowCounts));
  const Product<T> whole(all, 12, heed::kPanelLanes<T>, kWalks[0], 0);
  const auto run = [&](Index first, Index rows, Guarded<T>& c) {
    heed::panel_gemm(Store::overwrite, rows, whole.depth, heed::kPanelVectors,
                     whole.in_one_piece().skip_rows(first), whole.b.data(), whole.b_row,
                     c.data() + first * whole.c_row, whole.c_row);
  };
  Guarded<T> together = whole.output();
  run(0, all, together);
  for (const Index rows : kRowCounts) {
    Guarded<T> split = whole.output();
    run(0, rows, split);
    run(rows, all - rows, split);
    INFO(rows << " rows, then the others");
    CHECK(std::equal(split.data(), split.data() + all * whole.c_row, together.data()));
  }
}

TEMPLATE_TEST_CASE("gemm_add adds the product in any number of columns, and touches no other",
                   "[panel_gemm]", float, double) {
  using T = TestType;
  for (const Left& walk : kWalks)
    for (const Index columns : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 50, 65, 71})
      for (const Index rows : {0, 1, 5, 12, 13, 25}) {
        const Product<T> product(rows, 12, columns, walk, 3);
        INFO(rows << " rows, " << columns << " columns, row stride " << walk.row);
        Guarded<T> c = product.output();
        product.with_left([&](const auto& left) {
          heed::gemm_add(rows, product.depth, columns, left, product.b.data(), product.b_row,
                         c.data(), product.c_row);
        });
        CHECK(product.wrong(c, 1) == 0);
        CHECK(c.margins_are_untouched());
      }
}

TEMPLATE_TEST_CASE("gemm_add taken in parts of its depth gives the same bits", "[panel_gemm]",
                   float, double) {
  using T = TestType;
  for (const Index columns : {3, 8, 21, 65}) {
    const Product<T> product(13, 12, columns, kWalks[0], 1);
    Guarded<T> whole = product.output(), parts = product.output();
    const auto run = [&](Index from, Index depth, Guarded<T>& c) {
      Broadcast<T> left = product.in_one_piece();
      left.data += from * left.depth;
      heed::gemm_add(product.rows, depth, columns, left, product.b.data() + from * product.b_row,
                     product.b_row, c.data(), product.c_row);
    };
    run(0, 12, whole);
    run(0, 5, parts);
    run(5, 1, parts);
    run(6, 6, parts);
    INFO(columns << " columns");
    CHECK(std::equal(parts.data(), parts.data() + product.rows * product.c_row, whole.data()));
  }
}
