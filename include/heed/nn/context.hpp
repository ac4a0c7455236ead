// SPDX-License-Identifier: Apache-2.0
#pragma once

// Context: the threads, the mode, the random numbers and the scratch memory with which layers run.

#include <heed/nn/matrix.hpp>
#include <heed/nn/spread_tokens.hpp>
#include <heed/simd/precision.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The tokens of a batch that this process computes, where processes share a batch; each has whole sequences. The part has
// the random numbers that these tokens have in the whole batch, and the gradients of the parts add up to that of the whole.
struct BatchPart {
  Index first = 0, count = 0,
        all = 0;      // tokens [first, first + count) of `all`; count = 0: all of them
  Index targets = 0;  // targets of the whole batch that count in the loss

  [[nodiscard]] bool whole() const { return count == 0; }
};

// A model has one context, which its layers use in turn: two calls with one context must not run at the same time.
template <class Real>
struct Context {
  int threads = 0;         // 0: the default of Options; results do not depend on it
  bool training = false;   // true switches on dropout and updates of memories
  std::uint64_t seed = 0;  // seed of all random numbers of a run
  std::uint64_t step = 0;  // number of the training step; each has its own random numbers
  BatchPart part;          // in training: the part of the batch that forward and backward compute
  // Precision of the products of layers and of attention, for float alone; weights, norms and sums
  // stay float. Backward needs the same as forward.
  Precision precision = {};
  // Null, or the first rows of packed sequences and the end of the last: 0, ..., rows. Sequences
  // follow each other without padding, each from position 0 on. Forward and backward then have a
  // batch of 1. The list must live as long as these calls run.
  const std::vector<Index>* packed = nullptr;
  // Null, or the ranks over which the tokens of each sequence are spread: rows are then the tokens of this rank, and `part`
  // must name the sequences. It must live as long as forward and backward run.
  const SpreadTokens* spread = nullptr;
  // Empty, or called before each product of layers. It may throw, which ends a pass early: the pass's results and
  // gradients, and the numbers that layers keep for backward, then mean nothing; weights do not change.
  std::function<void()> before_product = {};
  Matrix<Real> packed_factors;      // scratch memory of multiply()
  Matrix<BfloatPair> packed_pairs;  // the same with Precision::mixed

  // The number of row r in the whole batch. Rows may be several copies of the tokens, one below the other.
  [[nodiscard]] Index row_of_batch(Index r) const {
    if (part.whole()) return r;
    const Index tokens = own_tokens(), t = r % tokens;
    const Index of_part = spread ? t / spread->held() * spread->len() +
                                       spread->tokens[std::size_t(t % spread->held())]
                                 : t;
    return r / tokens * part.all + part.first + of_part;
  }
  // The number of rows of the whole batch where this process has `own` rows.
  [[nodiscard]] Index rows_of_batch(Index own) const {
    return part.whole() ? own : own / own_tokens() * part.all;
  }

 private:
  // Number of tokens of the part that are in this process.
  [[nodiscard]] Index own_tokens() const {
    return spread ? part.count / spread->len() * spread->held() : part.count;
  }
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
