// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the workers of a backward call share: the accumulators, and the order in which they are added to.

#include <heed/core/parallel.hpp>
#include <heed/engine/call.hpp>

namespace heed::inline HEED_ABI::detail {

// The order in which panels visit shared rows. A group is a set of heads that share some: the readers of
// one key-value head, or of one row of a broadcast bias.
struct PanelOrder {
  Index batches, heads, panels;           // all
  Index group_batches, group_heads;       // per group

  struct Visit {
    Index batch, head, panel;  // what to do
    Index group, rank;         // behind which turnstiles, and as which visitor
  };

  [[nodiscard]] Index groups() const {
    return (batches / group_batches) * (heads / group_heads);
  }
  [[nodiscard]] Index ranks() const { return group_batches * group_heads * panels; }

  // Rank by rank over all groups; within a head the last panel, longest under a causal mask, first.
  [[nodiscard]] Visit visit(Index unit) const {
    const Index group = unit % groups(), rank = unit / groups();
    const Index head_groups = heads / group_heads;
    const Index member = rank / panels;
    return {group / head_groups * group_batches + member / group_heads,
            group % head_groups * group_heads + member % group_heads,
            panels - 1 - rank % panels, group, rank};
  }
};

// What all workers of a backward call share.
template <class Op, class T>
struct BackwardShared {
  const Saved<T>& saved;
  TensorView<const T> out, grad_out;
  Gradients<T> grads;
  PanelOrder order;
  Turnstiles& tiles;    // [group][tile]
  Turnstiles& commits;  // one gate, in unit order
  std::vector<T>& dfeatures;
  std::vector<T>& dprojected;
  std::vector<double>& dtables;  // [head][table_rows][dim_qk]
  std::vector<double>& dparams;  // all parameters, in visiting order
};

}  // namespace heed::inline HEED_ABI::detail
