// SPDX-License-Identifier: Apache-2.0
// The order in which backward visits heads, and the orders in which it adds their terms to rows of keys and to the parameters.

#include "catch.hpp"

#include <heed/core/random.hpp>
#include <heed/engine/op_vjps.hpp>
#include <heed/engine/ordered_sums.hpp>

#include <atomic>
#include <chrono>
#include <cmath>
#include <limits>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

using namespace heed;
using heed::detail::OrderedSums;
using heed::detail::Passage;
using heed::detail::TileGates;
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

TEST_CASE("visitors add to each strip of a tile in their order") {
  using Sum = TileGates::Sum;
  const CounterRandom random(11);
  constexpr Index tiles = 5, tile_keys = 60;
  for (const VisitingOrder& order : kOrders) {
    // A few visitors add to nothing, some to a stretch of tiles.
    const auto tiles_of = [&](const VisitingOrder::Visit& v) {
      const std::uint64_t id = std::uint64_t(v.family * order.turns() + v.turn);
      const Index from = Index(random.bits(2 * id) % tiles),
                  to = from + Index(random.bits(2 * id + 1) % std::uint64_t(tiles + 1 - from));
      return from < to ? KeyRange{from, to} : KeyRange{};
    };
    for (const int workers : {1, 2, 3, 5, 5, 5}) {
      INFO("families " << order.families() << ", workers " << workers);
      TileGates gates(order, tiles, tile_keys, workers);
      // Turns of those who added, [family][tile][sum][key].
      std::vector<std::vector<Index>> added(std::size_t(order.families() * tiles * 2 * tile_keys));
      Visits visits(order);
      run_workers(workers, [&](int) {
        Passage passage(gates);
        Index family = Visits::kNone;
        while (const auto v = visits.next(family)) {
          const KeyRange span = tiles_of(*v);
          passage.begin(*v, span);
          for (Index t = span.begin; t < span.end; ++t) {
            passage.enter(t);
            // Each third visitor adds to a part of the tile, each second one passes strips at once.
            const Index skipped = v->turn % 3 == 0 ? 17 : 0;
            for (const Sum sum : {Sum::keys, Sum::values})
              passage.add(sum, {t * tile_keys + skipped, (t + 1) * tile_keys}, v->turn % 2 == 0,
                          [&](const KeyRange& part) {
                            const Index row = (v->family * tiles + t) * 2 + Index(sum);
                            for (Index j = part.begin; j < part.end; ++j)
                              added[std::size_t(row * tile_keys + skipped + j)].push_back(v->turn);
                            std::this_thread::yield();
                          });
            passage.leave();
          }
        }
      });
      for (Index f = 0; f < order.families(); ++f)
        for (Index t = 0; t < tiles; ++t)
          for (Index j = 0; j < tile_keys; ++j) {
            std::vector<Index> expected;
            for (Index turn = 0; turn < order.turns(); ++turn) {
              const KeyRange span = tiles_of(order.visit(f, turn));
              if (span.begin <= t && t < span.end && (j >= 17 || turn % 3 != 0))
                expected.push_back(turn);
            }
            for (Index sum = 0; sum < 2; ++sum)
              CHECK(added[std::size_t(((f * tiles + t) * 2 + sum) * tile_keys + j)] == expected);
          }
    }
  }
}

TEST_CASE("a visitor that adds to no tile of another's waits for nobody") {
  const VisitingOrder order{1, 1, 4, 1, 1};
  TileGates gates(order, 2, 12, 1);
  std::vector<Passage> passages(4, Passage(gates));
  const auto begin = [&](Index turn, const KeyRange& tiles) {
    passages[std::size_t(turn)].begin(order.visit(0, turn), tiles);
  };
  const auto pass = [&](Index turn, Index tile) {
    passages[std::size_t(turn)].enter(tile);
    passages[std::size_t(turn)].leave();
  };
  begin(0, {0, 2});
  begin(1, {0, 1});
  begin(2, {1, 2});
  begin(3, {0, 1});
  // Had one of them to wait for a visitor that has still to come, the test would not end.
  pass(0, 0);
  pass(1, 0);
  pass(3, 0);
  pass(0, 1);
  pass(2, 1);
}

