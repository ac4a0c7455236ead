// SPDX-License-Identifier: Apache-2.0
#include "cost_model.hpp"

namespace scaling {

namespace {

constexpr double kForwardFlops = 4, kBackwardFlops = 10;  // per pair, head and column

// Tokens [begin, end).
struct Chunk {
  double begin, end;
};

// The tokens of a rank, in fractions of tokens if ranks do not divide them.
[[nodiscard]] std::vector<Chunk> shard_of(const Problem& p, int ranks, int rank) {
  const double len = double(p.len);
  if (!p.zigzag) return {{len * rank / ranks, len * (rank + 1) / ranks}};
  const int chunks = 2 * ranks, other = chunks - 1 - rank;
  return {{len * rank / chunks, len * (rank + 1) / chunks},
          {len * other / chunks, len * (other + 1) / chunks}};
}

// Pairs (i, j) with j <= i, of chunks that are the same or do not overlap.
[[nodiscard]] double causal_pairs(const Chunk& queries, const Chunk& keys) {
  const double rows = queries.end - queries.begin, columns = keys.end - keys.begin;
  if (keys.begin >= queries.end) return 0;
  if (keys.end <= queries.begin) return rows * columns;
  return rows * (rows + 1) / 2;
}

// Ports of all ranks. Messages must be sent in the order of the times at which they are ready.
class Network {
 public:
  Network(const Machine& machine, int ranks)
      : machine_(machine), out_(std::size_t(ranks), 0.0), in_(std::size_t(ranks), 0.0) {}

  // The arrival time of a message that is ready to be sent at `ready`.
  [[nodiscard]] double send(int from, int to, double bytes, double ready) {
    double &out = out_[std::size_t(from)], &in = in_[std::size_t(to)];
    const double start = std::max({ready, out, in}),
                 busy = machine_.overhead + bytes / machine_.bandwidth;
    out = in = start + busy;
    return start + busy + machine_.latency;
  }

 private:
  const Machine& machine_;
  std::vector<double> out_, in_;
};

struct Event {
  double time;
  int rank, block;  // the block'th block of the rank, its own being 0
  enum Kind { arrived, computed } kind;
  [[nodiscard]] bool operator>(const Event& other) const {
    if (time != other.time) return time > other.time;
    return rank != other.rank ? rank > other.rank : block > other.block;
  }
};
using Events = std::priority_queue<Event, std::vector<Event>, std::greater<>>;

class Simulation {
 public:
  Simulation(const Problem& problem, const Machine& machine, int ranks)
      : p_(problem), machine_(machine), ranks_(ranks) {}

  [[nodiscard]] Times gather() const {
    const double shard = shard_bytes();
    Times times;
    times.memory = shard * ranks_ * (p_.backward ? 2 : 1);
    const std::vector<double> there = around(std::vector<double>(std::size_t(ranks_), 0.0), shard);
    std::vector<double> done(there);
    for (int r = 0; r < ranks_; ++r) {
      double pairs = 0;
      for (int owner = 0; owner < ranks_; ++owner) pairs += visible_pairs(p_, ranks_, r, owner);
      const double work = seconds(pairs, p_.heads, kForwardFlops) +
                          (p_.backward ? seconds(pairs, p_.heads, kBackwardFlops) : 0);
      times.compute = std::max(times.compute, work);
      done[std::size_t(r)] += work;
    }
    if (p_.backward) done = around(done, shard);
    times.total = *std::max_element(done.begin(), done.end());
    return times;
  }

  [[nodiscard]] Times ring() const {
    Times times;
    const int blocks = ranks_ > 1 ? 2 : 1;  // one at work, one on its way
    times.memory = shard_bytes() * blocks * (p_.backward ? 2 : 1);
    times.total = ring_pass(kForwardFlops, false, 0, times.compute);
    if (p_.backward) {
      double compute = 0;
      times.total = ring_pass(kBackwardFlops, true, times.total, compute);
      times.compute += compute;
    }
    return times;
  }

  [[nodiscard]] std::optional<Times> heads() const {
    if (ranks_ > p_.heads) return std::nullopt;
    const Count group = p_.heads / p_.kv_heads, most = (p_.heads + ranks_ - 1) / ranks_;
    const double tokens = double(p_.len) / ranks_, row = double(p_.dim) * p_.bytes;
    // Groups that a rank with `most` heads reads; a rank that begins within a group may read one more.
    const Count groups = std::min(p_.kv_heads, most % group == 0 ? most / group : most / group + 1);
    const double in = tokens * double(most + 2 * groups) * row, out = tokens * double(most) * row;
    double pairs = double(p_.len) * (double(p_.len) + 1) / 2;
    Times times;
    times.compute = seconds(pairs, most, kForwardFlops);
    double now = exchange(0, in) + times.compute;
    now = exchange(now, out);
    if (p_.backward) {
      const double work = seconds(pairs, most, kBackwardFlops);
      now = exchange(now, out) + work;  // exchange of out; the other tensors are still there
      now = exchange(now, in);          // exchange of queries, keys and values
      times.compute += work;
    }
    times.memory = double(p_.len) * 2 * double(groups) * row * (p_.backward ? 2 : 1);
    times.total = now;
    return times;
  }

