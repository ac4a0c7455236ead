// SPDX-License-Identifier: Apache-2.0
// Pairs of bfloat16: every rounding against scalar models that are written here a second time, and products against
// plain loops, bit by bit.
#include <heed/simd/bfloat_pairs.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"
#include "simd/numbers.hpp"

#include <bit>
#include <cmath>

using heed::BfloatPair;
using heed::Broadcast;
using heed::Index;
using heed::Pack;
using heed::Store;
using heed_test::Guarded;

namespace {

constexpr Index W = heed::kLanes<float>;

// Bit patterns: of ordinary floats, of all exponents, and of the numbers at which rules change.
[[nodiscard]] std::vector<float> numbers(Index count, std::uint64_t seed) {
  const std::uint32_t edges[] = {0x00000000, 0x80000000, 0x00000001, 0x007FFFFF, 0x807FFFFF,
                                 0x00800000, 0x80800000, 0x00808000, 0x00818000, 0x3F800000,
                                 0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF, 0x7F7F0000,
                                 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000,
                                 0xFF800000, 0x7FC00000, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF};
  const heed::CounterRandom random(seed);
  std::vector<float> list;
  for (std::uint64_t i = 0; Index(list.size()) < count; ++i) {
    const std::uint64_t bits = random.bits(i);
    if (i % 4 == 0)
      list.push_back(std::bit_cast<float>(edges[bits % std::size(edges)]));
    else if (i % 4 == 1)
      list.push_back(std::bit_cast<float>(std::uint32_t(bits)));
    else
      list.push_back(float(4 * random.uniform(i) - 2));
  }
  return list;
}

[[nodiscard]] float without_subnormals(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x;
}

// The nearest number of 8 bits; a tie goes to the one whose last bit is 0.
[[nodiscard]] float model_rounded(float x) {
  x = without_subnormals(x);
  if (x == 0 || !std::isfinite(x)) return x;
  int exponent = 0;
  const double fraction = std::frexp(double(x), &exponent) * 256;  // in [128, 256)
  double whole = std::floor(fraction);
  const double rest = fraction - whole;
  if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)) whole += 1;
  return float(std::ldexp(whole, exponent - 8));  // infinite where it is 2^128
}

[[nodiscard]] float first_of(BfloatPair p) { return std::bit_cast<float>(p.bits << 16); }
[[nodiscard]] float second_of(BfloatPair p) { return std::bit_cast<float>(p.bits & 0xFFFF0000U); }

// Arm's instruction rounds sums to odd and adds both products at once.
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kOddSums = true;
#else
constexpr bool kOddSums = false;
#endif

template <class Real>
[[nodiscard]] bool is_odd(Real x) {
  using Bits = std::conditional_t<sizeof(Real) == 4, std::uint32_t, std::uint64_t>;
  return (std::bit_cast<Bits>(x) & 1) != 0;
}
// x + y: exact, or that of the two doubles beside it whose last bit is 1.
[[nodiscard]] double odd_double(double x, double y) {
  const double sum = x + y;
  if (!std::isfinite(sum)) return sum;
  const double from_y = sum - x, rest = (x - (sum - from_y)) + (y - from_y);
  return rest == 0 || is_odd(sum) ? sum : std::nextafter(sum, rest > 0 ? HUGE_VAL : -HUGE_VAL);
}
// The same of floats. What lies below the normal numbers is 0.
[[nodiscard]] float model_odd_sum(double x, double y) {
  const double sum = odd_double(x, y);
  if (!std::isfinite(sum)) return float(sum);
  if (std::abs(sum) >= 0x1p128) return std::copysign(HUGE_VALF, float(sum));
  if (std::abs(sum) < 0x1p-126) return std::copysign(0.0F, float(sum));
  float nearest = float(sum);
  if (std::abs(double(nearest)) > std::abs(sum)) nearest = std::nextafter(nearest, 0.0F);
  return double(nearest) == sum || is_odd(nearest)
             ? nearest
             : std::nextafter(nearest, std::copysign(HUGE_VALF, nearest));
}

// a * b + sum, rounded once. It takes no std::fma: mingw's overflows where only a part of the sum does.
[[nodiscard]] float model_fma(float a, float b, float sum) {
  const double product = double(without_subnormals(a)) * double(without_subnormals(b));
  return without_subnormals(float(odd_double(product, double(without_subnormals(sum)))));
}

