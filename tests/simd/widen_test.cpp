// SPDX-License-Identifier: Apache-2.0
// 16-bit numbers: all of them to float and back, and the rounding of floats, against Eigen's conversions.

#include <heed/simd/widen.hpp>

#include <Eigen/Core>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "catch.hpp"

using heed::Index;

namespace {

template <class Narrow>
struct Peer;
template <>
struct Peer<heed::bfloat16> {
  using Type = Eigen::bfloat16;
};
template <>
struct Peer<heed::half> {
  using Type = Eigen::half;
};

// True if `got` means the same number as Eigen's `wanted`; any NaN equals any other.
[[nodiscard]] bool same(float got, float wanted) {
  return std::isnan(wanted)
             ? std::isnan(got)
             : std::bit_cast<std::uint32_t>(got) == std::bit_cast<std::uint32_t>(wanted);
}

// The numbers of 16 bits in order of their bits.
template <class Narrow>
[[nodiscard]] std::vector<Narrow> all_numbers() {
  std::vector<Narrow> all;
  for (std::uint32_t bits = 0; bits < 65536; ++bits)
    all.push_back(std::bit_cast<Narrow>(std::uint16_t(bits)));
  return all;
}

// Floats around every bound of rounding: all signs and exponents, with fractions at and beside the ties of both formats.
[[nodiscard]] std::vector<float> floats_of_all_kinds() {
  std::vector<std::uint32_t> fractions;
  for (const std::uint32_t base :
       {0U, 1U << 13, 1U << 16, 3U << 13, 3U << 16, 0x7FE000U, 0x7F0000U})
    for (const std::uint32_t tie : {0U, 1U << 12, 1U << 15})
      for (const std::uint32_t beside : {0U, 1U, 0x7FFFFFU})
        fractions.push_back((base + tie + beside) & 0x7FFFFFU);
  std::vector<float> all;
  for (std::uint32_t upper = 0; upper < 512; ++upper)  // sign and exponent
    for (const std::uint32_t fraction : fractions)
      all.push_back(std::bit_cast<float>(upper << 23 | fraction));
  // Floats that become subnormal halves, with every bit of their size.
  for (std::uint32_t size = 0x33000000U; size < 0x38800000U; size += 997)
    all.push_back(std::bit_cast<float>(size));
  return all;
}

}  // namespace

TEMPLATE_TEST_CASE("every 16-bit number widens to the float of its value, and comes back",
                   "[widen]", heed::bfloat16, heed::half) {
  const std::vector<TestType> all = all_numbers<TestType>();
  std::vector<float> wide(all.size());
  std::vector<double> wider(all.size());
  widen(all.data(), Index(all.size()), wide.data());
  widen(all.data(), Index(all.size()), wider.data());
  std::vector<TestType> back(all.size());
  narrow(wide.data(), Index(wide.size()), back.data());
  Index wrong = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const float wanted = float(std::bit_cast<typename Peer<TestType>::Type>(all[i]));
    wrong += !same(wide[i], wanted) + !same(float(all[i]), wanted) + !same(float(wider[i]), wanted);
    wrong += !same(float(back[i]), wanted);
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("a float narrows to the nearest 16-bit number, ties to even", "[widen]",
                   heed::bfloat16, heed::half) {
  const std::vector<float> all = floats_of_all_kinds();
  std::vector<TestType> narrowed(all.size());
  narrow(all.data(), Index(all.size()), narrowed.data());
  Index wrong = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const float wanted = float(typename Peer<TestType>::Type(all[i]));
    wrong += !same(float(narrowed[i]), wanted) + !same(float(TestType(all[i])), wanted);
  }
  CHECK(wrong == 0);
}

TEMPLATE_TEST_CASE("rows of any length and place are converted, and nothing beside them", "[widen]",
                   heed::bfloat16, heed::half) {
  constexpr Index most = 3 * heed::kLanes<float> + 2;
  for (Index count = 0; count <= most; ++count)
    for (const Index first : {0, 1}) {
      std::vector<TestType> from(std::size_t(most + 2), TestType(3.0f)), back(from);
      std::vector<float> to(std::size_t(most + 2), 7.0f);
      for (Index i = 0; i < count; ++i) from[std::size_t(first + i)] = TestType(float(i) - 4.0f);
      widen(from.data() + first, count, to.data() + first);
      narrow(to.data() + first, count, back.data() + first);
      for (Index i = 0; i < most + 2; ++i) {
        const bool inside = i >= first && i < first + count;
        CHECK(to[std::size_t(i)] == (inside ? float(i - first) - 4.0f : 7.0f));
        CHECK(float(back[std::size_t(i)]) == (inside ? float(i - first) - 4.0f : 3.0f));
      }
    }
}
