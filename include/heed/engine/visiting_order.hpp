// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the workers of a backward call share: the accumulators, and the order in which they are added to.

#include <heed/core/parallel.hpp>
#include <heed/engine/tile/scores.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The order in which groups of panels visit shared rows. A family is a set of heads that share some: the
// readers of one key-value head, or of one row of a broadcast bias.
struct VisitingOrder {
  Index batches, heads, groups;        // all; groups per head
  Index family_batches, family_heads;  // per family

  struct Visit {
    Index batch, head, group;  // what to do
    Index family, rank;        // behind which turnstiles, and as which visitor
    [[nodiscard]] Index gate(Index tile, Index tiles) const { return family * tiles + tile; }
  };

  [[nodiscard]] Index families() const {
    return (batches / family_batches) * (heads / family_heads);
  }

  // Rank by rank over all families; within a head the last group, longest under a causal mask, first.
  [[nodiscard]] Visit visit(Index unit) const {
    const Index family = unit % families(), rank = unit / families();
    const Index head_families = heads / family_heads;
    const Index member = rank / groups;
    return {family / head_families * family_batches + member / family_heads,
            family % head_families * family_heads + member % family_heads,
            groups - 1 - rank % groups, family, rank};
  }
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
  Turnstiles commits;           // one gate, in unit order
  std::vector<Real> dfeatures;  // laid out by KeySide::row()
  std::vector<Real> dprojected;
  std::vector<double> dtables;  // [head][table_rows][dim_qk]
  std::vector<double> dparams;  // all parameters, in visiting order

  BackwardShared(const CallContext<Op, Real>& c, const Saved<Real>& from,
                 const TensorView<const Real>& o, const TensorView<const Real>& grad_o,
                 const Gradients<Real>& to)
      : saved(from),
        out(o),
        grad_out(grad_o),
        grads(to),
        order(visiting_order(c, to.bias.given())),
        sums_queries(
            !reads_each_query_once(c.op.normaliser, c.geometry, Op::ReadoutType::uses_query)),
        tiles(order.families() * c.plan.tiles),
        commits(1) {
    const SideNeeds<Op>& needs = c.keys.needs();
    const auto zeros = [](auto& numbers, Index count) { numbers.assign(std::size_t(count), 0); };
    zeros(dfeatures, c.keys.row_count() * Op::ScoreType::key_features);
    zeros(dprojected, c.keys.row_count() * needs.rank);
    zeros(dtables, c.geometry.heads * needs.table_rows * c.geometry.dim_qk);
    Index parameters = 0;
    for_each_param(c.op, [&](const char*, const auto& param) { parameters += param.size(); });
    zeros(dparams, parameters);
  }

  // For a worker that throws: the others must not wait for it.
  void abandon() {
    tiles.abandon();
    commits.abandon();
  }

  [[nodiscard]] Index bytes() const {
    return Index((dfeatures.size() + dprojected.size()) * sizeof(Real) +
                 (dtables.size() + dparams.size()) * sizeof(double));
  }

  // The parameter gradients as an op.
  [[nodiscard]] Op parameter_gradients(const CallContext<Op, Real>& c) const {
    Op sums = zeros_like(c.op);
    std::size_t at = 0;
    sums.visit([&](const char*, auto& param) {
      for (Index i = 0; i < param.size(); ++i) param[i] += Real(dparams[at++]);
    });
    if constexpr (Op::ScoreType::has_table) {
      const Index width = c.geometry.dim_qk;
      for (Index h = 0; h < c.geometry.heads; ++h)
        c.op.score.table_vjp(h, width, dtables.data() + h * c.keys.needs().table_rows * width,
                             sums.score);
    }
    return sums;
  }

 private:
  // Heads share rows where they read one key-value head, or where one row of bias serves them all. Where a
  // head may read any key-value head, all count as readers of one.
  [[nodiscard]] static VisitingOrder visiting_order(const CallContext<Op, Real>& c, bool bias) {
    const Geometry& g = c.geometry;
    const Shape& shape = c.mask.bias().shape();
    const bool all_heads = (bias && shape.heads == 1) || !c.keys.needs().keys_by_group;
    const Index one_batch = 1,
                one_head = 1;  // a call without batches or heads has no family at all
    return {g.batch, g.heads, c.groups_of(1),
            std::max(one_batch, bias && shape.batch == 1 ? g.batch : one_batch),
            std::max(one_head, all_heads ? g.heads : g.group())};
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
