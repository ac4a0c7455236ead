// SPDX-License-Identifier: Apache-2.0
#pragma once

// Keys that belong to the op and not to the sequence (learnt_keys in plug/streaming.hpp): a tile of a panel of its own, which
// every query sees, ahead of the sequence's tiles. With the scores s_r = scale q . k_r, and with X_r = v_r . dmixed:
//
//   dq += scale sum_r ds_r k_r      dk_r += scale sum over queries of ds_r q      dv_r += sum over queries of p_r dmixed
//
// Dropout counts them behind the sequence's keys.

#include <heed/engine/context.hpp>
#include <heed/engine/tile/panel_rows.hpp>
#include <heed/simd/panel_gemm.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class LearntTile {
 public:
  // second: has the walk use for `other`?
  LearntTile(const CallContext<Real>& c, bool second, Scratch<Real>& scratch)
      : c_(c), of_op_(c.op.normaliser.learnt) {
    const Index lanes = c.plan.lanes, count = of_op_.count;
    scores = take_lanes(scratch, count, lanes);
    other = take_lanes(scratch, second ? count : 0, lanes);
    query = take_lanes(scratch, count > 0 ? c.geometry.dim_qk : 0, lanes);
  }

  LaneTile<Real> scores, other;         // [key][lanes]
  LaneTile<Real> query;                 // [dim_qk][lanes], times the scale
  LearntRows<const Real> of_head = {};  // those of the panel
  TilePlace place;

  // Where the keys of a row are split, the part that has the first one counts them.
  [[nodiscard]] bool given() const { return of_op_.count > 0 && c_.mask.has_first_key(); }
  // scores = scale q . k_r for a panel's queries; raises top, [lanes], to their maxima.
  void load(const TilePlace& panel, Real* top) {
    const Geometry& g = c_.geometry;
    require(of_op_.heads == 1 || of_op_.heads == g.heads, "heed: learnt keys are those of ",
            of_op_.heads, " heads, the call has ", g.heads);
    of_head = of_op_.of_head(panel.head);
    place = {panel.batch, panel.head, panel.query, panel.rows, g.len_kv, of_op_.count};
    load_query(c_.in.query);
    dots(Store::overwrite_and_max, of_head.keys, query, scores, top);
  }
  // Rows of the panel's queries, or their tangents.
  void load_query(const TensorView<const Real>& from) {
    query.fill(Real(0));
    if (from.given())
      pack_lanes(from.row(place.batch, place.head, place.query), from.strides().row, place.rows,
                 query.rows, query.data, query.lanes, c_.scale);
  }
  // to = rows . lanes
  void dots(Store store, const Real* rows, const LaneTile<Real>& lanes, const LaneTile<Real>& to,
            Real* top = nullptr) const {
    if (rows)
      panel_gemm(store, to.rows, lanes.rows, c_.plan.vectors, Broadcast<Real>{rows, lanes.rows, 1},
                 lanes.data, lanes.lanes, to.data, to.lanes, top);
  }
  // to += rows^T weights
  void mix(const Real* rows, const LaneTile<Real>& weights, const LaneTile<Real>& to) const {
    if (rows)
      panel_gemm(Store::add, to.rows, weights.rows, c_.plan.vectors,
                 Broadcast<Real>{rows, 1, to.rows}, weights.data, weights.lanes, to.data, to.lanes);
  }
  // Backward, once scores hold weights p and `other` ds: adds to dquery, [dim_qk][lanes], and to the gradients of the rows.
  void chain(const LaneTile<Real>& dmixed, const LaneTile<Real>& dquery,
             const LearntRows<Real>& to) const {
    const auto add = [&](const LaneTile<Real>& of, const LaneTile<Real>& with, Real* sums) {
      for (Index n = 0; n < of.rows * with.rows && sums; ++n)
        for (int v = 0; v < c_.plan.vectors; ++v)
          sums[n] += Real(sum_valid_lanes(of.load(n / with.rows, v) * with.load(n % with.rows, v),
                                          v, place.rows));
    };
    add(other, query, to.keys);
    add(scores, dmixed, to.values);
    for (Index r = 0; r < other.rows; ++r)
      for (int v = 0; v < c_.plan.vectors; ++v) other.store(r, v, other.load(r, v) * c_.scale);
    mix(of_head.keys, other, dquery);
  }

 private:
  const CallContext<Real>& c_;
  const LearntOfOp<Real>& of_op_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
