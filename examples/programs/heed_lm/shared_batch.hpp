// SPDX-License-Identifier: Apache-2.0
#pragma once

// A batch of training that ranks share (training.hpp, train()).

#include "../program/ranks.hpp"
#include "checkpoint.hpp"
#include "text_batch.hpp"

#include <algorithm>
#include <span>

namespace heed_lm {

[[nodiscard]] inline Index count_targets(std::span<const Index> targets) {
  return Index(targets.size()) - std::count(targets.begin(), targets.end(), kNoTarget);
}

// Sets the context to the sequences of `batch` as long as this object lives.
class Packed {
 public:
  Packed(heed::nn::Context<float>& context, const Packing& batch) : context_(context) {
    context.packed = batch.packed();
  }
  ~Packed() { context_.packed = nullptr; }
  Packed(const Packed&) = delete;

 private:
  heed::nn::Context<float>& context_;
};

// The mean loss of the batch. One process packs it; several ranks share its rows with their padding: each group of
// `context_ranks` neighbouring ranks has whole rows, and the ranks of a group share the tokens of each row, in zig-zag
// shards (heed/mpi/shards.hpp). The weights' gradients become that of the batch, with the same bits on all ranks. If the
// loss is not finite, it is not finite on all ranks, and the gradients mean nothing. If context.before_product throws
// PassStopped (training.hpp) on one rank, all ranks throw it; with context_ranks it must not throw.
[[nodiscard]] double shared_gradient(Model& model, heed::nn::Context<float>& context,
                                     const Batch& batch, heed_program::Ranks& ranks,
                                     int context_ranks = 1);

// Throws std::invalid_argument, on all ranks, unless this many ranks can share the batches of the
// run, which have rows of `len` tokens.
void require_shareable(Run& run, Index len, const heed_program::Ranks& ranks,
                       int context_ranks = 1);
// Throws std::invalid_argument, on all ranks, unless all have the weights, moments, settings,
// steps, data and groups of rank 0.
void require_same_run(Run& run, std::uint64_t data, heed_program::Ranks& ranks,
                      int context_ranks = 1);

}  // namespace heed_lm
