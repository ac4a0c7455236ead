// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward: one skeleton for every variant. Panels of queries walk over tiles of keys:
//
//   streaming normaliser   per tile: scores -> weights -> out += V^T weights
//   row normaliser         all tiles: scores; once: scores -> weights; all tiles: out += V^T weights
//   few rows, many keys    parts of the keys side by side, as above; once: their states are joined in their order
//
// Parallel over (batch, key-value head, group of panels): the panels of a group, of one query head or of
// several that share keys and values, take turns at each tile while it is in cache. A group is computed
// the same way by whichever thread takes it.
//
// Memory  per worker O(tile) for streaming ops, O(len_kv) for row normalisers (see plan.hpp).

#include <heed/core/fixed_list.hpp>
#include <heed/engine/fold_heads.hpp>
#include <heed/engine/tile/few_queries.hpp>

#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// A panel and what it mixes.
template <class Real>
struct ForwardPanel {
  Panel<Real> panel;
  LaneTile<Real> out;  // [dim_v][lanes]
  LaneTile<Real>
      states;            // of a streaming normaliser: [number][lanes], the sum of the weights first
  RowBlock<Real> block;  // of a row normaliser

  ForwardPanel(const CallContext<Real>& c, Scratch<Real>& scratch)
      : panel(c, scratch, false),
        out{scratch.take(c.geometry.dim_v * c.plan.lanes), c.geometry.dim_v, c.plan.lanes},
        states{scratch.take(c.op.normaliser.traits.state_numbers * c.plan.lanes),
               c.op.normaliser.traits.state_numbers, c.plan.lanes} {}
};

template <class Real>
class ForwardWorker {
 public:
  using Context = CallContext<Real>;

  // lazy_keys: the keys' side values if this worker computes them while their tile is in cache, or null.
  ForwardWorker(const Context& c, const OutputSet<TensorView<Real>>& out, Saved<Real>* saved,
                KeySide<Real>* lazy_keys, Scratch<Real>& scratch)
      : traits_(c.op.normaliser.traits),
        readout_(c.op.readout.traits),
        maps_(c.op.maps()),
        keys_(c.in.key, c.plan.tile, !c.keys.needs().keys_by_group, scratch),
        values_(c.in.value, c.plan.tile, false, scratch),
        mixed_(c.pair_products, c.geometry, c.plan.tile, c.plan.lanes, maps_, false, scratch),
        c_(c),
        to_(out),
        saved_(saved),
        lazy_keys_(lazy_keys),
        tiles_{0, c.plan.tiles},
        few_(c_, scratch),
        panels_(c.plan.group),
        parts_(c.plan.group),
        seers_(c.plan.group) {
    c_.key = keys_.view();
    c_.value = values_.view();
    if (c.pair_products) c_.mixed = &mixed_;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    for (Index i = 0; i < c.plan.group; ++i) panels_.emplace(c_, scratch);
    scores_ = {scratch.take(tile * lanes), tile, lanes};
    projected_ = {scratch.take(tile * lanes), tile, lanes};
    marks_ = scratch.take(tile * lanes);
    copy_ = scratch.take(tile * c.geometry.dim_v);
    if (lazy_keys) side_tiles_ = lazy_keys->take_tiles(scratch);
    tile_max_ = scratch.take(lanes);
    rescale_ = scratch.take(lanes);
  }

  // Mixes values for a group of panels and leaves them, normalised, in lanes.
  void mix(Index b, Index kv_head, Index group) {
    move_to(b, kv_head, group);
    load_queries();
    if (traits_.streams) {
      mix_streaming();
      for (My& my : active()) finish(my);
    } else {
      mix_rows();
    }
    if (saved_ && !saved_->mixed.empty())
      for (const My& my : active()) save_mixed(my);
  }

  // One of `parts` parts of the keys: leaves states and sums in `to`, which has room for part_elements() numbers.
  void mix_part(Index b, Index kv_head, Index part, Index parts, Real* to) {
    move_to(b, kv_head, 0);
    load_queries();
    tiles_ = {part * c_.plan.tiles / parts, (part + 1) * c_.plan.tiles / parts};
    mix_streaming();
    for (const My& my : active()) {
      std::copy_n(my.states.data, states_size(), to);
      std::copy_n(my.out.data, out_size(), to + states_size());
      to += panel_elements();
    }
  }
  // Joins what mix_part() has left of all parts, and leaves the rows normalised in lanes.
  void join_parts(Index b, Index kv_head, Index parts, Real* from) {
    move_to(b, kv_head, 0);
    Index n = 0;
    for (My& my : active()) {
      Real* part = from + n++ * panel_elements();
      std::copy_n(part, states_size(), my.states.data);
      std::copy_n(part + states_size(), out_size(), my.out.data);
      for (Index p = 1; p < parts; ++p) join(my, part + p * part_elements(c_));
      finish(my);
      if (saved_ && !saved_->mixed.empty()) save_mixed(my);
    }
  }
  [[nodiscard]] static Index part_elements(const Context& c) {
    return c.plan.group * c.plan.lanes * (c.op.normaliser.traits.state_numbers + c.geometry.dim_v);
  }

