// SPDX-License-Identifier: Apache-2.0
// In which order backward visits heads, and in which it adds what they give to the parameters.

#include "catch.hpp"

#include <heed/core/random.hpp>
#include <heed/engine/visiting_order.hpp>

#include <set>
#include <thread>
#include <tuple>
#include <vector>

using namespace heed;
using heed::detail::OrderedSums;
using heed::detail::VisitingOrder;

namespace {

// Batches, heads, groups, batches and heads of a family.
const VisitingOrder kOrders[] = {{1, 1, 1, 1, 1}, {2, 3, 4, 1, 1}, {3, 4, 5, 1, 2},
                                 {4, 6, 2, 4, 1}, {2, 6, 3, 2, 6}, {5, 7, 3, 1, 1}};

[[nodiscard]] VisitingOrder in_waves(VisitingOrder order, Index wave) {
  order.wave = std::min(wave, order.families());
  return order;
}
[[nodiscard]] Index units_of(const VisitingOrder& order) {
  return order.batches * order.heads * order.groups;
}

}  // namespace

TEST_CASE("waves of any size visit every group once, each family by rank") {
  for (const VisitingOrder& plain : kOrders)
    for (const Index wave : {1, 2, 3, 5, 64}) {
      const VisitingOrder order = in_waves(plain, wave);
      INFO("families " << order.families() << ", wave " << order.wave);
      std::set<std::tuple<Index, Index, Index>> seen;
      std::vector<Index> rank(std::size_t(order.families()), 0);
      Index finished = 0;
      for (Index unit = 0; unit < units_of(order); ++unit) {
        const VisitingOrder::Visit v = order.visit(unit);
        CHECK(seen.emplace(v.batch, v.head, v.group).second);
        CHECK(v.batch < order.batches);
        CHECK(v.head < order.heads);
        CHECK(v.group < order.groups);
        CHECK(v.family == v.batch / order.family_batches * (order.heads / order.family_heads) +
                              v.head / order.family_heads);
        CHECK(v.rank == rank[std::size_t(v.family)]++);
        CHECK(v.family < finished + order.wave);  // no family is opened early
        while (finished < order.families() && rank[std::size_t(finished)] == order.ranks())
          ++finished;
      }
      CHECK(Index(seen.size()) == units_of(order));
    }
}

TEST_CASE("what a rank stands for does not depend on the size of waves") {
  for (const VisitingOrder& plain : kOrders) {
    std::set<std::tuple<Index, Index, Index, Index, Index>> of_one_wave;
    for (const Index wave : {1, 2, 3, 64}) {
      const VisitingOrder order = in_waves(plain, wave);
      std::set<std::tuple<Index, Index, Index, Index, Index>> visits;
      for (Index unit = 0; unit < units_of(order); ++unit) {
        const VisitingOrder::Visit v = order.visit(unit);
        visits.emplace(v.family, v.rank, v.batch, v.head, v.group);
      }
      if (wave == 1) of_one_wave = visits;
      CHECK(visits == of_one_wave);
    }
  }
}

TEST_CASE("ordered sums have the same bits for waves of any size and any number of workers") {
  const CounterRandom random(7);
  constexpr Index numbers = 3;
  for (const VisitingOrder& plain : kOrders) {
    std::vector<double> expected;
    for (const int workers : {1, 2, 3, 4, 4, 4, 4}) {
      const VisitingOrder order = in_waves(plain, workers);
      INFO("families " << order.families() << ", workers " << workers);
      OrderedSums sums(order, numbers);
      Dispenser dispenser(units_of(order));
      run_workers(workers, [&](int) {
        for (Index unit = dispenser.next(); unit >= 0; unit = dispenser.next()) {
          const VisitingOrder::Visit v = order.visit(unit);
          const std::uint64_t id = std::uint64_t(v.family * order.ranks() + v.rank);
          for (std::uint64_t wait = random.bits(unit + 1000 * workers) % 8; wait > 0; --wait)
            std::this_thread::yield();
          sums.add(v, [&](double* to) {
            for (Index n = 0; n < numbers; ++n)
              to[n] += std::exp(20 * random.normal(id * numbers + std::uint64_t(n)));
          });
        }
      });
      if (workers == 1) expected = sums.total();
      CHECK(sums.total() == expected);
    }
  }
}
