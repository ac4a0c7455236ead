// SPDX-License-Identifier: Apache-2.0
#include <heed/core/random.hpp>
#include <heed/nn/multiply.hpp>

#include "catch.hpp"
#include "message_of.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

using heed::CounterRandom;
using heed::Index;
using heed::Precision;
using namespace heed::nn;

namespace {

// A matrix of normal numbers, dense row by row or column by column.
struct Operand {
  Index rows, columns;
  bool by_columns;
  std::vector<float> numbers;

  Operand(Index row_count, Index column_count, bool lies_by_columns, std::uint64_t stream)
      : rows(row_count), columns(column_count), by_columns(lies_by_columns) {
    const CounterRandom random(20250611, stream);
    for (Index i = 0; i < rows * columns; ++i)
      numbers.push_back(float(random.normal(std::uint64_t(i))));
  }
  [[nodiscard]] Factor<float> factor() const {
    return {numbers.data(), by_columns ? 1 : columns, by_columns ? rows : 1};
  }
  [[nodiscard]] float operator()(Index r, Index c) const {
    const Factor<float> f = factor();
    return f.data[r * f.row + c * f.column];
  }
};

// A number as the kernel reads it.
[[nodiscard]] double operand(float x, Precision precision) {
  return double(precision == Precision::mixed ? heed::rounded_to_bfloat(x) : x);
}

// The worst error of `out` against start + a b over the sum of the products' magnitudes, all in double.
[[nodiscard]] double worst_error(const Operand& a, const Operand& b, const std::vector<float>& out,
                                 float start, Precision precision) {
  double worst = 0;
  for (Index i = 0; i < a.rows; ++i)
    for (Index j = 0; j < b.columns; ++j) {
      double sum = double(start), magnitude = std::abs(sum);
      for (Index k = 0; k < a.columns; ++k) {
        const double term = operand(a(i, k), precision) * operand(b(k, j), precision);
        sum += term;
        magnitude += std::abs(term);
      }
      worst = std::max(worst, std::abs(double(out[std::size_t(i * b.columns + j)]) - sum) /
                                  std::max(magnitude, 1e-30));
    }
  return worst;
}

}  // namespace

TEST_CASE("multiply() agrees with plain loops over operands as each precision rounds them") {
  // Depths with a remainder of one number, and depths that need a second block; columns within a vector and beyond panels.
  // More depth than rows takes another loop over both, with two blocks at 310 rows.
  const Index m = GENERATE(5, 12, 97, 310), n = GENERATE(1, 8, 33, 130),
              depth = GENERATE(1, 7, 64, 301);
  const bool a_by_columns = GENERATE(false, true), b_by_columns = GENERATE(false, true);
  const Operand a(m, depth, a_by_columns, 1), b(depth, n, b_by_columns, 2);
  for (const Precision precision : {Precision::storage, Precision::mixed}) {
    Context<float> c;
    c.precision = precision;
    CAPTURE(m, n, depth, a_by_columns, b_by_columns, precision == Precision::mixed);
    // Each of depth + 1 additions rounds once.
    const double bound = double(depth + 2) * 0x1p-24;
    std::vector<float> out(std::size_t(m * n), 3.0F);
    multiply<float>(c, depth, a.factor(), b.factor(), {out.data(), m, n}, Into::add);
    CHECK(worst_error(a, b, out, 3.0F, precision) < bound);
    const std::vector<float> bias(std::size_t(n), 0.5F);
    multiply<float>(c, depth, a.factor(), b.factor(), {out.data(), m, n}, Into::overwrite,
                    bias.data());
    CHECK(worst_error(a, b, out, 0.5F, precision) < bound);
  }
}

TEST_CASE("a product has the same bits for any number of threads and walk") {
  // More depth than rows, and as many rows twice.
  const Index depth = 300;
  const Operand half(203, depth, false, 1), b(depth, 1100, true, 2);
  Operand whole = half;
  whole.rows *= 2;
  whole.numbers.insert(whole.numbers.end(), half.numbers.begin(), half.numbers.end());
  const std::vector<float> bias(1100, 0.25F);
  for (const Precision precision : {Precision::storage, Precision::mixed}) {
    std::vector<float> first;
    for (const int threads : {1, 2, 3, 8})
      for (const Operand* a : {&half, &static_cast<const Operand&>(whole)}) {
        Context<float> c;
        c.precision = precision;
        c.threads = threads;
        std::vector<float> out(std::size_t(a->rows * b.columns));
        const MatrixView<float> view{out.data(), a->rows, b.columns};
        multiply<float>(c, depth, a->factor(), b.factor(), view, Into::overwrite, bias.data());
        multiply<float>(c, depth, a->factor(), b.factor(), view, Into::add);
        if (first.empty()) first = out;
        for (std::size_t at = 0; at < out.size(); at += first.size())
          CHECK(std::equal(first.begin(), first.end(), out.begin() + std::ptrdiff_t(at)));
      }
  }
}

TEST_CASE("a product of few rows keeps its operands in float") {
  const Operand a(2, 40, false, 1), b(40, 24, true, 2);
  Context<float> c;
  c.precision = Precision::mixed;
  std::vector<float> out(std::size_t(a.rows * b.columns));
  multiply<float>(c, a.columns, a.factor(), b.factor(), {out.data(), a.rows, b.columns});
  CHECK(worst_error(a, b, out, 0, Precision::storage) < 42 * 0x1p-24);
}

TEST_CASE("products in double refuse bfloat16") {
  Context<double> c;
  c.precision = Precision::mixed;
  const std::vector<double> ones(64, 1.0);
  std::vector<double> out(64);
  const Factor<double> square{ones.data(), 8, 1};
  CHECK(heed_test::message_of([&] {
          multiply<double>(c, 8, square, square, {out.data(), 8, 8});
        }) ==
        "multiply: the precision is mixed, which is for products in float; this one is in double");
}