 private:
  // Bytes of keys and values of a shard.
  [[nodiscard]] double shard_bytes() const {
    return double(p_.len) / ranks_ * 2 * double(p_.kv_heads) * double(p_.dim) * p_.bytes;
  }
  [[nodiscard]] double seconds(double pairs, Count heads, double flops) const {
    return pairs > 0 ? machine_.call + pairs * double(heads * p_.dim) * flops / machine_.flops : 0;
  }

  // The time of n - 1 turns in which each rank passes on what it got last. Returns the time at
  // which each rank has all blocks.
  [[nodiscard]] std::vector<double> around(const std::vector<double>& ready, double bytes) const {
    std::vector<double> done(ready);
    Network network(machine_, ranks_);
    Events events;
    for (int r = 0; r < ranks_; ++r) events.push({ready[std::size_t(r)], r, 0, Event::arrived});
    // Invariant: events come in the order of time; rank r has `block` + 1 shards at the time of its arrival.
    while (!events.empty()) {
      const Event event = events.top();
      events.pop();
      done[std::size_t(event.rank)] = std::max(done[std::size_t(event.rank)], event.time);
      if (event.block + 1 == ranks_) continue;
      const int next = (event.rank + 1) % ranks_;
      events.push({network.send(event.rank, next, bytes, event.time), next, event.block + 1,
                   Event::arrived});
    }
    return done;
  }

  // All ranks start at `start`. With `behind`, a block is passed on, and its gradients with it,
  // when its work is done, and returns to its owner at the end; otherwise it is passed on as soon
  // as it arrives. Returns the time at which the last rank is done.
  [[nodiscard]] double ring_pass(double flops, bool behind, double start, double& longest) const {
    Network network(machine_, ranks_);
    const auto n = std::size_t(ranks_);
    const double bytes = shard_bytes() * (behind ? 2 : 1);
    std::vector<int> there(n, 0),
        next(n, 0);  // blocks that have arrived, and blocks whose work has begun
    std::vector<char> working(n, 0);
    std::vector<double> compute(n, 0.0);
    double end = start;
    Events events;
    const auto begin_work = [&](int r, double now) {
      const auto at = std::size_t(r);
      if (working[at] || next[at] == there[at]) return;
      const int owner = (r - next[at] + ranks_) % ranks_;
      const double work = seconds(visible_pairs(p_, ranks_, r, owner), p_.heads, flops);
      compute[at] += work;
      working[at] = 1;
      events.push({now + work, r, next[at]++, Event::computed});
    };
    const auto hand_on = [&](const Event& event) {
      const bool home = event.block + 1 == ranks_;
      if (ranks_ == 1 || (home && !behind)) return;
      const int to = (event.rank + 1) % ranks_;
      const double arrival = network.send(event.rank, to, bytes, event.time);
      if (home)
        end = std::max(end, arrival);
      else
        events.push({arrival, to, event.block + 1, Event::arrived});
    };
    for (int r = 0; r < ranks_; ++r) events.push({start, r, 0, Event::arrived});
    // Invariant: a rank works on one block at a time, in the order in which they arrive.
    while (!events.empty()) {
      const Event event = events.top();
      events.pop();
      end = std::max(end, event.time);
      if (event.kind == Event::arrived)
        ++there[std::size_t(event.rank)];
      else
        working[std::size_t(event.rank)] = 0;
      if ((event.kind == Event::arrived) != behind) hand_on(event);
      begin_work(event.rank, event.time);
    }
    longest = *std::max_element(compute.begin(), compute.end());
    return end;
  }

  // The time of an all-to-all of `bytes` per kind of row and rank: a message to each other rank, in
  // turns without contention.
  [[nodiscard]] double exchange(double now, double bytes) const {
    Network network(machine_, ranks_);
    double end = now;
    for (int turn = 1; turn < ranks_; ++turn)
      for (int r = 0; r < ranks_; ++r)
        end = std::max(end, network.send(r, (r + turn) % ranks_, bytes, now));
    return end;
  }

  const Problem& p_;
  const Machine& machine_;
  int ranks_;
};

}  // namespace

double visible_pairs(const Problem& problem, int ranks, int reader, int owner) {
  double pairs = 0;
  for (const Chunk& queries : shard_of(problem, ranks, reader))
    for (const Chunk& keys : shard_of(problem, ranks, owner)) pairs += causal_pairs(queries, keys);
  return pairs;
}

std::optional<Times> simulate(Method method, const Problem& problem, const Machine& machine,
                              int ranks) {
  const Simulation simulation(problem, machine, ranks);
  if (method == Method::gather) return simulation.gather();
  if (method == Method::ring) return simulation.ring();
  return simulation.heads();
}

}  // namespace scaling