  // Applies the readout and writes the rows to user memory.
  void write_out() {
    for (My& my : active()) write_out(my);
  }

 private:
  using My = ForwardPanel<Real>;
  static constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

  [[nodiscard]] std::span<My> active() { return {panels_.data(), std::size_t(active_)}; }
  // The panels of a key-value head's readers, head by head, in groups. In a share of a call, the panels at hand are
  // computed, in the parts of tiles in which the whole group is.
  void move_to(Index b, Index kv_head, Index group) {
    active_ = 0;
    built_tile_ = finite_key_ = -1;
    const Index readers = c_.geometry.group(), panels = c_.plan.panels;
    const Index first = group * c_.plan.group,
                end = std::min(first + c_.plan.group, readers * panels);
    few_queries_ = true;
    for (Index item = first; item < end; ++item) {
      Panel<Real>& panel = panels_[std::size_t(active_)].panel;
      panel.move_to(b, kv_head * readers + item / panels, item % panels);
      const KeyRange& seen = panel.seen_by_all;
      core_ = item == first
                  ? seen
                  : KeyRange{std::max(core_.begin, seen.begin), std::min(core_.end, seen.end)};
      few_queries_ = few_queries_ && panel.place.rows <= kNarrowRows<Real>;
      if (c_.holds(item % panels)) ++active_;
    }
  }

  void load_queries() {
    for (My& my : active()) {
      my.panel.load_queries();
      my.out.fill(Real(0));
    }
  }

  // The keys of tile t that some panel sees.
  [[nodiscard]] KeyRange seen_keys(Index t) {
    KeyRange seen{c_.geometry.len_kv, 0};
    for (const My& my : active()) {
      seen.begin = std::min(seen.begin, my.panel.seen_by_any.begin);
      seen.end = std::max(seen.end, my.panel.seen_by_any.end);
    }
    return {std::max(seen.begin, t * c_.plan.tile), std::min(seen.end, (t + 1) * c_.plan.tile)};
  }
  void load_tile(const TileOfRows<Real>& rows, Index t) {
    const KeyRange keys = seen_keys(t);
    const auto sees = [&](const My& my) { return my.panel.tile(keys).kind != TileKind::empty; };
    if (!rows.copies() || std::none_of(active().begin(), active().end(), sees)) return;
    const TilePlace& place = panels_[0].panel.place;
    rows.load(place.batch, c_.geometry.kv_head(place.head), keys.begin, keys.size());
  }

  // body(keys), part of a tile by part. load(t) comes before tile t.
  template <class Load, class Body>
  void for_key_parts(Load&& load, Body&& body) {
    for (Index t = tiles_.begin; t < tiles_.end; ++t) {
      load(t);
      mixed_.forget();
      for_parts(c_.plan, t, c_.geometry.len_kv, core_, body);
    }
  }
  // body(my, tile) and empty(my, tile) for all panels in each of these parts.
  template <class Load, class Body, class Empty>
  void for_tiles(Load&& load, Body&& body, Empty&& empty) {
    for_key_parts(load, [&](const KeyRange& keys) {
      for (My& my : active()) {
        const PanelTile tile = my.panel.tile(keys);
        if (tile.kind == TileKind::empty)
          empty(my, tile);
        else
          body(my, tile);
      }
    });
  }

  // Invariant, behind each tile: of all keys j so far, with the state as it is
  //   state.sum = sum_j weight(state, score_j),   out = sum_j weight(state, score_j) v_j
  // and the normaliser knows of a maximum that no score is above.
  void mix_streaming() {
    for (My& my : active())
      for (int v = 0; v < c_.plan.vectors; ++v)
        c_.op.normaliser.begin(my.panel.queries(v), v, my.states);
    if (few_queries_)
      // They read keys and values as they are stored.
      for_key_parts(
          [&](Index t) {
            if (lazy_keys_ && c_.keys.needs().any) load_tile(keys_, t);
          },
          [&](const KeyRange& keys) { mix_few(active(), keys); });
    else
      for_tiles(
          [&](Index t) {
            load_tile(keys_, t);
            load_tile(values_, t);
          },
          [&](My& my, const PanelTile& tile) { mix_streaming(my, tile); },
          [](My&, const PanelTile&) {});
  }

