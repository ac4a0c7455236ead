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

// Which tokens of a batch a model computes where processes share a batch, each with whole sequences of its own. The random
// numbers of the part are those that these tokens have in the whole batch, and its gradients add up to that of the whole.
struct BatchPart {
  Index first = 0, count = 0,
        all = 0;      // tokens [first, first + count) of `all`; count = 0: all of them
  Index targets = 0;  // of the whole batch, those that count in the loss

  [[nodiscard]] bool whole() const { return count == 0; }
};

// A model has one context, which its layers use in turn: two calls with one context must not run at the same time.
template <class Real>
struct Context {
  int threads = 0;         // 0: the default of Options; results do not depend on it
  bool training = false;   // true switches on dropout and updates of memories
  std::uint64_t seed = 0;  // of all random numbers of a run
  std::uint64_t step = 0;  // number of the training step; each has its own random numbers
  BatchPart part;          // of forward and backward in training
  // Of the products of layers and of attention, in float alone; weights, norms and what is added up stay float. Backward
  // needs the same as forward.
  Precision precision = {};
  // Null, or where the sequences of packed rows begin, 0, ..., rows: one behind the other without padding, each from position
  // 0 on. Forward and backward then have a batch of 1. It must live as long as these calls run.
  const std::vector<Index>* packed = nullptr;
  // Null, or the ranks over which the tokens of each sequence are spread: rows are then those of this rank, and `part` must say
  // which sequences they are. It must live as long as forward and backward run.
  const SpreadTokens* spread = nullptr;
  // Empty, or called before each product of layers. It may throw, which ends a pass early: the pass's results, gradients
  // included, and what layers keep of it for backward are then of no use; weights are as they were.
  std::function<void()> before_product = {};
  Matrix<Real> packed_factors;      // scratch memory of multiply()
  Matrix<BfloatPair> packed_pairs;  // the same with Precision::mixed

  // The number that row r has in the whole batch. Rows may be several copies of the tokens, one below the other.
  [[nodiscard]] Index row_of_batch(Index r) const {
    if (part.whole()) return r;
    const Index tokens = own_tokens(), t = r % tokens;
    const Index of_part = spread ? t / spread->held() * spread->len() +
                                       spread->tokens[std::size_t(t % spread->held())]
                                 : t;
    return r / tokens * part.all + part.first + of_part;
  }
  // How many rows the whole batch has where this process has so many.
  [[nodiscard]] Index rows_of_batch(Index own) const {
    return part.whole() ? own : own / own_tokens() * part.all;
  }

 private:
  // Those of the part that this process has.
  [[nodiscard]] Index own_tokens() const {
    return spread ? part.count / spread->len() * spread->held() : part.count;
  }
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
