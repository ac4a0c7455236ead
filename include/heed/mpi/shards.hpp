// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shards: the tokens of a sequence that each rank has. Every rank computes the same plan.
//
//   contiguous   rank r has piece r of W                                    a a b b c c d d
//   zigzag       rank r has pieces r and 2 W - 1 - r of 2 W                 a b c d d c b a
//
// Under a causal mask a query costs as much as it has keys before it: the last contiguous shard
// costs nearly twice the mean, while all zig-zag shards cost the same up to a step. A rank's
// tensors hold its pieces one behind the other, in the order of their tokens.
//
// Pieces are cut at multiples of a step, share_step() of the call (engine/doors.hpp), and at the
// end of the sequence, so that tokens which one process computes together stay together. Pieces
// differ by one step at most; with fewer steps than pieces some are empty.

#include <heed/core/error.hpp>

#include <algorithm>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

// Tokens [begin, end).
struct Tokens {
  Index begin = 0, end = 0;
  bool operator==(const Tokens&) const = default;
  [[nodiscard]] Index count() const { return end - begin; }
};

class Shards {
 public:
  // A plan without tokens and ranks.
  Shards() = default;

  [[nodiscard]] static Shards contiguous(Index len, int ranks, Index step = 1) {
    return {len, ranks, step, 1};
  }
  [[nodiscard]] static Shards zigzag(Index len, int ranks, Index step = 1) {
    return {len, ranks, step, 2};
  }

  [[nodiscard]] Index len() const { return len_; }
  [[nodiscard]] int ranks() const { return int(pieces_.size()); }
  // The pieces of a rank, in the order of their tokens; none is empty.
  [[nodiscard]] const std::vector<Tokens>& pieces(int rank) const {
    return pieces_[std::size_t(rank)];
  }
  // Number of tokens of a rank.
  [[nodiscard]] Index held(int rank) const {
    Index sum = 0;
    for (const Tokens& piece : pieces(rank)) sum += piece.count();
    return sum;
  }
  bool operator==(const Shards&) const = default;

 private:
  Shards(Index len, int ranks, Index step, Index per_rank)
      : len_(len), pieces_(std::size_t(ranks > 0 ? ranks : 0)) {
    require(len >= 0 && ranks > 0 && step > 0, "heed::mpi::Shards: len is ", len, ", ranks are ",
            ranks, ", step is ", step, "; len must not be negative, the others must be positive");
    const Index steps = (len + step - 1) / step, count = per_rank * ranks;
    const auto cut = [&](Index n) { return std::min(len, n * steps / count * step); };
    for (Index n = 0; n < count; ++n) {
      const Tokens piece{cut(n), cut(n + 1)};
      const Index rank = n < ranks ? n : count - 1 - n;
      std::vector<Tokens>& own = pieces_[std::size_t(rank)];
      if (piece.count() == 0) continue;
      if (!own.empty() && own.back().end == piece.begin)
        own.back().end = piece.end;  // the pieces in the middle meet
      else
        own.push_back(piece);
    }
  }

  Index len_ = 0;
  std::vector<std::vector<Tokens>> pieces_;  // [rank]
};

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
