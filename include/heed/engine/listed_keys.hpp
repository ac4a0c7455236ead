// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward where each query has a list of keys of its own (BlockLists of query_block 1). The listed keys of one
// query are all the keys of a small call, whose queries are the heads that share list and keys:
//
//   few heads           read the rows of the listed keys where they lie: each is a page of the small call
//   others              read copies, which are dense: many heads, rows in 16 or 8 bits, scores that add up columns
//   bands and lengths   cut the list, which ascends, at both ends
//
// Panels of many queries would compute all keys that one of them sees. What a call must not have: numbers that differ by place or
// by head (no_part_reads_places()), values derived of keys, and masks beside bands, lengths and one list.

#include <heed/engine/fold_heads.hpp>
#include <heed/engine/queries.hpp>
#include <heed/engine/widened.hpp>
#include <heed/mask/list_pairs.hpp>

#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The lists of a call that is one of these; null for other calls.
template <class Real>
[[nodiscard]] const ListPairs* takes_listed_keys(const OpTiles<Real>& op, const Geometry& g,
                                                 const Mask<Real>& mask,
                                                 const BoundMask<Real>& bound,
                                                 const Dropout& dropout) {
  const PairBlocks* const blocks = bound.only_rule();
  if (!blocks || !blocks->lists) return nullptr;
  const bool takes = blocks->lists->query_block == 1 && g.len_q > 0 && g.len_kv > 0 &&
                     g.share == Share{} && op.maps() == 1 && op.streams() &&
                     op.normaliser.learnt.count == 0 && !op.score.traits.derives() &&
                     !op.normaliser.traits.uses_extra && !op.readout.needs_rehearsal() &&
                     op.readout.extra_dim(g) == 0 && !op.readout.traits.counts_steps &&
                     op.readout.traits.diagnostics + op.normaliser.traits.diagnostics == 0 &&
                     !mask.allowed.given() && !mask.bias.given() && !mask.query_documents &&
                     no_part_reads_places(op, g, mask, dropout);
  return takes ? static_cast<const ListPairs*>(blocks->pairs.get()) : nullptr;
}

// One query's small call: its mask, its pages or copies, and what forward leaves for backward.
template <class Real>
struct ListedQuery {
  Mask<Real> mask;
  std::optional<BoundMask<Real>> bound;
  std::vector<const Real*> key_pages, value_pages;
  std::vector<Real> keys, values;
  Saved<Real> saved;
  std::optional<CallContext<Real>> context;
};

template <class Real>
class ListedKeys {
 public:
  ListedKeys(const OpTiles<Real>& op, const Geometry& g, const ListPairs& pairs,
             const BoundMask<Real>& bound, const Operands<Real>& in, const Options& options)
      : op_(op),
        g_(g),
        bound_(bound),
        pairs_(pairs),
        in_(in),
        options_(fold_heads(options)),
        heads_(pairs_.lists().heads > 1 ? g.heads : g.kv_heads) {
    const BlockLists& l = pairs_.lists();
    Index blocks = 1;
    for (std::size_t row = 1; row < l.start.size(); ++row)
      blocks = std::max(blocks, l.start[row] - l.start[row - 1]);
    const Index whole = l.key_block,
                room = std::min(blocks * whole, g.len_kv / whole * whole + whole);
    small_ = {1, 1, 1, 1, g.heads / heads_, room, g.dim_qk, g.dim_v};
    in_place_ = small_.len_q <= kFewRows<Real> && !in.key.narrow() && !in.value.narrow() &&
                !op.score.columns;
    options_.scale = scale_of(op, g, options);
  }

  [[nodiscard]] const Geometry& geometry() const { return small_; }
  // Items of work: one per query, and list and keys that some heads share.
  [[nodiscard]] Index count() const { return g_.batch * heads_ * g_.len_q; }
  // Flops of the products of all pairs that are listed, at most.
  [[nodiscard]] double flops() const {
    const BlockLists& l = pairs_.lists();
    const double tables = double(l.batch) * double(l.heads),
                 blocks = double(l.indices.size()) / tables;
    return 2.0 * blocks * double(l.key_block) * double(g_.batch * g_.heads) *
           double(g_.dim_qk + g_.dim_v);
  }

  // What a worker needs for its queries, with the context of its small calls.
  [[nodiscard]] std::unique_ptr<ListedQuery<Real>> query(const DerivedKeys<Real>& keys) const {
    auto made = std::make_unique<ListedQuery<Real>>();
    ListedQuery<Real>& q = *made;
    q.mask.soft_cap = bound_.soft_cap();
    q.mask.key_ranges = {{0, small_.len_kv}};
    q.bound.emplace(q.mask, small_, "heed");
    Operands<Real> in;
    const auto view = [&](const StoredView<const Real>& of, std::vector<const Real*>& pages,
                          std::vector<Real>& copies) -> TensorView<const Real> {
      const Shape shape{1, 1, small_.len_kv, of.shape().dim};
      if (in_place_) {
        pages.resize(std::size_t(shape.len + kRowsAhead));
        return TensorView<const Real>::paged(pages.data(), 1, shape, {0, 0, shape.dim});
      }
      copies.resize(std::size_t(shape.len * shape.dim));
      return {copies.data(), shape};
    };
    in.key = view(in_.key, q.key_pages, q.keys);
    in.value = view(in_.value, q.value_pages, q.values);
    Plan plan = plan_call<Real>(op_, small_, *q.bound, options_, 0, false);
    plan.group = plan.panels;
    q.context.emplace(make_context(op_, small_, *q.bound, in, keys, options_, plan));
    return made;
  }