TEST_CASE("ordered sums have the same bits for any number of workers") {
  const CounterRandom random(7);
  constexpr Index numbers = 3;
  for (const VisitingOrder& order : kOrders) {
    std::vector<double> expected;
    for (const int workers : {1, 2, 3, 4, 4, 4, 4}) {
      INFO("families " << order.families() << ", workers " << workers);
      OrderedSums sums(order, workers, OrderedSums::early_for(workers), numbers);
      Visits visits(order);
      std::vector<std::atomic<Index>> come(std::size_t(order.families()));
      std::atomic<bool> in_turn{true};  // did all come so that had to?
      run_workers(workers, [&](int w) {
        Index family = Visits::kNone;
        while (const auto v = visits.next(family)) {
          const std::uint64_t id = std::uint64_t(v->family * order.turns() + v->turn);
          for (std::uint64_t wait = random.bits(id + 1000 * std::uint64_t(w)) % 64; wait > 0;
               --wait)
            std::this_thread::yield();
          const bool must = v->turn % 3 == 0;
          sums.add(*v, must, [&](double* to) {
            if (come[std::size_t(v->family)]++ < v->turn && must) in_turn = false;
            for (Index n = 0; n < numbers; ++n)
              to[n] += std::exp(20 * random.normal(id * numbers + std::uint64_t(n)));
          });
        }
      });
      CHECK(in_turn);
      if (workers == 1) expected = sums.total();
      CHECK(sums.total() == expected);
    }
  }
}

TEST_CASE("a visitor leaves its terms and goes; one that must come in turn waits") {
  const VisitingOrder order{1, 1, 3, 1, 1};
  OrderedSums sums(order, 1, 2, 1);
  const auto add = [&](Index turn, double term) {
    sums.add(order.visit(0, turn), false, [&](double* to) { to[0] += term; });
  };
  add(1, -1e100);
  add(2, 1);
  CHECK(sums.total()[0] == 0);
  add(0, 1e100);
  CHECK(sums.total()[0] == 1);  // (1e100 - 1e100) + 1
}

TEST_CASE("families join the total in their order, whoever ends first") {
  const VisitingOrder order{1, 3, 1, 1, 1};
  OrderedSums sums(order, 3, 2, 1);
  const auto add = [&](Index family, double term) {
    sums.add(order.visit(family, 0), false, [&](double* to) { to[0] += term; });
  };
  add(1, -1e100);
  add(2, 1);
  CHECK(sums.total()[0] == 0);
  add(0, 1e100);
  CHECK(sums.total()[0] == 1);  // (1e100 - 1e100) + 1
}

TEST_CASE("a family waits until the one that had its place is part of the total") {
  const VisitingOrder order{1, 2, 2, 1, 1};  // two families of two turns
  OrderedSums sums(order, 1, 2, 1);
  std::atomic<bool> first_ends{false}, waited{false};
  sums.add(order.visit(0, 0), false, [](double* to) { to[0] += 1; });
  std::thread second(
      [&] { sums.add(order.visit(1, 0), false, [&](double*) { waited = first_ends.load(); }); });
  // Time for the second family to add, if nothing holds it.
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  first_ends = true;
  sums.add(order.visit(0, 1), false, [](double* to) { to[0] += 1; });
  second.join();
  CHECK(waited);
  CHECK(sums.total()[0] == 2);
}

TEMPLATE_TEST_CASE("terms of single numbers among zeros are added, wherever they are", "", float,
                   double) {
  const Index count = 3 * kLanes<TestType> + 1;
  for (Index at = 0; at < count; ++at)
    for (const TestType term : {TestType(0.5), std::numeric_limits<TestType>::quiet_NaN()}) {
      std::vector<TestType> terms(std::size_t(count), TestType(0));
      terms[std::size_t(at)] = term;
      std::vector<double> sums(std::size_t(count), 1.0);
      heed::detail::add_terms(terms.data(), count, sums.data());
      for (Index i = 0; i < count; ++i) {
        const double sum = sums[std::size_t(i)], wanted = i == at ? 1 + double(term) : 1;
        CHECK((sum == wanted || (std::isnan(sum) && std::isnan(wanted))));
      }
    }
}
