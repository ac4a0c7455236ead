// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks whose blocks are known before a call: a BlockMask asks a mask's functions once for many calls; block_lists() takes lists
// of blocks from the caller (mask/block_lists.hpp).

#include <heed/mask/block_lists.hpp>
#include <heed/mask/combine.hpp>

#include <algorithm>
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
  // Bytes kept: for each function one per block of at least 16 queries and 64 keys, kMostBlocks at most; for lists none. One table
  // serves all batches, or all heads, where the function does not read them.
  [[nodiscard]] Index bytes() const {
    Index sum = 0;
    for (const auto& rule : kept_) sum += Index(rule->blocks().kinds.size() * sizeof(TileKind));
    return sum;
  }

 private:
  Mask<Real> mask_;
  std::vector<std::shared_ptr<const detail::KeptRule>> kept_;
};

}  // namespace HEED_ABI
}  // namespace heed
