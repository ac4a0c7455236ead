// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks that are lists of blocks of keys: block_lists() takes them from the caller.

#include <heed/core/view.hpp>
#include <heed/mask/list_pairs.hpp>
#include <heed/mask/mask.hpp>

#include <algorithm>
#include <concepts>
#include <limits>
#include <memory>
#include <ranges>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

class ListRule final : public PairRule {
 public:
  ListRule(BlockLists lists, const char* where)
      : lists_(std::make_shared<const BlockLists>(std::move(lists))) {
    const BlockLists& l = *lists_;
    require(l.query_block > 0 && l.key_block > 0, where, ": blocks are ", l.query_block,
            " queries by ", l.key_block, " keys, both must be at least 1");
    require(l.batch > 0 && l.heads > 0, where, ": batch is ", l.batch, " and heads is ", l.heads,
            ", both must be at least 1");
    require(!l.start.empty(), where, ": start has 0 entries, it must have one more than rows");
    require(l.start[0] == 0, where, ": start begins with ", l.start[0], ", it must begin with 0");
    for (std::size_t n = 1; n < l.start.size(); ++n)
      require(l.start[n] >= l.start[n - 1], where, ": start falls from ", l.start[n - 1], " to ",
              l.start[n], " at row ", n - 1);
    require(l.start.back() == Index(l.indices.size()), where, ": start ends with ", l.start.back(),
            ", there are ", l.indices.size(), " indices");
    for (std::size_t row = 0; row + 1 < l.start.size(); ++row)
      for (Index n = l.start[row] + 1; n < l.start[row + 1]; ++n) {
        const Index before = l.indices[std::size_t(n - 1)], block = l.indices[std::size_t(n)];
        require(block > before, where, ": row ", row, " has block ", block, " behind block ",
                before, ", the blocks of a row must ascend");
      }
    // Calls ask for these again and again.
    for (const Index number : {l.query_block, l.key_block, l.batch, l.heads}) digest_.add(number);
    digest_.add(l.start);
    digest_.add(l.indices);
    if (l.indices.empty()) return;
    const auto [least, most] = std::minmax_element(l.indices.begin(), l.indices.end());
    least_ = *least;
    most_ = *most;
  }

  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    return bound(g, where);
  }
  [[nodiscard]] std::shared_ptr<const PairBlocks> classify(const Geometry& g, int,
                                                           const char* where) const override {
    const auto pairs = bound(g, where);
    const BlockLists& l = *lists_;
    auto blocks = std::make_shared<PairBlocks>();
    blocks->pairs = pairs;
    blocks->lists = &pairs->lists();
    blocks->batch = l.batch;
    blocks->heads = l.heads;
    blocks->query_block = l.query_block;
    blocks->key_block = l.key_block;
    blocks->query_blocks = pieces(g.len_q, l.query_block);
    blocks->key_blocks = pieces(g.len_kv, l.key_block);
    return blocks;
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    fail("block_lists: the lists are those of whole sequences, queries cannot stand ", by,
         " tokens behind the first one");
  }
  [[nodiscard]] std::shared_ptr<const PairRule> of_sequences(Index first,
                                                             Index count) const override {
    auto own = std::make_shared<ListRule>(*this);
    own->first_ = first;
    own->sequences_ = count;
    return own;
  }
  // The lists count the call's own queries, wherever these stand on the key axis.
  [[nodiscard]] bool stands_at_first_key() const override { return false; }
  void add_to(Digest& digest) const override {
    digest.add(digest_.sum());
    digest.add(first_);
  }
  [[nodiscard]] bool is_classified() const override { return true; }

 private:
  [[nodiscard]] static Index pieces(Index length, Index block) {
    return length / block + (length % block != 0 ? 1 : 0);
  }
  [[nodiscard]] std::shared_ptr<const ListPairs> bound(const Geometry& g, const char* where) const {
    const BlockLists& l = *lists_;
    const bool packed = sequences_ > 0;
    const Index batch = packed ? sequences_ : g.batch;
    require(l.batch == 1 || l.batch == batch, where, ": the block lists are for batch ", l.batch,
            ", the call has ", batch);
    require(l.heads == 1 || l.heads == g.heads, where, ": the block lists are for ", l.heads,
            " heads, the call has ", g.heads);
    const Index tables = checked_product(l.batch, l.heads, where), all = Index(l.start.size()) - 1;
    const Index needed = pieces(g.len_q, l.query_block);
    const Index rows = packed ? std::max(needed, all / tables) : needed;
    require(all == checked_product(tables, rows, where), where, ": start of the block lists has ",
            all + 1, " entries, ", tables, " tables of ", rows, " rows need ", tables * rows + 1);
    const Index keys = packed ? std::numeric_limits<Index>::max() : pieces(g.len_kv, l.key_block);
    for (const Index k : {least_, most_})
      require(l.indices.empty() || (k >= 0 && k < keys), where, ": an index of the block lists is ",
              k, ", it must lie in [0, ", keys, ")");
    return std::make_shared<ListPairs>(lists_, rows, first_);
  }

  std::shared_ptr<const BlockLists> lists_;
  Digest digest_;                    // of the lists
  Index least_ = 0, most_ = 0;       // of the indices
  Index first_ = 0, sequences_ = 0;  // of packed ones; 0: none
};

}  // namespace detail

// Lists of any integer type: `start` and `indices` as in BlockLists. Throws std::invalid_argument where a number has no place in
// an Index.
template <std::ranges::input_range Start, std::ranges::input_range Indices>
[[nodiscard]] BlockLists block_lists_of(Index query_block, Index key_block, const Start& start,
                                        const Indices& indices, Index batch = 1, Index heads = 1) {
  BlockLists lists{query_block, key_block, {}, {}, batch, heads};
  const auto copy = [](const auto& from, std::vector<Index>& to) {
    for (const std::integral auto number : from) {
      require(std::in_range<Index>(number), "block_lists_of: a number is ", number,
              ", the largest one may be ", std::numeric_limits<Index>::max());
      to.push_back(Index(number));
    }
  };
  copy(start, lists.start);
  copy(indices, lists.indices);
  return lists;
}
// Lists of the entries of a dense table that are not 0: (batch or 1, heads or 1, query blocks, key blocks).
template <class Number>
[[nodiscard]] BlockLists block_lists_of(const TensorView<Number>& keep, Index query_block,
                                        Index key_block) {
  const Shape& s = keep.shape();
  BlockLists lists{query_block, key_block, {0}, {}, s.batch, s.heads};
  for_each_row(s, [&](Index b, Index h, Index row) {
    for (Index k = 0; k < s.dim; ++k)
      if (keep(b, h, row, k) != Number(0)) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  });
  return lists;
}

// Queries see the blocks of keys that the lists name. Throws std::invalid_argument, its sentence starting with `where`, where start
// falls or does not end with the number of indices, or the blocks of a row do not ascend. Calls throw it where the number of
// rows does not fit their lengths, or an index is beyond the last block.
template <class Real>
[[nodiscard]] Mask<Real> block_lists(BlockLists lists, const char* where = "block_lists") {
  Mask<Real> mask;
  mask.rules.push_back(std::make_shared<const detail::ListRule>(std::move(lists), where));
  return mask;
}

}  // namespace HEED_ABI
}  // namespace heed