  // Numbers that mix_part() writes per panel: its states, and sums of values.
  [[nodiscard]] Index states_size() const { return traits_.state_numbers * c_.plan.lanes; }
  [[nodiscard]] Index out_size() const { return c_.geometry.dim_v * c_.plan.lanes; }
  [[nodiscard]] Index panel_elements() const { return part_elements(c_) / c_.plan.group; }
  // Adds a part: out = factor * out + factor' * out', and likewise the sums.
  void join(My& my, Real* part) {
    const LaneTile<Real> others{part, traits_.state_numbers, c_.plan.lanes};
    const LaneTile<Real> out{part + states_size(), my.out.rows, my.out.lanes};
    Real *const factors = rescale_, *const other_factors = tile_max_;
    c_.op.normaliser.join(my.states, others, c_.plan.vectors, factors, other_factors);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Pack<Real> factor = Pack<Real>::load(factors + v * kLanes<Real>),
                       other_factor = Pack<Real>::load(other_factors + v * kLanes<Real>);
      for (Index col = 0; col < my.out.rows; ++col)
        my.out.store(col, v, my.out.load(col, v) * factor + out.load(col, v) * other_factor);
    }
  }

  // All keys are seen: out becomes finish(state) * out.
  void finish(My& my) {
    Real* sums = my.states.row(0);
    if (traits_.needs_weight)
      for (Index i = 0; i < my.panel.place.rows; ++i)
        if (sums[i] == Real(0) && my.panel.sees_any(i)) sums[i] = kNan;
    c_.op.normaliser.finish(my.states, c_.plan.vectors, rescale_, my.panel.lse.row(0));
    scale_out(my);
    if (!saved_) return;
    for (Index n = 0; n < traits_.state_numbers; ++n)
      std::copy_n(my.states.row(n), my.panel.place.rows,
                  saved_->state.data() + my.panel.first_row() + n * c_.geometry.query_rows());
    save_lse(my);
  }
  // out *= rescale_
  void scale_out(My& my) {
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Pack<Real> factor = Pack<Real>::load(rescale_ + v * kLanes<Real>);
      for (Index col = 0; col < my.out.rows; ++col)
        my.out.store(col, v, my.out.load(col, v) * factor);
    }
  }

  // Panels of few queries and a part of a tile.
  void mix_few(std::span<My> panels, const KeyRange& keys) {
    parts_.clear();
    seers_.clear();
    Index queries = 0;
    for (My& my : panels) {
      const PanelTile tile = my.panel.tile(keys);
      if (tile.kind == TileKind::empty) continue;
      parts_.emplace(&my.panel, tile, my.out, queries);
      seers_.emplace(&my);
      queries += tile.at.rows;
    }
    const bool transforms = c_.op.score.traits.has_transform;
    if (transforms)
      for (const auto& part : parts_) build_side_values(part.tile.at);
    few_.dot({parts_.data(), parts_.size()});
    for (std::size_t n = 0; n < parts_.size(); ++n) {
      const auto& part = parts_[n];
      My& my = *seers_[n];
      if (!transforms) build_side_values(part.tile.at);
      std::fill(tile_max_, tile_max_ + c_.plan.lanes, -kInfinity<Real>);
      few_.score(part, tile_max_);
      move_references(my);
      few_.weigh(part, my.states);
      few_.drop(part);
      if (!part.tile.hides_pairs) continue;
      const TilePlace& at = part.tile.at;
      values_.load(at.batch, c_.geometry.kv_head(at.head), at.key, at.keys);
      few_.mix_visible(part, my.panel.values(at), copy_);
    }
    few_.mix({parts_.data(), parts_.size()});
  }

  void mix_streaming(My& my, const PanelTile& tile) {
    if (tile.at.rows <= kNarrowRows<Real>)
      return mix_few({&my, 1}, {tile.at.key, tile.at.key + tile.at.keys});
    build_side_values(tile.at);
    std::fill(tile_max_, tile_max_ + c_.plan.lanes, -kInfinity<Real>);
    const LaneTile<Real> scores = scores_.part(0, tile.at.keys);
    my.panel.query[0].tile_scores(tile.at, tile.kind, scores, projected_, tile_max_);
    move_references(my);
    mix_tile(my, tile, scores, [&] {
      c_.op.normaliser.weigh(scores, tile.at, c_.plan.vectors, my.states);
      my.panel.dropout.drop(scores, tile.at);
    });
  }

  // Builds the key features of the tile containing `at`, unless the group's previous panel already has.
  void build_side_values(const TilePlace& at) {
    if (!lazy_keys_) return;
    const Index tile = at.key / c_.plan.tile;
    if (tile == built_tile_ && c_.keys.shares(built_head_, at.head)) return;
    built_tile_ = tile;
    built_head_ = at.head;
    const KeyRange keys = seen_keys(tile);
    lazy_keys_->build(side_tiles_, c_.key, at.batch, at.head, keys.begin, keys.size());
  }

  // Tells the normaliser the maximum of the tile, and rescales what was mixed and summed before.
  void move_references(My& my) {
    if (c_.op.normaliser.move(my.states, tile_max_, rescale_, c_.plan.vectors)) scale_out(my);
  }

  // All tiles: scores into whole rows; once: scores become weights; all tiles: out += V^T weights.
  void mix_rows() {
    for (My& my : active()) my.block = my.panel.row_block();
    const auto part = [](const My& my, int m, const TilePlace& at) {
      return my.block.scores[std::size_t(m)].part(at.key - my.panel.seen_by_any.begin, at.keys);
    };
    for_tiles([&](Index t) { load_tile(keys_, t); },
              [&](My& my, const PanelTile& tile) {
                build_side_values(tile.at);
                for (int m = 0; m < maps_; ++m)
                  my.panel.query[std::size_t(m)].tile_scores(tile.at, tile.kind,
                                                             part(my, m, tile.at), projected_,
                                                             my.panel.rows.max[std::size_t(m)]);
              },
              [&](My& my, const PanelTile& tile) {
                for (int m = 0; m < maps_; ++m) part(my, m, tile.at).fill(-kInfinity<Real>);
              });
    for (My& my : active()) {
      if (traits_.uses_extra || traits_.uses_query) {
        const ReadoutPanel<Real> own = my.panel.readout.load(my.panel.place, my.out);
        my.block.extra = own.extra.data;
        my.block.query = own.query;
      }
      c_.op.normaliser.weights(my.block);
    }
    for_tiles([&](Index t) { load_tile(values_, t); },
              [&](My& my, const PanelTile& tile) {
                const LaneTile<Real> weights = part(my, 0, tile.at);
                mix_tile(my, tile, weights, [&] { my.panel.dropout.drop(weights, tile.at); });
              },
              [](My&, const PanelTile&) {});
    for (My& my : active()) {
      for (Index i = 0; i < my.panel.place.rows; ++i)
        if (my.panel.rows.saw_nothing(i) && my.panel.sees_any(i)) spoil_row(my, i);
      if (!saved_) continue;
      save_lse(my);
      save_diagnostics(my, my.block.diagnostics, 0, traits_.diagnostics);
    }
  }

  // All that query i of the panel has given is NaN: all visible scores of a map are -infinity or NaN.
  void spoil_row(My& my, Index i) {
    for (Index col = 0; col < my.out.rows; ++col) my.out.row(col)[i] = kNan;
    for (int m = 0; m < maps_; ++m)
      if (my.panel.rows.max[std::size_t(m)][i] == -kInfinity<Real>) my.panel.lse.row(m)[i] = kNan;
    for (int d = 0; d < traits_.diagnostics; ++d)
      my.panel.rows.diagnostics[d * c_.plan.lanes + i] = kNan;
  }

  // out += V^T weights over one tile; `weigh` turns what `weights` holds into them.
  template <class Weigh>
  void mix_tile(My& my, const PanelTile& tile, const LaneTile<Real>& weights, Weigh&& weigh) {
    const TilePlace& at = tile.at;
    const Rows<Real> values = my.panel.values(at);
    if constexpr (std::is_same_v<Real, float>)
      if (c_.mixes(at.rows)) return mix_pairs(my, tile, values, weights, weigh);
    const bool plainly = !tile.hides_pairs || finite(at, values);
    const LaneTile<Real> marks{marks_, at.keys, weights.lanes};
    if (!plainly) my.panel.mark_hidden(at, tile.kind, marks);
    weigh();
    for_strips(at, c_.plan.vectors, [&](const Strip& strip) {
      const Rows<Real> own = values.part(strip.keys.begin, strip.keys.size());
      const LaneTile<Real> of = strip.of(weights), out = strip.lanes_of(my.out);
      if (plainly)
        add_lane_product(own, of, strip.vectors, at.rows, out);
      else
        add_lane_product_guarded(own, of, strip.of(marks), strip.vectors, at.rows, out, copy_);
    });
  }

  // The same in mixed precision.
  template <class Weigh>
  void mix_pairs(My& my, const PanelTile& tile, const Rows<Real>& values,
                 const LaneTile<Real>& weights, Weigh&& weigh) {
    LaneTile<Real> marks{marks_, 0, weights.lanes};
    if (tile.hides_pairs && !mixed_.value_rows.finite(values)) {
      marks.rows = tile.at.keys;
      my.panel.mark_hidden(tile.at, tile.kind, marks);
    }
    weigh();
    mixed_.add_lane_product(mixed_.value_rows, values, weights, marks, c_.plan.vectors, my.out);
  }

  // The panels of a group ask in turn about the same values.
  [[nodiscard]] bool finite(const TilePlace& at, const Rows<Real>& values) {
    if (at.key != finite_key_ || at.keys != finite_keys_) finite_ = all_finite(values);
    finite_key_ = at.key;
    finite_keys_ = at.keys;
    return finite_;
  }

  void write_out(My& my) {
    const TilePlace& place = my.panel.place;
    if (!readout_.identity) {
      ReadoutPanel<Real> panel = my.panel.readout.load(place, my.out);
      panel.lse = my.panel.lse.constant();
      c_.op.readout.read_out(panel);
      if (saved_)
        save_diagnostics(my, panel.diagnostics.data, traits_.diagnostics, readout_.diagnostics);
      if (readout_.counts_steps && to_.steps.given())
        unpack_lanes(panel.steps.data, my.out.lanes, place.rows, panel.steps.rows,
                     to_.steps.row(place.batch, place.head, place.query), to_.steps.strides().row);
    }
    unpack_lanes(my.out.data, my.out.lanes, place.rows, c_.geometry.dim_v,
                 to_.out.row(place.batch, place.head, place.query), to_.out.strides().row);
    if (to_.lse.given())
      unpack_lanes(my.panel.lse.data, my.panel.lse.lanes, place.rows, maps_,
                   to_.lse.row(place.batch, place.head, place.query), to_.lse.strides().row);
  }

  void save_lse(const My& my) {
    const LaneTile<Real>& lse = my.panel.lse;
    for (int m = 0; m < maps_; ++m)
      std::copy(lse.row(m), lse.row(m) + my.panel.place.rows,
                saved_->lse.data() + m * c_.geometry.query_rows() + my.panel.first_row());
  }
  void save_diagnostics(const My& my, const Real* lanes, int first, int count) {
    for (int d = 0; d < count; ++d)
      std::copy(lanes + d * c_.plan.lanes, lanes + d * c_.plan.lanes + my.panel.place.rows,
                saved_->diagnostics[std::size_t(first + d)].data() + my.panel.first_row());
  }
  void save_mixed(const My& my) {
    const Index dim = c_.geometry.dim_v;
    unpack_lanes(my.out.data, my.out.lanes, my.panel.place.rows, dim,
                 saved_->mixed.data() + my.panel.first_row() * dim, dim);
  }

  const NormaliserTraits& traits_;
  const ReadoutTraits& readout_;
  const int maps_;
  TileOfRows<Real> keys_, values_;
  MixedTile mixed_;
  Context c_;  // the call's, but for what keys_, values_ and mixed_ hold
  OutputSet<TensorView<Real>> to_;
  Saved<Real>* saved_;
  KeySide<Real>* lazy_keys_;
  typename KeySide<Real>::Tiles side_tiles_;
  KeyRange tiles_;                           // those that are visited
  Index built_tile_ = -1, built_head_ = 0;   // where side values were built last
  Index finite_key_ = -1, finite_keys_ = 0;  // which values were looked at last
  bool finite_ = true;
  FewQueries<Real> few_;
  FixedList<My> panels_;
  Index active_ = 0;
  KeyRange core_;                                     // that all queries of the group see
  bool few_queries_ = true;                           // have all its panels few?
  FixedList<typename FewQueries<Real>::Part> parts_;  // of panels of few queries,
  FixedList<My*> seers_;                              // and those panels
  LaneTile<Real> scores_, projected_;
  Real *marks_, *copy_, *tile_max_, *rescale_;
};

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
