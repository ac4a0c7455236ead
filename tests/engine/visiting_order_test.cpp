// SPDX-License-Identifier: Apache-2.0
// The order in which backward visits heads, and the order in which it adds their terms to the parameters.

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
using heed::detail::Visits;

namespace {

// Batches, heads, groups, batches and heads of a family.
const VisitingOrder kOrders[] = {{1, 1, 1, 1, 1}, {2, 3, 4, 1, 1}, {3, 4, 5, 1, 2},
                                 {4, 6, 2, 4, 1}, {2, 6, 3, 2, 6}, {5, 7, 3, 1, 1}};

}  // namespace

TEST_CASE("workers in any number take every group once, each family by rank") {
  const CounterRandom random(3);
  std::uint64_t drawn = 0;
  for (const VisitingOrder& order : kOrders)
    for (const std::size_t workers : {1u, 2u, 3u, 5u, 64u}) {
      INFO("families " << order.families() << ", workers " << workers);
      std::set<std::tuple<Index, Index, Index>> seen;
      std::vector<Index> rank(std::size_t(order.families()), 0);
      std::vector<Index> family(workers, Visits::kNone);
      std::set<std::size_t> busy;
      for (std::size_t w = 0; w < workers; ++w) busy.insert(w);
      Visits visits(order);
      while (!busy.empty()) {
        const std::size_t w = *std::next(
            busy.begin(), std::ptrdiff_t(random.bits(drawn++) % std::uint64_t(busy.size())));
        const Index before = family[w];
        const bool is_left = before != Visits::kNone && rank[std::size_t(before)] < order.turns();
        const auto v = visits.next(family[w]);
        if (!v) {
          CHECK(!is_left);
          busy.erase(w);
          continue;
        }
        CHECK(seen.emplace(v->batch, v->head, v->group).second);
        CHECK(v->batch < order.batches);
        CHECK(v->head < order.heads);
        CHECK(v->group < order.groups);
        CHECK(v->family == family[w]);
        CHECK(v->family == v->batch / order.family_batches * (order.heads / order.family_heads) +
                               v->head / order.family_heads);
        CHECK(v->turn == rank[std::size_t(v->family)]++);
        if (is_left) CHECK(v->family == before);  // a worker stays with its family
      }
      CHECK(Index(seen.size()) == order.batches * order.heads * order.groups);
    }
}

TEST_CASE("ordered sums have the same bits for any number of workers") {
  const CounterRandom random(7);
  constexpr Index numbers = 3;
  for (const VisitingOrder& order : kOrders) {
    std::vector<double> expected;
    for (const int workers : {1, 2, 3, 4, 4, 4, 4}) {
      INFO("families " << order.families() << ", workers " << workers);
      OrderedSums sums(order, workers, numbers);
      Visits visits(order);
      run_workers(workers, [&](int w) {
        Index family = Visits::kNone;
        while (const auto v = visits.next(family)) {
          const std::uint64_t id = std::uint64_t(v->family * order.turns() + v->turn);
          for (std::uint64_t wait = random.bits(id + 1000 * std::uint64_t(w)) % 64; wait > 0;
               --wait)
            std::this_thread::yield();
          sums.add(*v, [&](double* to) {
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
