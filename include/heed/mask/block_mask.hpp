// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks whose blocks are known before a call: a BlockMask asks a mask's functions once for many
// calls, and block_lists() takes lists of blocks from the caller.

#include <heed/mask/combine.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
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
    for (const auto& rule : kept_)
      sum += std::count(rule->blocks().kinds.begin(), rule->blocks().kinds.end(), kind);
    return sum;
  }
  // Bytes kept: for each function one per block of at least 16 queries and 64 keys (or of the lists' size), kMostBlocks at
  // most. One table serves all batches, or all heads, where the function does not read them.
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
// blocks indices[start[n]], ..., indices[start[n + 1] - 1], in any order. A table has one row per query block.
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

  // Calls body(key block) for each key block that the query block `row` sees.
  template <class Body>
  void for_blocks(Index b, Index h, Index row, Body&& body) const {
    const BlockLists& l = *lists_;
    const Index table = (l.batch == 1 ? 0 : b) * l.heads + (l.heads == 1 ? 0 : h);
    const auto at = std::size_t(table * rows_ + row);
    for (Index n = l.start[at]; n < l.start[at + 1]; ++n) body(l.indices[std::size_t(n)]);
  }
  void fill(const PairBlock& at, std::uint64_t* words) const override {
    clear_rows(at, words);
    for (Index r = 0; r < at.rows; ++r)
      for_blocks(at.batch, at.head, (at.query + r) / lists_->query_block, [&](Index k) {
        const auto cut = [&](Index key) { return std::clamp<Index>(key - at.key, 0, at.keys); };
        set_bits(words + r * kRuleWords, cut(k * lists_->key_block),
                 cut((k + 1) * lists_->key_block));
      });
  }
  [[nodiscard]] bool depends_on_batch() const override { return lists_->batch > 1; }
  [[nodiscard]] bool depends_on_head() const override { return lists_->heads > 1; }

 private:
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
    blocks->batch = l.batch;
    blocks->heads = l.heads;
    blocks->query_block = l.query_block;
    blocks->key_block = l.key_block;
    blocks->query_blocks = pieces(g.len_q, l.query_block);
    blocks->key_blocks = pieces(g.len_kv, l.key_block);
    const Index rows = l.batch * l.heads * blocks->query_blocks;
    require(blocks->key_blocks == 0 || rows <= kMostBlocks / blocks->key_blocks, where,
            ": the block lists are ", rows, " rows of ", blocks->key_blocks,
            " blocks, there may be ", kMostBlocks, " blocks");
    blocks->kinds.assign(std::size_t(rows * blocks->key_blocks), TileKind::empty);
    for (Index b = 0; b < l.batch; ++b)
      for (Index h = 0; h < l.heads; ++h)
        for (Index q = 0; q < blocks->query_blocks; ++q)
          pairs->for_blocks(b, h, q, [&](Index k) {
            blocks->kinds[std::size_t(blocks->row(b, h, q) + k)] = TileKind::full;
          });
    return blocks;
  }
  [[nodiscard]] std::shared_ptr<const PairRule> moved(Index by) const override {
    fail("block_lists: the lists are those of whole sequences, queries cannot stand ", by,
         " tokens behind the first one");
  }
  // The lists count the call's own queries, wherever these stand on the key axis.
  [[nodiscard]] bool stands_at_first_key() const override { return false; }
  void add_to(Digest& digest) const override {
    const BlockLists& l = *lists_;
    for (const Index number : {l.query_block, l.key_block, l.batch, l.heads}) digest.add(number);
    digest.add(l.start);
    digest.add(l.indices);
  }
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
    for (const Index k : l.indices)
      require(k >= 0 && k < keys, where, ": an index of the block lists is ", k,
              ", it must lie in [0, ", keys, ")");
    return std::make_shared<ListPairs>(lists_, rows);
  }

  std::shared_ptr<const BlockLists> lists_;
};

}  // namespace detail

// Queries see the blocks of keys that the lists name. Throws std::invalid_argument where start
// falls or does not end with the number of indices. Calls throw it where the number of rows does
// not fit their lengths, or an index is beyond the last block.
template <class Real>
[[nodiscard]] Mask<Real> block_lists(BlockLists lists) {
  Mask<Real> mask;
  mask.rules.push_back(std::make_shared<const detail::ListRule>(std::move(lists)));
  return mask;
}

}  // namespace HEED_ABI
}  // namespace heed