[[nodiscard]] float model_add(BfloatPair a, BfloatPair b, float sum) {
  if constexpr (kOddSums) {
    const auto product = [](float x, float y) {
      return model_odd_sum(double(without_subnormals(x)) * double(without_subnormals(y)), -0.0);
    };
    const float both =
        model_odd_sum(product(first_of(a), first_of(b)), product(second_of(a), second_of(b)));
    return model_odd_sum(without_subnormals(sum), both);
  }
  return model_fma(first_of(a), first_of(b), model_fma(second_of(a), second_of(b), sum));
}

// True for the same bits, or two NaN.
[[nodiscard]] bool same(float a, float b) {
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

[[nodiscard]] std::vector<BfloatPair> random_pairs(Index count, std::uint64_t seed) {
  const std::vector<float> from = heed_test::random_numbers<float>(2 * count, seed);
  std::vector<BfloatPair> pairs;
  for (std::size_t i = 0; i < from.size(); i += 2)
    pairs.push_back(heed::pair_of(from[i], from[i + 1]));
  return pairs;
}

}  // namespace

TEST_CASE("a float is rounded to the nearest bfloat16, subnormal ones to 0", "[bfloat_pairs]") {
  const std::vector<float> list = numbers(40 * W * 100, 1);
  Index wrong = 0, wrong_lanes = 0, wrong_pairs = 0;
  double largest = 0;
  for (std::size_t i = 0; i < list.size(); i += std::size_t(W)) {
    const Pack<float> rounded = heed::rounded_to_bfloat(Pack<float>::load(&list[i]));
    for (int lane = 0; lane < W; ++lane) {
      const float x = list[i + std::size_t(lane)], model = model_rounded(x);
      wrong += !same(heed::rounded_to_bfloat(x), model);
      wrong_lanes += !same(rounded.lane(lane), model);
      const BfloatPair pair = heed::pair_of(x, -x);
      wrong_pairs += !same(first_of(pair), model) || !same(second_of(pair), -model);
      if (std::isfinite(model) && std::abs(x) >= 0x1p-126F)
        largest = std::max(largest, std::abs(double(model) - double(x)) / std::abs(double(x)));
    }
  }
  CHECK(wrong == 0);
  CHECK(wrong_lanes == 0);
  CHECK(wrong_pairs == 0);
  CHECK(largest <= heed::kBfloatRoundoff / (1 + heed::kBfloatRoundoff));
  CHECK(largest > 0.99 * heed::kBfloatRoundoff / (1 + heed::kBfloatRoundoff));
}

TEST_CASE("a product of pairs adds both products, with the roundings of its formula",
          "[bfloat_pairs]") {
  using E = heed::detail::Elements<BfloatPair>;
  const Index count = 20000 * W;
  const std::vector<float> a = numbers(2 * count, 2), b = numbers(2 * count, 3),
                           c = numbers(count, 4);
  Index wrong = 0, ordered = 0;
  for (Index i = 0; i < count; i += W) {
    BfloatPair left[std::size_t(W)], right[std::size_t(W)];
    for (Index lane = 0; lane < W; ++lane) {
      // Subnormal bfloat16 as well, which rounding never leaves.
      const auto pair = [&](const std::vector<float>& from) {
        const auto bits = [&](Index n) {
          return std::bit_cast<std::uint32_t>(from[std::size_t(n)]) >> 16;
        };
        return BfloatPair{bits(2 * (i + lane)) | bits(2 * (i + lane) + 1) << 16};
      };
      left[lane] = pair(a);
      right[lane] = pair(b);
    }
    for (int lane = 0; lane < W; ++lane) {
      const Pack<float> sum = E::add_product(E::broadcast(left[lane]), E::load(right),
                                             Pack<float>::load(&c[std::size_t(i)]).v);
      const float before = c[std::size_t(i + lane)];
      const float model = model_add(left[lane], right[lane], before);
      // Within 2^-149 of the smallest normal number the two ways may differ.
      const bool at_edge = std::abs(std::abs(model) - 0x1p-126F) <= 0x1p-149F;
      wrong += !same(sum.lane(lane), model) && !at_edge;
      const BfloatPair swapped[] = {{left[lane].bits << 16 | left[lane].bits >> 16},
                                    {right[lane].bits << 16 | right[lane].bits >> 16}};
      ordered += !same(model_add(swapped[0], swapped[1], before), model);
    }
  }
  CHECK(wrong == 0);
  CHECK((kOddSums ? ordered == 0 : ordered > 1000));  // the order of the two shows in the last bit
}

