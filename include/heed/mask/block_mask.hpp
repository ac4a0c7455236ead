// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks whose blocks are known before a call: a BlockMask asks a mask's functions once for many
// calls, and block_lists() takes lists of blocks from the caller.

#include <heed/mask/combine.hpp>

#include <algorithm>
#include <cstdint>
#include <concepts>
#include <limits>
#include <memory>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// A rule with its blocks for one batch, number of heads and lengths.
class KeptRule final : public PairRule {
 public:
  KeptRule(std::shared_ptr<const PairRule> rule, const Geometry& g, int threads)
      : rule_(std::move(rule)), g_(g) {
    require(g.batch >= 0 && g.heads >= 0 && g.len_q >= 0 && g.len_kv >= 0, "BlockMask: batch ",
            g.batch, ", heads ", g.heads, ", len_q ", g.len_q, ", len_kv ", g.len_kv,
            "; none may be negative");
    blocks_ = rule_->classify(g, threads, "BlockMask");
  }

  [[nodiscard]] std::shared_ptr<const PairFunction> bind(const Geometry& g,
                                                         const char* where) const override {
    return classify(g, 1, where)->pairs;
  }
  [[nodiscard]] std::shared_ptr<const PairBlocks> classify(const Geometry& g, int,
                                                           const char* where) const override {
    const auto check = [&](const char* what, Index kept, Index asked) {
      require(kept == asked, where, ": the BlockMask is one for ", what, " ", kept,
              ", the call has ", asked);
    };
    check("batch", g_.batch, g.batch);
    check("heads", g_.heads, g.heads);
    check("len_q", g_.len_q, g.len_q);
    check("len_kv", g_.len_kv, g.len_kv);
    return blocks_;
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    return rule_->moved(by);
  }
  [[nodiscard]] bool stands_at_first_key() const override { return rule_->stands_at_first_key(); }
  void add_to(Digest& digest) const override { rule_->add_to(digest); }
  [[nodiscard]] bool is_classified() const override { return true; }
  [[nodiscard]] const PairBlocks& blocks() const { return *blocks_; }
  // Blocks of a kind.
  [[nodiscard]] Index count(TileKind kind) const {
    const PairBlocks& of = *blocks_;
    if (!of.lists) return std::count(of.kinds.begin(), of.kinds.end(), kind);
    Index sum = 0;
    const auto place = [](Index block, Index size, Index length) {
      return std::pair{block * size, std::min(size, length - block * size)};
    };
    for (Index b = 0; b < of.batch; ++b)
      for (Index h = 0; h < of.heads; ++h)
        for (Index q = 0; q < of.query_blocks; ++q)
          for (Index k = 0; k < of.key_blocks; ++k) {
            const auto [query, rows] = place(q, of.query_block, g_.len_q);
            const auto [key, keys] = place(k, of.key_block, g_.len_kv);
            sum += of.classify({b, h, query, rows, key, keys}) == kind ? 1 : 0;
          }
    return sum;
  }

 private:
  std::shared_ptr<const PairRule> rule_;
  Geometry g_;
  std::shared_ptr<const PairBlocks> blocks_;
};

}  // namespace detail

// A mask whose functions of positions have been asked once, for calls of one batch, number of heads and lengths:
//
//   const heed::BlockMask<float> blocks(mask, geometry);
//   for (...) heed::forward(op, in, blocks, out);
//
// Copies share the blocks, which nothing changes. A call of other sizes is refused. The mask's
// other parts do not change, and still refer to the caller's memory.
template <class Real>
class BlockMask {
 public:
  // Asks the functions on `threads` threads; 0: the default number. Throws where a function does.
  BlockMask(Mask<Real> mask, const Geometry& g, int threads = 0) : mask_(std::move(mask)) {
    for (auto& rule : mask_.rules) {
      auto kept = std::make_shared<const detail::KeptRule>(std::move(rule), g, threads);
      kept_.push_back(kept);
      rule = std::move(kept);
    }
  }

  operator const Mask<Real>&() const { return mask_; }
  [[nodiscard]] const Mask<Real>& mask() const { return mask_; }

  // Number of blocks of a kind, over all functions.
  [[nodiscard]] Index count(TileKind kind) const {
    Index sum = 0;
    for (const auto& rule : kept_) sum += rule->count(kind);
    return sum;
  }
  // Bytes kept: for each function one per block of at least 16 queries and 64 keys, kMostBlocks at most; lists keep none. One table serves all batches, or all heads, where the function does not read them.
  [[nodiscard]] Index bytes() const {
    Index sum = 0;
    for (const auto& rule : kept_) sum += Index(rule->blocks().kinds.size() * sizeof(TileKind));
    return sum;
  }

