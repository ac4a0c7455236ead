// SPDX-License-Identifier: Apache-2.0

// The cost model of heed_scaling against closed forms in its limits.

#include "catch.hpp"

#include "scaling/cost_model.hpp"

#include <cmath>

namespace {

using namespace scaling;

[[nodiscard]] double forward_seconds(const Problem& p, const Machine& machine) {
  const double len = double(p.len);
  return 4 * len * (len + 1) / 2 * double(p.heads * p.dim) / machine.flops;
}
// The work of forward, and of backward if the problem has it.
[[nodiscard]] double work_of(const Problem& p, const Machine& machine) {
  return forward_seconds(p, machine) * (p.backward ? 3.5 : 1);
}
[[nodiscard]] Machine without_network() {
  Machine machine;
  machine.latency = machine.overhead = 0;
  machine.bandwidth = 1e300;
  return machine;
}
[[nodiscard]] Times times_of(Method method, const Problem& p, const Machine& machine, int ranks) {
  const std::optional<Times> times = simulate(method, p, machine, ranks);
  REQUIRE(times.has_value());
  return *times;
}
// Bytes of keys and values of a shard.
[[nodiscard]] double shard_bytes(const Problem& p, int ranks) {
  return double(p.len) / ranks * 2 * double(p.kv_heads * p.dim) * p.bytes;
}

}  // namespace

TEST_CASE("One rank takes the time of its work, whatever the network") {
  Machine slow;
  slow.latency = 1;
  slow.bandwidth = 1;
  for (const bool backward : {false, true})
    for (const Method method : kMethods) {
      INFO(name_of(method) << backward);
      const Problem p{4096, 8, 2, 64, 4, backward, true};
      const Times times = times_of(method, p, slow, 1);
      CHECK(times.total == Approx(work_of(p, slow)).epsilon(1e-9));
      CHECK(times.compute == Approx(times.total).epsilon(1e-9));
    }
}

TEST_CASE("Shards see all causal pairs once, and zig-zag gives each rank as many") {
  for (const bool zigzag : {false, true})
    for (const int ranks : {1, 2, 4, 16}) {
      const Problem p{4096, 8, 2, 64, 4, true, zigzag};
      double all = 0, least = 1e300, most = 0;
      for (int reader = 0; reader < ranks; ++reader) {
        double own = 0;
        for (int owner = 0; owner < ranks; ++owner) own += visible_pairs(p, ranks, reader, owner);
        all += own;
        least = std::min(least, own);
        most = std::max(most, own);
      }
      CHECK(all == Approx(4096.0 * 4097 / 2).epsilon(1e-12));
      if (zigzag) CHECK(most == Approx(least).epsilon(1e-12));
      // The last of n contiguous shards sees (2 n - 1) / n^2 of all pairs.
      if (!zigzag) CHECK(most / all == Approx((2.0 * ranks - 1) / ranks / ranks).epsilon(1e-2));
    }
}

TEST_CASE("Without a network n ranks take an n-th of the time") {
  const Machine machine = without_network();
  for (const bool backward : {false, true})
    for (const int ranks : {2, 8, 32}) {
      const Problem p{65536, 32, 32, 64, 4, backward, true};
      const double ideal = work_of(p, machine) / ranks;
      INFO(ranks << " ranks");
      for (const Method method : {Method::gather, Method::heads})
        CHECK(times_of(method, p, machine, ranks).total == Approx(ideal).epsilon(1e-9));
      // A block of the ring is one n-th of a rank's work except for the diagonal, which differs by half a token.
      const double ring = times_of(Method::ring, p, machine, ranks).total;
      CHECK(ring >= ideal * (1 - 1e-9));
      CHECK(ring <= ideal * (1 + 2e-2));
    }
}

TEST_CASE(
    "Contiguous shards make the gather as slow as its last rank, and the ring nearly twice as "
    "slow") {
  const Machine machine = without_network();
  const int ranks = 16;
  Problem p{65536, 8, 8, 64, 4, false, true};
  const double balanced = work_of(p, machine) / ranks;
  p.zigzag = false;
  const double slowest = (2.0 * ranks - 1) / ranks;
  CHECK(times_of(Method::gather, p, machine, ranks).total ==
        Approx(slowest * balanced).epsilon(1e-3));
  CHECK(times_of(Method::ring, p, machine, ranks).total ==
        Approx(slowest * balanced).epsilon(1e-3));
}

