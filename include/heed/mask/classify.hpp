// SPDX-License-Identifier: Apache-2.0
#pragma once

// Classifies the blocks of a rule by asking it about all pairs: once where all batches and heads
// see the same, else for each batch or head that may differ.

#include <heed/core/parallel.hpp>
#include <heed/mask/pair_rule.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Blocks of 16 queries and 64 keys, or larger ones where these would be more than kMostBlocks.
inline constexpr Index kQueryBlock = 16, kKeyBlock = 64;

inline void size_blocks(PairBlocks& blocks, const Geometry& g) {
  const auto pieces = [](Index length, Index block) { return (length + block - 1) / block; };
  blocks.query_block = kQueryBlock;
  blocks.key_block = kKeyBlock;
  while (true) {
    blocks.query_blocks = pieces(g.len_q, blocks.query_block);
    blocks.key_blocks = pieces(g.len_kv, blocks.key_block);
    const double all = double(blocks.batch * blocks.heads) * double(blocks.query_blocks) *
                       double(blocks.key_blocks);
    if (all <= double(kMostBlocks) || blocks.query_blocks * blocks.key_blocks <= 1) return;
    (blocks.query_block < blocks.key_block ? blocks.query_block : blocks.key_block) *= 2;
  }
}

// The kinds of one row of blocks.
inline void classify_row(const PairFunction& pairs, const Geometry& g, const PairBlocks& blocks,
                         Index b, Index h, Index q, TileKind* kinds) {
  std::vector<char> any(std::size_t(blocks.key_blocks), 0), all(any.size(), 1);
  std::uint64_t words[kQueryBlock * kRuleWords];
  const Index end = std::min((q + 1) * blocks.query_block, g.len_q);
  for (Index i = q * blocks.query_block; i < end; i += kQueryBlock)
    for (Index j = 0; j < g.len_kv; j += kRuleKeys) {
      const PairBlock at{
          b, h, i, std::min(kQueryBlock, end - i), j, std::min(kRuleKeys, g.len_kv - j)};
      pairs.fill(at, words);
      for (Index w = 0; w * 64 < at.keys; ++w) {
        std::uint64_t some = 0, every = ~std::uint64_t(0);
        for (Index r = 0; r < at.rows; ++r) {
          some |= words[r * kRuleWords + w];
          every &= words[r * kRuleWords + w];
        }
        const auto block = std::size_t((j + w * 64) / blocks.key_block);
        const std::uint64_t keys =
            ~std::uint64_t(0) >> (64 - std::min<Index>(64, at.keys - w * 64));
        any[block] = any[block] || some != 0;
        all[block] = all[block] && every == keys;
      }
    }
  for (std::size_t k = 0; k < any.size(); ++k)
    kinds[k] = all[k] ? TileKind::full : any[k] ? TileKind::partial : TileKind::empty;
}

// Pairs per worker: fewer are not worth starting one.
inline constexpr Index kClassifiedPairs = Index(1) << 18;

[[nodiscard]] inline std::shared_ptr<const PairBlocks> classify_pairs(
    std::shared_ptr<const PairFunction> pairs, const Geometry& g, int threads) {
  auto blocks = std::make_shared<PairBlocks>();
  blocks->pairs = std::move(pairs);
  if (g.batch == 0 || g.heads == 0 || g.len_q == 0 || g.len_kv == 0) return blocks;
  blocks->batch = blocks->pairs->depends_on_batch() ? g.batch : 1;
  blocks->heads = blocks->pairs->depends_on_head() ? g.heads : 1;
  size_blocks(*blocks, g);
  const Index rows = blocks->batch * blocks->heads * blocks->query_blocks;
  blocks->kinds.resize(std::size_t(rows * blocks->key_blocks));
  const double all = double(blocks->batch * blocks->heads) * double(g.len_q) * double(g.len_kv);
  const double workers = threads > 0 ? threads : 1 + all / double(kClassifiedPairs);
  parallel_for(rows, int(std::min<double>(workers, resolve_threads(threads))), [&](Index row) {
    const Index q = row % blocks->query_blocks, table = row / blocks->query_blocks;
    classify_row(*blocks->pairs, g, *blocks, table / blocks->heads, table % blocks->heads, q,
                 blocks->kinds.data() + row * blocks->key_blocks);
  });
  return blocks;
}

// A rule that is classified by asking its function.
class AskedRule : public PairRule {
 public:
  [[nodiscard]] std::shared_ptr<const PairBlocks> classify(const Geometry& g, int threads,
                                                           const char* where) const final {
    return classify_pairs(bind(g, where), g, threads);
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