  // Makes item `item` the call of `worker`, which q has made, and runs it. `saved`, if given, receives what backward reads.
  template <class Worker>
  void run(Worker& worker, ListedQuery<Real>& q, Index item, const OutputSet<TensorView<Real>>& out,
           Saved<Real>* saved) const {
    const Index i = item % g_.len_q, own = item / g_.len_q % heads_, b = item / g_.len_q / heads_,
                rows = small_.len_q, h = own * rows;
    const KeyRange keys = load(q, b, h, i);
    q.mask.key_ranges[0] = keys;
    q.bound.emplace(q.mask, small_, "heed");
    const auto heads = [&](const auto& view) {
      using View = std::remove_cvref_t<decltype(view)>;
      if (!view.given()) return View{};
      return View(view.row(b, h, i), {1, 1, rows, view.shape().dim}, {0, 0, view.strides().head});
    };
    worker.turn_to(heads(in_.query), {heads(out.out), heads(out.lse), {}});
    worker.mix(0, 0, 0);
    worker.write_out();
    if (saved) keep(q.saved, b, h, i, *saved);
  }

 private:
  // The listed keys of query i as the keys of the small call, and which of these it sees.
  [[nodiscard]] KeyRange load(ListedQuery<Real>& q, Index b, Index h, Index i) const {
    const KeyRange seen = bound_.keys_of(b, i);
    if (seen.size() == 0) return {};
    const std::span<const Index> blocks = pairs_.blocks_of(b, h, i, seen.begin, seen.end - 1);
    if (blocks.empty()) return {};
    const Index block = pairs_.lists().key_block, kv_head = g_.kv_head(h);
    if (in_place_) {
      find(in_.key.plain(), b, kv_head, blocks, q.key_pages.data());
      find(in_.value.plain(), b, kv_head, blocks, q.value_pages.data());
    } else {
      copy(in_.key, b, kv_head, blocks, q.keys.data());
      copy(in_.value, b, kv_head, blocks, q.values.data());
    }
    const Index last = blocks.back() * block, before = (Index(blocks.size()) - 1) * block;
    return {std::max<Index>(0, seen.begin - blocks.front() * block),
            before + std::min(block, seen.end - last)};
  }
  // The addresses of the rows of blocks, and the last one again for what prefetching reads.
  void find(const TensorView<const Real>& from, Index b, Index kv_head,
            std::span<const Index> blocks, const Real** to) const {
    const Index block = pairs_.lists().key_block, stride = from.strides().row;
    const Real* const first = from.page_rows() > 0 ? nullptr : from.row(b, kv_head, 0);
    if (first && block == 1) {
      for (const Index t : blocks) *to++ = first + t * stride;
    } else {
      for (const Index k : blocks)
        for (Index t = k * block; t < std::min((k + 1) * block, g_.len_kv); ++t)
          *to++ = first ? first + t * stride : from.row(b, kv_head, t);
    }
    std::fill_n(to, kRowsAhead, to[-1]);
  }
  // Rows of blocks, one behind the other; of the last block those that exist.
  void copy(const StoredView<const Real>& from, Index b, Index kv_head,
            std::span<const Index> blocks, Real* to) const {
    const Index block = pairs_.lists().key_block, dim = from.shape().dim;
    const Index page = from.page_rows() > 0 ? from.page_rows() : g_.len_kv;
    for (const Index k : blocks) {
      const Index end = std::min((k + 1) * block, g_.len_kv);
      for (Index t = k * block, some; t < end; t += some, to += some * dim) {
        some = std::min(page - t % page, end - t);
        if (from.narrow()) {
          widen_rows(from, b, kv_head, t, some, to, dim);
        } else {
          const Real* row = from.plain().row(b, kv_head, t);
          const Index stride = from.plain().strides().row;
          for (Index r = 0; r < some; ++r, row += stride) std::copy_n(row, dim, to + r * dim);
        }
      }
    }
  }
  // Puts what forward has left of heads h, h + 1, ... at query i to that of the whole call.
  void keep(const Saved<Real>& from, Index b, Index h, Index i, Saved<Real>& to) const {
    const Index rows = small_.len_q, dim = g_.dim_v, numbers = op_.normaliser.traits.state_numbers;
    for (Index r = 0; r < rows; ++r) {
      const Index row = g_.row_index(b, h + r, i);
      to.lse[std::size_t(row)] = from.lse[std::size_t(r)];
      for (Index n = 0; n < numbers; ++n)
        to.state[std::size_t(n * g_.query_rows() + row)] = from.state[std::size_t(n * rows + r)];
      if (!to.mixed.empty())
        std::copy_n(from.mixed.data() + r * dim, dim, to.mixed.data() + row * dim);
    }
  }

  const OpTiles<Real>& op_;
  Geometry g_;
  const BoundMask<Real>& bound_;
  const ListPairs& pairs_;
  Operands<Real> in_;
  Options options_;
  Index heads_;     // of lists and keys: the call's, or its key heads
  Geometry small_;  // of the small calls
  bool in_place_;   // are rows read where they lie?
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
