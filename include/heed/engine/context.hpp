// SPDX-License-Identifier: Apache-2.0
#pragma once

// A call, checked and planned.

#include <heed/engine/derived_keys.hpp>
#include <heed/engine/plan.hpp>
#include <heed/engine/tile/bf16.hpp>
#include <heed/mask/bound_mask.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// What all panels of a call read.
template <class Real>
struct CallContext {
  const OpTiles<Real>& op;
  Geometry geometry;
  const BoundMask<Real>& mask;
  Operands<Real> in;
  Plan plan;
  Real scale;
  const DerivedKeys<Real>& keys;
  Dropout dropout = {};
  const PairProducts* pair_products =
      nullptr;  // those of Options::precision, where the call heeds it
  // A worker's own, where precision is mixed.
  Bf16Tile* bf16 = nullptr;
  // Where panels read keys and values: `in`, or a worker's tile of it.
  TensorView<const Real> key = in.key.plain(), value = in.value.plain();

  // Transposed queries carry this factor: the scale, so that a scaled dot product is a logit. A score or a soft
  // cap may also ask for what the scale has taken away. For them a factor that its inverse, or rows of any
  // ordinary size, would overflow or vanish with stays at the next bound, and logit_factor() is the rest, 0 for a
  // scale of 0. Rows of which a score adds up columns are as they are.
  [[nodiscard]] Real query_factor() const {
    constexpr Real least = std::is_same_v<Real, float> ? Real(0x1p-60) : Real(0x1p-400);
    if (op.score.columns) return 1;
    const Real size = std::abs(scale);
    if (plain() || (size >= least && size <= 1 / least)) return scale;
    return std::copysign(size < least ? least : 1 / least, scale);
  }
  // A logit, before its soft cap, over the scaled dot product.
  [[nodiscard]] Real logit_factor() const { return scale / query_factor(); }
  // Are scaled dot products logits as they are?
  [[nodiscard]] bool dots_are_logits() const {
    return scale == query_factor() && mask.soft_cap() == Real(0);
  }

  // Where the score reads dot products only times query feature 0 (NormedDots in plug/promises.hpp), what a pair
  // calls dot is the scaled one, projected products are scaled likewise, the feature has the inverse of the
  // factor, and neither overflows where their product does not. dscores stand for dL/d(scaled dot), and rows and
  // dQ carry the factor.
  [[nodiscard]] bool factor_in_feature() const { return op.score.traits.normed_dots; }
  // From scaled dot products to what pairs call dot, and from query feature 0 to what they have of it.
  [[nodiscard]] Real dot_factor() const {
    return factor_in_feature() ? Real(1) : 1 / query_factor();
  }
  [[nodiscard]] Real feature_factor() const {
    return factor_in_feature() ? 1 / query_factor() : Real(1);
  }
  // The factor of projected queries.
  [[nodiscard]] Real projected_factor() const {
    return factor_in_feature() ? query_factor() : Real(1);
  }
  // The part of the scale that dscores do not have in backward.
  [[nodiscard]] Real row_factor() const {
    return plain() || factor_in_feature() ? query_factor() : Real(1);
  }
  [[nodiscard]] LogitFactors<Real> logits() const {
    const Real cap = mask.soft_cap();
    return {dot_factor(),
            logit_factor(),
            cap,
            std::min(Real(1) / cap, std::numeric_limits<Real>::max()),
            feature_factor(),
            dots_are_logits()};
  }
  // Are the products of a panel of this many queries those of pairs of bfloat16? With few they are bound by memory, and
  // stay as they are.
  [[nodiscard]] bool in_bf16(Index rows) const { return bf16 && rows > kFewRows<Real>; }
  // Is panel `panel` of each head at hand?
  [[nodiscard]] bool holds(Index panel) const {
    const Index query = panel * plan.lanes;
    return query >= geometry.share.queries_before && query < geometry.held_queries_end();
  }
  // Groups that the panels of `heads` heads fill.
  [[nodiscard]] Index groups_of(Index heads) const {
    return (heads * plan.panels + plan.group - 1) / plan.group;
  }
  // Does the score pass have nothing to do?
  [[nodiscard]] bool plain() const {
    return op.score.traits.plain && mask.soft_cap() == Real(0) && scale != Real(0);
  }
};

// All but the plan, which the call's pass knows, follows from op and options.
template <class Real>
[[nodiscard]] CallContext<Real> make_context(const OpTiles<Real>& op, const Geometry& g,
                                             const BoundMask<Real>& mask, const Operands<Real>& in,
                                             const DerivedKeys<Real>& keys, const Options& options,
                                             const Plan& plan) {
  return {op,
          g,
          mask,
          in,
          plan,
          Real(scale_of(op, g, options)),
          keys,
          options.dropout,
          op.score.columns ? nullptr : options.precision.products()};
}

// Workers that build(scratch) makes run(batch, head, group) all groups of panels of all heads, after begin(workers).
template <class Real, class Build, class Begin>
void run_groups(const CallContext<Real>& c, const Options& options, Build&& build, Begin&& begin) {
  const Geometry& g = c.geometry;
  const Index groups = c.groups_of(1), units = g.batch * g.heads * groups;
  const Index elements = scratch_elements<Real>(build);
  const int workers = worker_count(options, g, units, elements * Index(sizeof(Real)));
  begin(workers);
  if (units == 0) return;
  Dispenser dispenser(units);
  run_workers(workers, [&](int) {
    Scratch<Real> scratch(elements);
    auto worker = build(scratch);
    // Longest groups first: under a causal mask the last one.
    for (Index unit = dispenser.next(); unit >= 0; unit = dispenser.next())
      worker.run(unit / groups / g.heads, unit / groups % g.heads, groups - 1 - unit % groups);
  });
}

}  // namespace HEED_ABI
}  // namespace heed
