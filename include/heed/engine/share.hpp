// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where shares of a call (Inputs::share) may begin and end.

#include <heed/engine/queries.hpp>

#include <numeric>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// May the keys of a row be visited in shares, whose states are joined?
template <class Op>
inline constexpr bool keys_in_shares =
    mergeable<typename Op::NormaliserType> && !Op::ScoreType::counts_visible;

}  // namespace detail

// A share of the queries of a call of these sizes begins at a multiple of this number, and ends at one or behind the last
// query: the panels of forward and the groups of panels of backward then are those of the whole call, and so are the bits of
// all that belongs to a query. It depends on the sizes, and on key_tile, panel_vectors and precision of the options, not on
// the mask.
template <class Op>
[[nodiscard]] Index share_step(const Op& op, Geometry g, const Options& options = {}) {
  using Real = typename Op::Scalar;
  g.share = {};
  const Mask<Real> none;
  const BoundMask<Real> bound(none, g, "heed::share_step");
  const Plan forward = detail::plan_call<Real>(op, g, bound, options, 0, false),
             backward = detail::plan_call<Real>(op, g, bound, options, 0, true);
  return std::lcm(forward.lanes, backward.lanes * backward.group);
}

}  // namespace HEED_ABI
}  // namespace heed