TEST_CASE("a product with a large exponent overflows before the sum is taken on Arm alone",
          "[bfloat_pairs]") {
  using E = heed::detail::Elements<BfloatPair>;
  const BfloatPair a = heed::pair_of(0.0F, 0x1p64F), b = heed::pair_of(0.0F, 0x1p64F);
  const Pack<float> sum =
      E::add_product(E::broadcast(a), E::broadcast(b), Pack<float>(-0x1p127F).v);
  CHECK(sum.lane(0) == (kOddSums ? HUGE_VALF : 0x1p127F));
}

TEST_CASE("numbers are paired along columns and along rows, with 0 behind odd counts",
          "[bfloat_pairs]") {
  for (const Index rows : {1, 2, 3, 6, 7})
    for (const Index columns : {1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 67, 129}) {
      const Index stride = columns + 3, along = heed::pairs_of(columns) + 2, across = columns + 1;
      const std::vector<float> from = numbers(rows * stride, 5);
      std::vector<BfloatPair> by_columns(std::size_t(rows * along), {7}),
          by_rows(std::size_t(heed::pairs_of(rows) * across), {7});
      heed::pair_columns(from.data(), stride, rows, columns, by_columns.data(), along);
      heed::pair_rows(from.data(), stride, rows, columns, by_rows.data(), across);
      const auto at = [&](Index r, Index c) {
        return r < rows && c < columns ? model_rounded(from[std::size_t(r * stride + c)]) : 0.0F;
      };
      const auto is = [](BfloatPair pair, float first, float second) {
        return same(first_of(pair), first) && same(second_of(pair), second);
      };
      Index wrong = 0;
      for (Index r = 0; r < rows; ++r)
        for (Index k = 0; k < along; ++k) {
          const BfloatPair pair = by_columns[std::size_t(r * along + k)];
          wrong += k < heed::pairs_of(columns) ? !is(pair, at(r, 2 * k), at(r, 2 * k + 1))
                                               : pair.bits != 7;
        }
      for (Index k = 0; k < heed::pairs_of(rows); ++k)
        for (Index c = 0; c < across; ++c) {
          const BfloatPair pair = by_rows[std::size_t(k * across + c)];
          wrong += c < columns ? !is(pair, at(2 * k, c), at(2 * k + 1, c)) : pair.bits != 7;
        }
      INFO(rows << " rows, " << columns << " columns");
      CHECK(wrong == 0);
    }
}

TEST_CASE("what is not finite among pairs is found and cleared, nothing else", "[bfloat_pairs]") {
  constexpr Index C = heed::kLanes<float> + 3, gap = 2, count = 6 * C;  // a whole vector and a rest
  const float bad[] = {heed::kInfinity<float>, -heed::kInfinity<float>,
                       std::numeric_limits<float>::quiet_NaN(), 0x1.FFp127F};
  for (const float x : bad)
    for (Index at = 0; at < count; ++at) {
      float rows[6][C] = {};
      for (Index i = 0; i < count; ++i)
        rows[i / C][i % C] = i % 3 == 0 ? 0x1.FEp127F : float(i) - 7;
      BfloatPair pairs[3][C + gap];
      heed::pair_rows(rows[0], C, 6, C, pairs[0], C + gap);
      for (auto& row : pairs) row[C] = row[C + 1] = heed::pair_of(x, x);
      CHECK(heed::all_finite(pairs[0], C + gap, 3, C));
      rows[at / C][at % C] = x;
      heed::pair_rows(rows[0], C, 6, C, pairs[0], C + gap);
      CHECK_FALSE(heed::all_finite(pairs[0], C + gap, 3, C));
      heed::clear_non_finite(pairs[0], C + gap, 3, C);
      Index wrong = 0;
      for (Index i = 0; i < count; ++i) {
        const BfloatPair pair = pairs[i / C / 2][i % C];
        const float has = i / C % 2 == 0 ? first_of(pair) : second_of(pair);
        wrong += !same(has, i == at ? 0.0F : model_rounded(rows[i / C][i % C]));
      }
      CHECK(wrong == 0);
    }
}