TEST_CASE("Without work, messages take their closed forms") {
  Machine machine;
  machine.flops = 1e300;
  machine.latency = 3e-6;
  machine.overhead = 2e-6;
  machine.bandwidth = 1e9;
  for (const int ranks : {2, 4, 8}) {
    const Problem p{8192, 8, 4, 64, 4, false, true};
    const double step =
        machine.latency + machine.overhead + shard_bytes(p, ranks) / machine.bandwidth;
    CHECK(times_of(Method::gather, p, machine, ranks).total ==
          Approx((ranks - 1) * step).epsilon(1e-9));
    CHECK(times_of(Method::ring, p, machine, ranks).total ==
          Approx((ranks - 1) * step).epsilon(1e-9));
    // backward: gradients go around once more in the gather; in the ring they travel with their
    // block, and end at its owner.
    Problem both = p;
    both.backward = true;
    CHECK(times_of(Method::gather, both, machine, ranks).total ==
          Approx(2 * (ranks - 1) * step).epsilon(1e-9));
    const double home =
        machine.latency + machine.overhead + 2 * shard_bytes(p, ranks) / machine.bandwidth;
    CHECK(times_of(Method::ring, both, machine, ranks).total ==
          Approx((ranks - 1) * step + ranks * home).epsilon(1e-9));
    // n - 1 messages from each port one behind the other, in and out; two query heads share keys.
    const double most = 8.0 / ranks, groups = std::ceil(4.0 / ranks), row = 64 * 4,
                 tokens = 8192.0 / ranks;
    const auto all_to_all = [&](double heads) {
      return (ranks - 1) * (machine.overhead + tokens * heads * row / machine.bandwidth) +
             machine.latency;
    };
    const double forward = all_to_all(most + 2 * groups) + all_to_all(most);
    CHECK(times_of(Method::heads, p, machine, ranks).total == Approx(forward).epsilon(1e-9));
    CHECK(times_of(Method::heads, both, machine, ranks).total == Approx(2 * forward).epsilon(1e-9));
  }
}

TEST_CASE("The ring hides messages that are shorter than the work, and waits for longer ones") {
  Machine machine;
  machine.latency = machine.overhead = 0;
  const int ranks = 8;
  const Problem p{65536, 8, 8, 64, 4, false, true};
  const double work = work_of(p, machine) / ranks, block = work / ranks;
  machine.bandwidth = shard_bytes(p, ranks) / (0.5 * block);
  const double hidden = times_of(Method::ring, p, machine, ranks).total;
  CHECK(hidden <= work * 1.02);
  CHECK(times_of(Method::gather, p, machine, ranks).total ==
        Approx(work + (ranks - 1) * 0.5 * block).epsilon(1e-6));
  machine.bandwidth = shard_bytes(p, ranks) / (4 * block);
  CHECK(times_of(Method::ring, p, machine, ranks).total ==
        Approx((ranks - 1) * 4 * block + block).epsilon(2e-2));
}

TEST_CASE(
    "Head-parallel needs as many heads as ranks, and the rank with most heads sets its time") {
  const Machine machine = without_network();
  const Problem p{4096, 6, 6, 64, 4, false, true};
  CHECK_FALSE(simulate(Method::heads, p, machine, 7).has_value());
  CHECK(times_of(Method::heads, p, machine, 4).total ==
        Approx(work_of(p, machine) * 2 / 6).epsilon(1e-9));
}

TEST_CASE("The ring holds a number of tokens that falls with the ranks, the gather all of them") {
  const Machine machine;
  const Problem p{65536, 8, 8, 64, 4, false, true};
  const double all = shard_bytes(p, 1);
  for (const int ranks : {4, 64, 1024}) {
    CHECK(times_of(Method::gather, p, machine, ranks).memory == Approx(all).epsilon(1e-12));
    CHECK(times_of(Method::ring, p, machine, ranks).memory ==
          Approx(2 * all / ranks).epsilon(1e-12));
  }
}