 private:
  Mask<Real> mask_;
  std::vector<std::shared_ptr<const detail::KeptRule>> kept_;
};

// Lists of the key blocks that each query block sees, in the form of block-sparse matrices: row n of a table sees the
// blocks indices[start[n]], ..., indices[start[n + 1] - 1], which ascend. A table has one row per query block.
struct BlockLists {
  Index query_block = 128, key_block = 128;  // the last block of either may be shorter
  std::vector<Index> start, indices;         // start: [batch][heads][rows], and one number more
  Index batch = 1, heads = 1;                // numbers of tables: the call's, or 1 for all
};

namespace detail {

// The lists of one table after the other.
class ListPairs final : public PairFunction {
 public:
  ListPairs(std::shared_ptr<const BlockLists> lists, Index rows)
      : lists_(std::move(lists)), rows_(rows) {}

  [[nodiscard]] const BlockLists& lists() const { return *lists_; }
  // The key blocks that the query block `row` sees, of those from the one of key `from` to the one of key `last`.
  [[nodiscard]] std::span<const Index> blocks_of(Index b, Index h, Index row, Index from,
                                                 Index last) const {
    const BlockLists& l = *lists_;
    const Index table = (l.batch == 1 ? 0 : b) * l.heads + (l.heads == 1 ? 0 : h);
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
  Index rows_;
};

class ListRule final : public PairRule {
 public:
  explicit ListRule(BlockLists lists)
      : lists_(std::make_shared<const BlockLists>(std::move(lists))) {
    const BlockLists& l = *lists_;
    const char* const where = "block_lists";
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
        require(block > before, where, ": row ", row, " has block ", block, " behind block ", before,
                ", the blocks of a row must ascend");
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
  // The lists count the call's own queries, wherever these stand on the key axis.
  [[nodiscard]] bool stands_at_first_key() const override { return false; }
  void add_to(Digest& digest) const override { digest.add(digest_.sum()); }
  [[nodiscard]] bool is_classified() const override { return true; }

 private:
  [[nodiscard]] static Index pieces(Index length, Index block) {
    return length / block + (length % block != 0 ? 1 : 0);
  }
  [[nodiscard]] std::shared_ptr<const ListPairs> bound(const Geometry& g, const char* where) const {
    const BlockLists& l = *lists_;
    require(l.batch == 1 || l.batch == g.batch, where, ": the block lists are for batch ", l.batch,
            ", the call has ", g.batch);
    require(l.heads == 1 || l.heads == g.heads, where, ": the block lists are for ", l.heads,
            " heads, the call has ", g.heads);
    const Index rows = pieces(g.len_q, l.query_block), keys = pieces(g.len_kv, l.key_block);
    const Index tables = checked_product(l.batch, l.heads, where);
    require(Index(l.start.size()) - 1 == checked_product(tables, rows, where), where,
            ": start of the block lists has ", l.start.size(), " entries, ", tables, " tables of ",
            rows, " rows need ", tables * rows + 1);
    for (const Index k : {least_, most_})
      require(l.indices.empty() || (k >= 0 && k < keys), where, ": an index of the block lists is ", k,
              ", it must lie in [0, ", keys, ")");
    return std::make_shared<ListPairs>(lists_, rows);
  }

  std::shared_ptr<const BlockLists> lists_;
  Digest digest_;               // of the lists
  Index least_ = 0, most_ = 0;  // of the indices
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
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.heads; ++h)
      for (Index row = 0; row < s.len; ++row) {
        for (Index k = 0; k < s.dim; ++k)
          if (keep(b, h, row, k) != Number(0)) lists.indices.push_back(k);
        lists.start.push_back(Index(lists.indices.size()));
      }
  return lists;
}

// Queries see the blocks of keys that the lists name. Throws std::invalid_argument where start
// falls or does not end with the number of indices, or the blocks of a row do not ascend. Calls throw it where the number of rows does
// not fit their lengths, or an index is beyond the last block.
template <class Real>
[[nodiscard]] Mask<Real> block_lists(BlockLists lists) {
  Mask<Real> mask;
  mask.rules.push_back(std::make_shared<const detail::ListRule>(std::move(lists)));
  return mask;
}

}  // namespace HEED_ABI
}  // namespace heed
