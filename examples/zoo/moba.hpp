// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mixture of block attention: each query reads its own block of keys and the blocks whose mean key fits it best.
//
//   s_ib  = q_i . (mean of the keys of block b)              s_ib = infinity for the block in which i lies
//   B_i   = the 4 blocks of 64 keys with the largest s_ib    among those of which i sees a key
//   out_i = attention over the visible keys of B_i
//
// The choice is a constant for the gradients. It costs one score a block and query.
//
// Source  E. Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs (2025), equations 2 to 7, causal there, with 3 to
//         12 blocks of 512 to 4096 keys. A causal mask hides later blocks here, too; without one they are candidates.

#include "kit.hpp"

#include <heed/measure/select.hpp>

#include <limits>

namespace zoo::moba {

template <class T>
using Op = heed::ScaledDot<T>;

inline constexpr Index kBlock = 64, kBlocks = 4;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:moba",
          "4 blocks of 64 keys",
          g,
          {},
          {},
          nullptr,
          [](const auto& in, const auto& mask, const auto& options) {
            return heed::block_lists<T>(heed::select_blocks(in, mask, kBlock, kBlocks, options));
          }};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  Numbers scores;  // of all blocks that the row sees
  for (std::size_t j = 0; j < row.keys.size();) {
    const std::ptrdiff_t block = row.positions[j] / kBlock;
    double sum = 0, keys = 0;
    for (; j < row.keys.size() && row.positions[j] / kBlock == block; ++j, ++keys)
      sum += dot(row.query, row.keys[j]);
    const bool own = block == row.position / kBlock;
    scores.push_back(own ? std::numeric_limits<double>::infinity() : sum / keys);
  }
  const PlainRow seen = row.largest(kBlocks, kBlock, scores);
  return mixed(seen, softmax(logits(seen)));
}

}  // namespace zoo::moba
