// SPDX-License-Identifier: Apache-2.0
#pragma once

// A panel's own rows for the readout, and its whole-row scratch for row normalisers.

#include <heed/engine/query_side.hpp>

namespace heed::inline HEED_ABI::detail {

// Mixed rows in and out of lanes, for readouts.
template <class Op, class T>
class PanelReadout {
 public:
  using Readout = typename Op::ReadoutType;

  PanelReadout(const CallContext<Op, T>& c, Scratch<T>& scratch, bool backward) : c_(c) {
    const Index lanes = c.plan.lanes;
    const auto take = [&](Index rows) { return LaneTile<T>{scratch.take(rows * lanes), rows, lanes}; };
    query_ = take(query_dim(c.geometry));
    own_key_ = take(own_dim(c.geometry, c.geometry.dim_qk));
    own_value_ = take(own_dim(c.geometry, c.geometry.dim_v));
    extra_ = take(c.op.extra_dim(c.geometry));
    work_ = take(c.op.readout.work_rows(c.geometry, backward));
    diagnostics_ = take(Readout::diagnostics);
  }
  [[nodiscard]] static Index elements(const CallContext<Op, T>& c, bool backward) {
    const Geometry& g = c.geometry;
    Index sum = 0;
    for (const Index rows : {query_dim(g), own_dim(g, g.dim_qk), own_dim(g, g.dim_v),
                             c.op.extra_dim(g), c.op.readout.work_rows(g, backward),
                             Index(Readout::diagnostics)})
      sum += Scratch<T>::padded(rows * c.plan.lanes);
    return sum;
  }
  [[nodiscard]] static Index query_dim(const Geometry& g) {
    return Readout::uses_query ? g.dim_qk : 0;
  }
  [[nodiscard]] static Index own_dim(const Geometry& g, Index dim) {
    (void)g;
    return Readout::uses_own_rows ? dim : 0;
  }

  // Transposes what the readout reads of the panel's own rows.
  [[nodiscard]] ReadoutPanel<T> load(const TilePlace& place, const LaneTile<T>& tile) const {
    const auto fetch = [&](const TensorView<const T>& view, Index head, const LaneTile<T>& lanes) {
      if (lanes.rows > 0)
        pack_lanes(view.row(place.batch, head, place.query), view.strides().row, place.rows,
                   lanes.rows, lanes.data, lanes.lanes);
    };
    const Index kv = c_.geometry.kv_head(place.head);
    fetch(c_.in.query, place.head, query_);
    fetch(c_.in.key, kv, own_key_);
    fetch(c_.in.value, kv, own_value_);
    fetch(c_.in.extra, place.head, extra_);
    ReadoutPanel<T> panel;
    panel.geometry = c_.geometry;
    panel.batch = place.batch;
    panel.head = place.head;
    panel.first_row = place.query;
    panel.valid_lanes = place.rows;
    panel.vectors = c_.plan.vectors;
    panel.tile = tile;
    panel.query = query_.constant();
    panel.own_key = own_key_.constant();
    panel.own_value = own_value_.constant();
    panel.extra = extra_.constant();
    panel.work = work_;
    panel.diagnostics = diagnostics_;
    return panel;
  }

 private:
  const CallContext<Op, T>& c_;
  LaneTile<T> query_, own_key_, own_value_, extra_, work_, diagnostics_;
};

// Lanes that a row normaliser reports or reads: scratch beside its tiles.
template <class Op, class T>
struct RowScratch {
  using Normaliser = typename Op::NormaliserType;
  LaneTile<T> scores[2], work;
  T *max[2], *lse[2], *diagnostics;

  [[nodiscard]] static Index tiles(const Op& op, bool backward) {
    if constexpr (Normaliser::streams)
      return 0;
    else
      return Normaliser::maps + op.normaliser.work_tiles(backward);
  }
  [[nodiscard]] static Index elements(const CallContext<Op, T>& c, bool backward) {
    if constexpr (Normaliser::streams) return 0;
    const Index lanes = c.plan.lanes, row = Scratch<T>::padded(c.geometry.len_kv * lanes);
    return tiles(c.op, backward) * row + Scratch<T>::padded((4 + Normaliser::diagnostics) * lanes);
  }
  RowScratch(const CallContext<Op, T>& c, Scratch<T>& scratch, bool backward) {
    if constexpr (!Normaliser::streams) {
      const Index lanes = c.plan.lanes, keys = c.geometry.len_kv;
      for (int m = 0; m < Normaliser::maps; ++m)
        scores[m] = {scratch.take(keys * lanes), keys, lanes};
      const Index rows = c.op.normaliser.work_tiles(backward) * keys;
      work = {scratch.take(rows * lanes), rows, lanes};
      T* lanes_memory = scratch.take((4 + Normaliser::diagnostics) * lanes);
      for (int m = 0; m < 2; ++m) {
        max[m] = lanes_memory + m * lanes;
        lse[m] = lanes_memory + (2 + m) * lanes;
      }
      diagnostics = lanes_memory + 4 * lanes;
    }
  }
};

}  // namespace heed::inline HEED_ABI::detail