TEST_CASE("panel_gemm of pairs has the bits of plain loops in every width, mode, size and stride",
          "[bfloat_pairs]") {
  const std::vector<BfloatPair> left = random_pairs(4000, 6);
  struct Walk {
    Index row, depth;
  };
  for (int vectors = 1; vectors <= heed::kPanelVectors; ++vectors)
    for (const Walk walk : {Walk{19, 1}, Walk{1, 40}})
      for (const Index depth : {0, 1, 5, 12})
        for (const Index rows : {0, 1, 2, 3, 5, 6, 7, 11, 12, 13, 23, 25}) {
          const Index columns = vectors * W, b_row = columns + depth % 3, c_row = columns + 2;
          const std::vector<BfloatPair> right = random_pairs(depth * b_row + columns, 7);
          const std::vector<float> before = heed_test::random_numbers<float>(rows * c_row, 8);
          const auto plain = [&](Index i, Index c, float sum) {
            for (Index k = 0; k < depth; ++k)
              sum = model_add(left[std::size_t(i * walk.row + k * walk.depth)],
                              right[std::size_t(k * b_row + c)], sum);
            return sum;
          };
          const auto wrong = [&](Store store, float* maxima) {
            Guarded<float> out(rows * c_row, 0.0F);
            std::copy(before.begin(), before.end(), out.data());
            heed::panel_gemm(store, rows, depth, vectors,
                             Broadcast<BfloatPair>{left.data(), walk.row, walk.depth}, right.data(),
                             b_row, out.data(), c_row, maxima);
            Index count = !out.margins_are_untouched();
            for (Index i = 0; i < rows; ++i)
              for (Index c = 0; c < c_row; ++c) {
                const float had = before[std::size_t(i * c_row + c)], has = out[i * c_row + c];
                const float wanted =
                    c >= columns ? had : plain(i, c, store == Store::add ? had : 0.0F);
                count += !same(has, wanted);
                if (maxima && c < columns) count += !(maxima[c] >= has);
              }
            return count;
          };
          std::vector<float> maxima(std::size_t(columns), -heed::kInfinity<float>);
          INFO(vectors << " vectors, " << rows << " rows, depth " << depth << ", row stride "
                       << walk.row);
          CHECK(wrong(Store::add, nullptr) == 0);
          CHECK(wrong(Store::overwrite, nullptr) == 0);
          CHECK(wrong(Store::overwrite_and_max, maxima.data()) == 0);
        }
}

TEST_CASE("gemm_add of pairs adds to any number of columns, and touches no other",
          "[bfloat_pairs]") {
  const std::vector<BfloatPair> left = random_pairs(400, 9);
  for (const Index columns : {1, 3, 8, 15, 16, 17, 31, 33, 65, 71})
    for (const Index rows : {1, 5, 13}) {
      constexpr Index depth = 12;
      const Index b_row = heed::whole_vectors<float>(columns), c_row = columns + 3;
      const std::vector<BfloatPair> right = random_pairs(depth * b_row, 10);
      const std::vector<float> before = heed_test::random_numbers<float>(rows * c_row, 11);
      Guarded<float> out(rows * c_row, 0.0F);
      std::copy(before.begin(), before.end(), out.data());
      heed::gemm_add(rows, depth, columns, Broadcast<BfloatPair>{left.data(), 19, 1}, right.data(),
                     b_row, out.data(), c_row);
      Index wrong = !out.margins_are_untouched();
      for (Index i = 0; i < rows; ++i)
        for (Index c = 0; c < c_row; ++c) {
          float wanted = before[std::size_t(i * c_row + c)];
          for (Index k = 0; k < depth && c < columns; ++k)
            wanted =
                model_add(left[std::size_t(i * 19 + k)], right[std::size_t(k * b_row + c)], wanted);
          wrong += !same(out[i * c_row + c], wanted);
        }
      INFO(rows << " rows, " << columns << " columns");
      CHECK(wrong == 0);
    }
}
