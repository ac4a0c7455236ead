// SPDX-License-Identifier: Apache-2.0
#pragma once

// The interface of a part of a mask that is a function of positions (mask/visible.hpp), a list of
// blocks (mask/block_lists.hpp) or a union (mask/combine.hpp). The engine asks it for the bits of a
// tile's pairs, by one virtual call, and whether the tile is hidden, visible in part, or visible as
// a whole; that answer comes from blocks that are classified once per call.
//
// Memory of a classified rule: a byte per block, for each batch and each head only where the rule depends on it, and
// kMostBlocks bytes at most: if blocks of 16 queries and 64 keys would be more, they are made larger. Lists of blocks need none.

#include <heed/core/digest.hpp>
#include <heed/core/geometry.hpp>

#include <cstdint>
#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The visible pairs of a tile: none, some, all.
enum class TileKind : std::uint8_t { empty, partial, full };

// Queries [query, query + rows) and keys [key, key + keys) of head (batch, head); none of them is empty.
struct PairBlock {
  Index batch = 0, head = 0;
  Index query = 0, rows = 0;
  Index key = 0, keys = 0;
};

// Most keys in a row of bits.
inline constexpr Index kRuleKeys = 512, kRuleWords = kRuleKeys / 64;

inline constexpr Index kMostBlocks = Index(1) << 24;

// A rule for the sizes of one call.
class PairFunction {
 public:
  virtual ~PairFunction() = default;
  // Sets bit j % 64 of words[r * kRuleWords + j / 64] where query `query + r` sees key `key + j`,
  // for at most kRuleKeys keys. Bits behind the last key are 0.
  virtual void fill(const PairBlock& at, std::uint64_t* words) const = 0;
  // True if batches, or heads, may see different pairs.
  [[nodiscard]] virtual bool depends_on_batch() const = 0;
  [[nodiscard]] virtual bool depends_on_head() const = 0;
  // The kind of a tile, of those that know it without a table of blocks.
  [[nodiscard]] virtual TileKind kind_of(const PairBlock&) const { return TileKind::partial; }
};

struct BlockLists;

// A rule for the sizes of one call, and the kinds of its blocks. Nothing changes it once it is made.
struct PairBlocks {
  std::shared_ptr<const PairFunction> pairs;
  Index batch = 1, heads = 1;  // tables of kinds: one per batch or head of the call, or 1 for all
  Index query_block = 1, key_block = 1;
  Index query_blocks = 0, key_blocks = 0;
  std::vector<TileKind>
      kinds;  // [batch][heads][query_blocks][key_blocks]; none where `lists` are given
  const BlockLists* lists = nullptr;  // of `pairs`

  [[nodiscard]] Index row(Index b, Index h, Index query_block_index) const {
    const Index table = (batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h);
    return (table * query_blocks + query_block_index) * key_blocks;
  }
  // The kind of a tile, which may cut through blocks: empty or full if all blocks that it touches are, else partial.
  [[nodiscard]] TileKind classify(const PairBlock& at) const {
    if (lists) return pairs->kind_of(at);
    const Index last_query = (at.query + at.rows - 1) / query_block,
                last_key = (at.key + at.keys - 1) / key_block;
    bool any = false, all = true;
    for (Index q = at.query / query_block; q <= last_query; ++q) {
      const TileKind* of_row = kinds.data() + row(at.batch, at.head, q);
      for (Index k = at.key / key_block; k <= last_key; ++k) {
        any = any || of_row[k] != TileKind::empty;
        all = all && of_row[k] == TileKind::full;
      }
      if (any && !all) return TileKind::partial;
    }
    return all ? TileKind::full : TileKind::empty;
  }
};

// A part of a mask, for any sizes. Masks share it: nothing changes it once it is made.
class PairRule {
 public:
  virtual ~PairRule() = default;
  // The rule for the sizes of a call. Throws std::invalid_argument if they do not fit; `where` is the beginning of its
  // sentence.
  [[nodiscard]] virtual std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                                 const char* where) const = 0;
  // The rule with its blocks. The number of threads does not change them.
  [[nodiscard]] virtual std::shared_ptr<const PairBlocks> classify(const Geometry& g, int threads,
                                                                   const char* where) const = 0;
  // The rule for queries that stand `by` tokens further along the key axis.
  [[nodiscard]] virtual std::shared_ptr<const PairRule> moved(Index by) const = 0;
  // True if the rule places query 0 at key 0: top left and without an offset.
  [[nodiscard]] virtual bool stands_at_first_key() const = 0;
  // Adds the rule's values to the digest. A function and its captured values have none.
  virtual void add_to(Digest& digest) const = 0;
  // The rule for sequences `first`, `first` + 1, ... of so many, packed, whose numbers are batches of the rule; null where nothing
  // but its batch says of which sequence a pair is.
  [[nodiscard]] virtual std::shared_ptr<const PairRule> of_sequences(Index /*first*/,
                                                                     Index /*count*/) const {
    return nullptr;
  }
  // True if classify() costs nothing.
  [[nodiscard]] virtual bool is_classified() const { return false; }
};

}  // namespace HEED_ABI
}  // namespace heed
