// SPDX-License-Identifier: Apache-2.0
#pragma once

// Where shares of a call (Inputs::share) may begin and end.

#include <heed/engine/driver.hpp>
#include <heed/engine/op_tiles.hpp>
#include <heed/engine/queries.hpp>

#include <numeric>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
[[nodiscard]] Index step_of_shares(const OpTiles<Real>& op, Geometry g, const Options& options) {
  g.share = {};
  const Mask<Real> none;
  const BoundMask<Real> bound(none, g, "heed::share_step");
  const Plan forward = plan_call<Real>(op, g, bound, options, 0, false),
             backward = plan_call<Real>(op, g, bound, options, 0, true);
  return std::lcm(forward.lanes, backward.lanes * backward.group);
}

// Throws where an op cannot be computed in shares, or a share cuts through what is computed together.
template <class Real>
void require_share(const OpTiles<Real>& op, const Geometry& g, const Options& options,
                   const std::string& where) {
  if (g.share == Share{}) return;
  require(!op.readout.needs_rehearsal(), where,
          ": the op's rows depend on all rows of the call, a share of it has ", g.held_queries(),
          " of ", g.len_q);
  require(op.normaliser.traits.mergeable || g.held_keys() == g.len_kv, where,
          ": the op reads all keys of a row at once, a share of the call has ", g.held_keys(),
          " of ", g.len_kv);
  if (g.held_queries() == g.len_q) return;
  const Index step = step_of_shares(op, g, options);
  const auto fits = [&](Index at) { return at % step == 0 || at == g.len_q; };
  require(fits(g.share.queries_before) && fits(g.held_queries_end()), where,
          ": a share has queries [", g.share.queries_before, ", ", g.held_queries_end(), ") of ",
          g.len_q, "; it must begin and end at multiples of ", step,
          " (share_step()), or at the end");
}

}  // namespace detail

// A share of the queries of a call of these sizes begins at a multiple of this number, and ends at one or behind the last
// query: the panels of forward and the groups of panels of backward then are those of the whole call, and so are the bits of
// all that belongs to a query. It depends on the sizes, and on key_tile, panel_vectors and precision of the options, not on
// the mask.
template <class Op>
[[nodiscard]] Index share_step(const Op& op, const Geometry& g, const Options& options = {}) {
  const detail::OpTilesOf<Op> of(op);
  return detail::Driver<typename Op::Scalar>::share_step(of.tiles(), g, options);
}

}  // namespace HEED_ABI
}  // namespace heed
