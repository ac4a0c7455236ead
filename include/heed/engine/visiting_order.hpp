// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the workers of a backward call share: the accumulators, and the order in which they are added to.

#include <heed/core/parallel.hpp>
#include <heed/engine/tile/scores.hpp>

#include <algorithm>
#include <optional>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The order in which groups of panels visit shared rows. A family is a set of heads that share some: the
// readers of one key-value head, or of one row of a broadcast bias or of query. Families are visited in waves of as
// many as there are workers, so that the keys and values of few heads stand in cache at a time. The rank of a visitor
// within its family, on which bits depend, is the same for waves of any size.
struct VisitingOrder {
  Index batches, heads, groups;        // all; groups per head
  Index family_batches, family_heads;  // per family
  Index wave = 1;                      // families that are visited side by side

  struct Visit {
    Index batch, head, group;  // what to do
    Index family, rank;        // behind which turnstiles, and as which visitor
    [[nodiscard]] Index gate(Index tile, Index tiles) const { return family * tiles + tile; }
  };

  [[nodiscard]] Index families() const {
    return (batches / family_batches) * (heads / family_heads);
  }

  // Visitors of each family.
  [[nodiscard]] Index ranks() const { return groups * family_batches * family_heads; }

  // Wave by wave, rank by rank over the families of a wave; within a head the last group, longest under a causal mask,
  // first.
  [[nodiscard]] Visit visit(Index unit) const {
    const Index first = unit / (wave * ranks()) * wave, count = std::min(wave, families() - first);
    const Index family = first + (unit - first * ranks()) % count;
    const Index rank = (unit - first * ranks()) / count;
    const Index head_families = heads / family_heads;
    const Index member = rank / groups;
    return {family / head_families * family_batches + member / family_heads,
            family % head_families * family_heads + member % family_heads,
            groups - 1 - rank % groups, family, rank};
  }
};

// Sums over all visitors in one order, whoever computes their terms: over the ranks of a family, then over the
// families. Only the families of a wave have sums that are not yet part of the total.
class OrderedSums {
 public:
  OrderedSums(const VisitingOrder& order, Index numbers)
      : wave_(order.wave),
        last_rank_(order.ranks() - 1),
        total_(std::size_t(numbers), 0.0),
        open_(std::size_t(numbers * order.wave), 0.0),
        ranks_(order.families()),
        families_(1) {}

  // add(sums) adds the visitor's terms; no other visitor of its family does so meanwhile.
  template <class Add>
  void add(const VisitingOrder::Visit& visit, Add&& add) {
    // The place of a family is free when that of a wave before is part of the total.
    if (visit.rank == 0) families_.wait(0, visit.family - wave_ + 1);
    ranks_.wait(visit.family, visit.rank);
    double* sums = open_.data() + std::size_t(visit.family % wave_) * total_.size();
    add(sums);
    ranks_.pass(visit.family);
    if (visit.rank < last_rank_) return;
    families_.wait(0, visit.family);
    for (std::size_t i = 0; i < total_.size(); ++i) {
      total_[i] += sums[i];
      sums[i] = 0.0;
    }
    families_.pass(0);
  }
  [[nodiscard]] const std::vector<double>& total() const { return total_; }

  void abandon() {
    ranks_.abandon();
    families_.abandon();
  }

 private:
  Index wave_, last_rank_;
  std::vector<double> total_, open_;  // [numbers], [wave][numbers]
  Turnstiles ranks_, families_;
};

// What all workers of a backward call read and add to.
template <class Op, class Real>
struct BackwardShared {
  const Saved<Real>& saved;
  TensorView<const Real> out, grad_out;
  Gradients<Real> grads;
  VisitingOrder order;
  bool sums_queries;            // is the gradient of query a sum over heads or maps?
  Turnstiles tiles;             // [family][tile]
  std::vector<Real> dfeatures;  // laid out by KeySide::row()
  std::vector<Real> dprojected;
  // All parameters, as visit() meets them, then tables [head][table_rows][dim_qk].
  std::optional<OrderedSums> sums;

  BackwardShared(const CallContext<Op, Real>& c, const Saved<Real>& from,
                 const TensorView<const Real>& o, const TensorView<const Real>& grad_o,
                 const Gradients<Real>& to)
      : saved(from),
        out(o),
        grad_out(grad_o),
        grads(to),
        order(visiting_order(c, to.bias.given())),
        sums_queries(query_readers(c) != QueryReaders::one),
        tiles(order.families() * c.plan.tiles) {
    const SideNeeds<Op>& needs = c.keys.needs();
    const auto zeros = [](auto& numbers, Index count) { numbers.assign(std::size_t(count), 0); };
    zeros(dfeatures, c.keys.row_count() * Op::ScoreType::key_features);
    zeros(dprojected, c.keys.row_count() * needs.rank);
    for_each_param(c.op, [&](const char*, const auto& param) { parameters_ += param.size(); });
    tables_ = c.geometry.heads * needs.table_rows * c.geometry.dim_qk;
  }

  // Must be called before any visit.
  void start(int workers) {
    order.wave = std::max<Index>(1, std::min<Index>(workers, order.families()));
    sums.emplace(order, parameters_ + tables_);
  }

  // For a worker that throws: the others must not wait for it.
  void abandon() {
    tiles.abandon();
    sums->abandon();
  }

  // Memory of a call with so many workers.
  [[nodiscard]] Index bytes(int workers) const {
    const Index sums_kept = 1 + std::min<Index>(workers, order.families());
    return Index((dfeatures.size() + dprojected.size()) * sizeof(Real)) +
           sums_kept * (parameters_ + tables_) * Index(sizeof(double));
  }

  // Where the gradients of the tables begin among the sums.
  [[nodiscard]] Index first_table() const { return parameters_; }

  // The parameter gradients as an op.
  [[nodiscard]] Op parameter_gradients(const CallContext<Op, Real>& c) const {
    Op gradients = zeros_like(c.op);
    const double* from = sums->total().data();
    gradients.visit([&](const char*, auto& param) {
      for (Index i = 0; i < param.size(); ++i) param[i] += Real(*from++);
    });
    if constexpr (Op::ScoreType::has_table) {
      const Index width = c.geometry.dim_qk;
      for (Index h = 0; h < c.geometry.heads; ++h)
        c.op.score.table_vjp(h, width, from + h * c.keys.needs().table_rows * width,
                             gradients.score);
    }
    return gradients;
  }

 private:
  [[nodiscard]] static QueryReaders query_readers(const CallContext<Op, Real>& c) {
    return readers_of_queries(c.op.normaliser, c.geometry, Op::ReadoutType::uses_query);
  }

  // Heads share rows where they read one key-value head, or where one row of bias or of query serves them all. Where a
  // head may read any key-value head, all count as readers of one.
  [[nodiscard]] static VisitingOrder visiting_order(const CallContext<Op, Real>& c, bool bias) {
    const Geometry& g = c.geometry;
    const Shape& shape = c.mask.bias().shape();
    const bool all_heads = (bias && shape.heads == 1) || !c.keys.needs().keys_by_group ||
                           query_readers(c) == QueryReaders::several_heads;
    const Index one_batch = 1,
                one_head = 1;  // a call without batches or heads has no family at all
    return {g.batch, g.heads, c.groups_of(1),
            std::max(one_batch, bias && shape.batch == 1 ? g.batch : one_batch),
            std::max(one_head, all_heads ? g.heads : g.group())};
  }

  Index parameters_ = 0, tables_ = 0;  // numbers in them
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
