// SPDX-License-Identifier: Apache-2.0
#pragma once

// A streaming panel of few queries, as in decoding: each query has a row of scores, keys along the lanes,
// so that vectors are full. What QuerySide and TileMask do to tiles, for rows.

#include <heed/engine/queries.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Op, class Real>
class FewQueries {
 public:
  using Normaliser = typename Op::NormaliserType;
  using P = Pack<Real>;

  FewQueries(const CallContext<Op, Real>& c, Scratch<Real>& scratch)
      : c_(c), stride_(whole_vectors<Real>(c.plan.tile)) {
    rows_ = scratch.take(kNarrowRows<Real> * stride_);
    projected_ = scratch.take(c.keys.needs().rank > 0 ? stride_ : 0);
    hidden_ = scratch.take(stride_);
  }

  // Scores of all queries; top[i] is raised to the largest of query i.
  void score(const Panel<Op, Real>& panel, const PanelTile& tile, Real* top) const {
    for (Index i = 0; i < tile.at.rows; ++i) {
      Real* row = rows_ + i * stride_;
      panel.query[0].row_scores(tile.at, i, row, projected_);
      if (c_.mask.has_slopes()) add_slopes(tile.at, i, row);
      if (c_.mask.has_bias()) add_bias(tile.at, i, row);
      if (tile.hides_pairs) hide(tile.at, i, row);
      std::fill(row + tile.at.keys, row + whole_vectors<Real>(tile.at.keys), -kInfinity<Real>);
      P largest = top[i];
      for (Index j = 0; j < tile.at.keys; j += kLanes<Real>)
        largest = max(P::load(row + j), largest);
      for (int k = 0; k < kLanes<Real>; ++k) top[i] = std::max(top[i], largest.lane(k));
    }
  }

  // Scores become unnormalised weights; their sums are added to the state.
  void weigh(const PanelTile& tile, const SoftmaxState<Real>& state) const {
    for (Index i = 0; i < tile.at.rows; ++i) {
      Real* row = rows_ + i * stride_;
      const P shift = state.shift[i], base = lane_of(Normaliser::exponent_base(state, 0), i);
      P sum = Real(0);
      for (Index j = 0; j < tile.at.keys; j += kLanes<Real>) {
        const P weight = Normaliser::weight_of(P::load(row + j), shift, base);
        weight.store(row + j);
        sum += weight;
      }
      state.sum[i] += sum_lanes(sum);
    }
  }

  void drop(const Panel<Op, Real>& panel, const PanelTile& tile) const {
    if (!panel.dropout.drops()) return;
    for (Index i = 0; i < tile.at.rows; ++i) {
      Real* row = rows_ + i * stride_;
      Dropper<Real> dropper = panel.dropout.along_keys(i, tile.at.key);
      for (Index j = 0; j < tile.at.keys; j += kLanes<Real>) {
        dropper.next();
        dropper(P::load(row + j)).store(row + j);
      }
    }
  }

  // out[column][i] += sum over keys of weights * values, for a tile that hides no pair. Values are read as they are
  // stored.
  void mix(const PanelTile& tile, const LaneTile<Real>& out) const {
    const TilePlace& at = tile.at;
    c_.in.value.visit([&](const auto& value) {
      const auto* rows = value.row(at.batch, c_.geometry.kv_head(at.head), at.key);
      for (Index i = 0; i < at.rows; ++i)
        row_mix(rows, value.strides().row, at.keys, c_.geometry.dim_v, rows_ + i * stride_, 1,
                out.data + i, out.lanes);
    });
  }
  // The same where pairs are hidden. What the value of a hidden key holds does not matter; `copy` has room for the
  // tile's values.
  void mix_visible(const PanelTile& tile, const Rows<Real>& values, const LaneTile<Real>& out,
                   Real* copy) const {
    const bool finite = all_finite(values);
    for (Index i = 0; i < tile.at.rows; ++i) {
      const Rows<Real> own = finite ? values : without_hidden(tile.at, i, values, copy);
      row_mix(own.data, own.stride, own.count, own.columns, rows_ + i * stride_, 1, out.data + i,
              out.lanes);
    }
  }

 private:
  [[nodiscard]] static Real lane_of(P p, Index i) { return p.lane(int(i)); }

  void add_slopes(const TilePlace& at, Index i, Real* row) const {
    const Real slope = c_.mask.slope(at.head);
    const Real origin = Real(at.query + i + c_.mask.slope_shift() - at.key);
    for (Index j = 0; j < at.keys; ++j) row[j] -= slope * std::abs(origin - Real(j));
  }

  void add_bias(const TilePlace& at, Index i, Real* row) const {
    const Real* bias = c_.mask.bias_row(at.batch, at.head, at.query + i) + at.key;
    for (Index j = 0; j < at.keys; ++j)
      row[j] = bias[j] == -kInfinity<Real> ? -kInfinity<Real> : row[j] + bias[j];
  }

  // -infinity where the mask hides the pair.
  void hide(const TilePlace& at, Index i, Real* row) const {
    c_.mask.for_hidden_keys(at.batch, at.head, at.query + i, at.key, at.key + at.keys,
                            [&](Index j) { row[j - at.key] = -kInfinity<Real>; });
  }

  // A copy of the values with zeros where query i does not see the key.
  [[nodiscard]] Rows<Real> without_hidden(const TilePlace& at, Index i, const Rows<Real>& values,
                                          Real* copy) const {
    std::fill(hidden_, hidden_ + at.keys, Real(0));
    hide(at, i, hidden_);
    for (Index j = 0; j < values.count; ++j)
      for (Index col = 0; col < values.columns; ++col)
        copy[j * values.columns + col] = hidden_[j] == Real(0) ? values.row(j)[col] : Real(0);
    return {copy, values.count, values.columns, values.columns};
  }

  const CallContext<Op, Real>& c_;
  Index stride_;
  Real *rows_, *projected_, *hidden_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
