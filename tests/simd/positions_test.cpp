// SPDX-License-Identifier: Apache-2.0
// Vectors of positions compared with whole numbers, lane by lane.

#include "catch.hpp"

#include <heed/core/random.hpp>
#include <heed/simd/positions.hpp>

#include <algorithm>
#include <limits>
#include <vector>

using namespace heed;

namespace {

constexpr std::int32_t kLeast = std::numeric_limits<std::int32_t>::min(),
                       kMost = std::numeric_limits<std::int32_t>::max();

// Numbers of all sizes, and those at the ends.
[[nodiscard]] Positions random_positions(RandomSequence& random) {
  Positions p;
  for (int k = 0; k < Positions::width; ++k) {
    const Index size = Index(1) << random.below(31);
    const std::int32_t ends[] = {kLeast, kLeast + 1, -1, 0, 1, kMost};
    p.v[k] =
        random.below(8) == 0 ? ends[random.below(6)] : std::int32_t(random.below(2 * size) - size);
  }
  return p;
}
[[nodiscard]] std::int32_t wrapped(std::int64_t x) { return std::int32_t(std::uint32_t(x)); }

}  // namespace

TEST_CASE("positions calculate as whole numbers do") {
  RandomSequence random(4);
  Index wrong = 0;
  for (int n = 0; n < 20000; ++n) {
    const Positions a = random_positions(random), b = random_positions(random);
    const Positions sum = a + b, difference = a - b, product = a * b, quotient = a / b,
                    rest = a % b, least = min(a, b), most = max(a, b), negative = -a,
                    size = absolute(a);
    const std::uint32_t less = (a < b).bits(), at_most = (a <= b).bits(), equal = (a == b).bits(),
                        both = ((a < b) & (a > Positions(7))).bits(),
                        either = ((a < b) | !(a != b) | (a >= kMost)).bits();
    for (int k = 0; k < Positions::width; ++k) {
      const std::int64_t x = a.lane(k), y = b.lane(k);
      wrong += sum.lane(k) != wrapped(x + y);
      wrong += difference.lane(k) != wrapped(x - y);
      wrong += product.lane(k) != wrapped(x * y);
      if (!(x == kLeast && y == -1)) {  // the quotient of these two is no number of 32 bits
        wrong += quotient.lane(k) != (y == 0 ? 0 : x / y);
        wrong += rest.lane(k) != (y == 0 ? 0 : x % y);
      }
      wrong += least.lane(k) != std::min(x, y);
      wrong += most.lane(k) != std::max(x, y);
      wrong += negative.lane(k) != wrapped(-x);
      wrong += size.lane(k) != wrapped(std::abs(x));
      wrong += (less >> k & 1) != (x < y);
      wrong += (at_most >> k & 1) != (x <= y);
      wrong += (equal >> k & 1) != (x == y);
      wrong += (both >> k & 1) != (x < y && x > 7);
      wrong += (either >> k & 1) != (x <= y || x == kMost);
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("a number beyond 32 bits compares as the nearest one that fits") {
  const Positions near = kMost - 1;
  const std::uint32_t all = Seen(true).bits();
  CHECK((near < (Index(1) << 40)).bits() == all);
  CHECK((near > -(Index(1) << 40)).bits() == all);
  CHECK((near < std::uint64_t(-1)).bits() == all);
  CHECK(Seen(false).bits() == 0);
}

TEST_CASE("positions are read from memory lane by lane") {
  std::vector<std::int32_t> numbers;
  for (std::int32_t n = 0; n < 100; ++n) numbers.push_back(3 * n - 50);
  const Positions at = (Positions::iota() * 7 + 3) % 100, read = gather(numbers.data(), at);
  for (int k = 0; k < Positions::width; ++k) CHECK(read.lane(k) == 3 * at.lane(k) - 50);
}
