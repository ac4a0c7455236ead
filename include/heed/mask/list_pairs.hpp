// SPDX-License-Identifier: Apache-2.0
#pragma once

// Lists of blocks of keys, and the pairs that they show, for the sizes of one call. block_lists() makes a mask of them
// (mask/block_lists.hpp).

#include <heed/mask/pair_rule.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Lists of the key blocks that each query block sees, in the form of block-sparse matrices: row n of a table sees the
// blocks indices[start[n]], ..., indices[start[n + 1] - 1], which ascend. A table has one row per query block. In calls of packed
// sequences tables are those of a padded batch, with rows for the longest one; keys behind the end of a sequence are none.
struct BlockLists {
  Index query_block = 128, key_block = 128;  // the last block of either may be shorter
  std::vector<Index> start, indices;         // start: [batch][heads][rows], and one number more
  Index batch = 1, heads = 1;                // numbers of tables: the call's, or 1 for all
};

namespace detail {

// What PairFunction::fill() writes.
inline void set_bits(std::uint64_t* words, Index from, Index to) {
  for (Index j = from; j < to; j = (j / 64 + 1) * 64) {
    const Index end = std::min(to, (j / 64 + 1) * 64);
    words[j / 64] |= ~std::uint64_t(0) >> (64 - (end - j)) << (j % 64);
  }
}
inline void clear_rows(const PairBlock& at, std::uint64_t* words) {
  for (Index r = 0; r < at.rows; ++r)
    std::fill_n(words + r * kRuleWords, kRuleWords, std::uint64_t(0));
}

// The lists of one table after the other.
class ListPairs final : public PairFunction {
 public:
  // Batch 0 of the call is batch `first` of the lists, whose tables have so many rows.
  ListPairs(std::shared_ptr<const BlockLists> lists, Index rows, Index first)
      : lists_(std::move(lists)), rows_(rows), first_(first) {}

  [[nodiscard]] const BlockLists& lists() const { return *lists_; }
  // The key blocks that the query block `row` sees, of those from the one of key `from` to the one of key `last`.
  [[nodiscard]] std::span<const Index> blocks_of(Index b, Index h, Index row, Index from,
                                                 Index last) const {
    const BlockLists& l = *lists_;
    const Index table = (l.batch == 1 ? 0 : first_ + b) * l.heads + (l.heads == 1 ? 0 : h);
    const Index* const start = l.start.data() + table * rows_ + row;
    const auto begin = l.indices.begin() + start[0], end = l.indices.begin() + start[1];
    const auto first = std::lower_bound(begin, end, from / l.key_block);
    return {first, std::upper_bound(first, end, last / l.key_block)};
  }
  void fill(const PairBlock& at, std::uint64_t* words) const override {
    clear_rows(at, words);
    for (Index r = 0; r < at.rows; ++r)
      for (const Index k : blocks_of(at, (at.query + r) / lists_->query_block)) {
        const auto cut = [&](Index key) { return std::clamp<Index>(key - at.key, 0, at.keys); };
        set_bits(words + r * kRuleWords, cut(k * lists_->key_block),
                 cut((k + 1) * lists_->key_block));
      }
  }
  [[nodiscard]] TileKind kind_of(const PairBlock& at) const override {
    const Index blocks =
        (at.key + at.keys - 1) / lists_->key_block - at.key / lists_->key_block + 1;
    bool any = false, all = true;
    for (Index row = at.query / lists_->query_block;
         row <= (at.query + at.rows - 1) / lists_->query_block; ++row) {
      const Index seen = Index(blocks_of(at, row).size());
      any = any || seen > 0;
      all = all && seen == blocks;
      if (any && !all) return TileKind::partial;
    }
    return all ? TileKind::full : TileKind::empty;
  }
  [[nodiscard]] bool depends_on_batch() const override { return lists_->batch > 1; }
  [[nodiscard]] bool depends_on_head() const override { return lists_->heads > 1; }

 private:
  [[nodiscard]] std::span<const Index> blocks_of(const PairBlock& at, Index row) const {
    return blocks_of(at.batch, at.head, row, at.key, at.key + at.keys - 1);
  }

  std::shared_ptr<const BlockLists> lists_;
  Index rows_, first_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
