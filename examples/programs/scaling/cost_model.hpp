// SPDX-License-Identifier: Apache-2.0
#pragma once

// The time of one causal attention call whose sequence is divided among ranks, by simulation of events.
//
// Work      4 d numbers per visible pair and head in forward, 10 d in backward (its own products and forward's, again).
// Shards    zig-zag: rank r of n has chunks r and 2 n - 1 - r of 2 n, so that all ranks have the same number of visible
//           pairs; or contiguous: rank r has tokens [r T / n, (r + 1) T / n).
// Messages  each occupies the sender's and the receiver's port for overhead + bytes / bandwidth, and is there `latency` later.
//           A rank computes while its ports are busy.
//
//   gather         forward: keys and values go around a ring of ranks, n - 1 messages one after another, then each rank
//                  computes. backward: it computes, then the gradients of keys and values go around and are added up.
//   ring           a rank computes with the block of keys that it has while the next one comes; forward passes a block on
//                  as soon as it arrives. backward passes the block's gradients on, after the work that adds to them.
//   head-parallel  all-to-all: each rank gets all tokens of its heads, computes, and gives the outputs back; backward the
//                  same with gradients. If ranks do not divide heads, some ranks have more of them; more ranks than heads
//                  cannot take part. Keys of a group go to each rank that has one of the group's queries.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <queue>
#include <stdexcept>
#include <string>
#include <vector>

namespace scaling {

using Count = std::int64_t;

struct Problem {
  Count len = 131072, heads = 32, kv_heads = 8, dim = 128;
  int bytes = 4;         // size of a number
  bool backward = true;  // forward and backward, or forward alone
  bool zigzag = true;
};

struct Machine {
  double flops = 1e11;      // per second, of one rank
  double call = 0;          // seconds that each call of the engine takes before its first pair
  double latency = 5e-6;    // seconds
  double overhead = 1e-6;   // seconds of a port per message
  double bandwidth = 1e10;  // per second and direction, of one rank
};

enum class Method { gather, ring, heads };
inline constexpr Method kMethods[] = {Method::gather, Method::ring, Method::heads};
[[nodiscard]] inline const char* name_of(Method method) {
  return method == Method::gather ? "gather" : method == Method::ring ? "ring" : "head-parallel";
}

// Pairs that rank `reader`'s queries see among rank `owner`'s keys, of one head.
[[nodiscard]] double visible_pairs(const Problem& problem, int ranks, int reader, int owner);

struct Times {
  double total = 0;    // seconds until the last rank is done
  double compute = 0;  // seconds in which the busiest rank computes
  double memory =
      0;  // bytes of keys and values, their gradients included, that a rank holds at most
};
// The times; none if the method cannot use so many ranks.
[[nodiscard]] std::optional<Times> simulate(Method method, const Problem& problem,
                                            const Machine& machine, int ranks);

}  // namespace scaling
