// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward: one skeleton for every variant. Panels of queries walk over tiles of keys:
//
//   streaming normaliser   per tile: scores -> maximum, out *= factor -> weights -> dropout -> out += V^T weights
//   row normaliser         all tiles: scores; once: scores -> weights; all tiles: dropout, out += V^T weights
//   one group, many keys   a mergeable normaliser takes parts of the keys side by side; once: their states join in their order
//
// Parallel over (batch, key-value head, group of panels), and over parts of the keys where there are any. The panels of a
// group, of one query head or of several that share keys and values, take turns at each tile while it is in cache. A group is
// computed the same way by whichever thread takes it.
//
// Memory  per worker O(tile) for streaming ops, O(len_kv) for row normalisers (see plan.hpp).

#include <heed/engine/few_queries.hpp>
#include <heed/engine/fold_heads.hpp>
#include <heed/engine/group.hpp>
#include <heed/engine/learnt_keys.hpp>
#include <heed/engine/panel_products.hpp>

#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// A panel and what it mixes.
template <class Real>
struct ForwardPanel {
  Panel<Real> panel;
  LaneSums<Real> out;  // [dim_v][lanes]
  LaneTile<Real>
      states;            // of a streaming normaliser: [number][lanes], the sum of the weights first
  RowBlock<Real> block;  // of a row normaliser

  ForwardPanel(const CallContext<Real>& c, Scratch<Real>& scratch)
      : panel(c, scratch, false),
        out{take_lanes(scratch, c.geometry.dim_v, c.plan.lanes)},
        states(take_lanes(scratch, c.op.normaliser.traits.state_numbers, c.plan.lanes)) {}
};

template <class Real>
class ForwardWorker {
 public:
  using Context = CallContext<Real>;

  // lazy_keys: the keys' derived values if this worker computes them while their tile is in cache, or null.
  ForwardWorker(const Context& c, const OutputSet<TensorView<Real>>& out, Saved<Real>* saved,
                DerivedKeys<Real>* lazy_keys, Scratch<Real>& scratch)
      : traits_(c.op.normaliser.traits),
        readout_(c.op.readout.traits),
        maps_(c.op.maps()),
        keys_(c.in.key, c.plan.tile, !c.keys.needs().keys_by_group, scratch),
        values_(c.in.value, c.plan.tile, false, scratch),
        bf16_(c.pair_products, c.geometry, c.plan.tile, c.plan.lanes, maps_, false, scratch),
        c_(c),
        to_(out),
        saved_(saved),
        lazy_keys_(lazy_keys),
        tiles_{0, c.plan.tiles},
        few_(c_, scratch),
        group_(c_),
        products_(c_, scratch),
        learnt_(c_, false, scratch),
        parts_(c.plan.group),
        seers_(c.plan.group) {
    c_.key = keys_.view();
    c_.value = values_.view();
    if (c.pair_products) c_.bf16 = &bf16_;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    for (Index i = 0; i < c.plan.group; ++i) group_.emplace(c_, scratch);
    scores_ = take_lanes(scratch, tile, lanes);
    projected_ = take_lanes(scratch, tile, lanes);
    if (lazy_keys) derived_tiles_ = lazy_keys->take_tiles(scratch);
    tile_max_ = scratch.take(lanes);
    rescale_ = scratch.take(lanes);
  }

  // Mixes values for a group of panels and leaves them, normalised, in lanes.
  void mix(Index b, Index kv_head, Index group) {
    start(b, kv_head, group);
    load_queries();
    if (traits_.streams) {
      accumulate_streaming();
      for (My& my : active()) finish(my);
    } else {
      accumulate_rows();
    }
    if (saved_ && !saved_->mixed.empty())
      for (const My& my : active()) save_mixed(my);
  }

  // From now on the queries are these rows, and outputs go there; sizes, keys and values stay.
  void turn_to(const TensorView<const Real>& query, const OutputSet<TensorView<Real>>& out) {
    c_.in.query = query;
    to_ = out;
  }

  // One of `parts` parts of the keys: leaves states and sums in `to`, which has room for part_elements() numbers.
  void accumulate_part(Index b, Index kv_head, Index part, Index parts, Real* to) {
    start(b, kv_head, 0);
    load_queries();
    tiles_ = {part * c_.plan.tiles / parts, (part + 1) * c_.plan.tiles / parts};
    accumulate_streaming();
    for (My& my : active()) {
      my.out.fill();
      std::copy_n(my.states.data, states_size(), to);
      std::copy_n(my.out.tile.data, out_size(), to + states_size());
      to += panel_elements();
    }
  }
  // Joins what accumulate_part() has left of all parts, and leaves the rows normalised in lanes.
  void join_parts(Index b, Index kv_head, Index parts, Real* from) {
    start(b, kv_head, 0);
    Index n = 0;
    for (My& my : active()) {
      Real* part = from + n++ * panel_elements();
      std::copy_n(part, states_size(), my.states.data);
      std::copy_n(part + states_size(), out_size(), my.out.tile.data);
      my.out.empty = false;
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

  [[nodiscard]] std::span<My> active() const { return group_.active(); }
  // The readers of a key-value head share its keys and values.
  void start(Index b, Index kv_head, Index group) {
    const Index readers = c_.geometry.group();
    group_.move_to(b, kv_head * readers, readers, group);
    products_.forget();
    built_tile_ = -1;
    few_queries_ = true;
    for (My& my : active()) few_queries_ = few_queries_ && my.panel.place.rows <= kFewRows<Real>;
  }

  void load_queries() {
    for (My& my : active()) {
      my.panel.load_queries();
      my.out.empty = true;
    }
  }

  // The keys of tile t that some panel sees.
  [[nodiscard]] KeyRange seen_keys(Index t) {
    const KeyRange& seen = group_.seen();
    return {std::max(seen.begin, t * c_.plan.tile), std::min(seen.end, (t + 1) * c_.plan.tile)};
  }
  void load_tile(const TileOfRows<Real>& rows, Index t) {
    const KeyRange keys = seen_keys(t);
    const auto sees = [&](const My& my) { return my.panel.tile(keys).kind != TileKind::empty; };
    if (!rows.copies() || std::none_of(active().begin(), active().end(), sees)) return;
    const TilePlace& place = group_.first().panel.place;
    rows.load(place.batch, c_.geometry.kv_head(place.head), keys.begin, keys.size());
  }

  // body(t) for all tiles, and before it load(t).
  template <class Load, class Body>
  void for_tiles(Load&& load, Body&& body) {
    for (Index t = tiles_.begin; t < tiles_.end; ++t) {
      load(t);
      bf16_.forget();
      body(t);
    }
  }

  // Invariant, behind each tile, over all keys j so far and with the state as it is:
  //   state.sum = sum_j weight(state, score_j),   out = sum_j weight(state, score_j) v_j
  // and the state holds an upper bound of all these scores.
  void accumulate_streaming() {
    for (My& my : active()) {
      my.panel.load_states(my.states, nullptr);
      if (learnt_.given() && tiles_.begin == 0) accumulate_learnt(my);
    }
    if (few_queries_)
      // They read keys and values as they are stored.
      return for_tiles(
          [&](Index t) {
            if (c_.op.score.columns || (lazy_keys_ && c_.keys.needs().any)) load_tile(keys_, t);
          },
          [&](Index t) {
            group_.for_parts(t, [&](const KeyRange& keys) { accumulate_few(active(), keys); });
          });
    for_tiles(
        [&](Index t) {
          load_tile(keys_, t);
          load_tile(values_, t);
        },
        [&](Index t) {
          group_.for_tile(t, [&](My& my, const PanelTile& tile) {
            if (tile.kind != TileKind::empty) accumulate_streaming(my, tile);
          });
        });
  }

  void accumulate_learnt(My& my) {
    std::fill(tile_max_, tile_max_ + c_.plan.lanes, -kInfinity<Real>);
    learnt_.load(my.panel.place, tile_max_);
    move_references(my);
    c_.op.normaliser.weigh(learnt_.scores, learnt_.place, c_.plan.vectors, my.states);
    my.panel.dropout.drop(learnt_.scores, learnt_.place);
    my.out.fill();
    learnt_.mix(learnt_.of_head.values, learnt_.scores, my.out.tile);
  }

  // Numbers that accumulate_part() writes per panel: its states, and sums of values.
  [[nodiscard]] Index states_size() const { return traits_.state_numbers * c_.plan.lanes; }
  [[nodiscard]] Index out_size() const { return c_.geometry.dim_v * c_.plan.lanes; }
  [[nodiscard]] Index panel_elements() const { return part_elements(c_) / c_.plan.group; }
  // Adds a part: out = factor * out + factor' * out', and likewise the sums.
  void join(My& my, Real* part) {
    const LaneTile<Real> others{part, traits_.state_numbers, c_.plan.lanes};
    const LaneTile<Real> out{part + states_size(), my.out.tile.rows, my.out.tile.lanes};
    Real *const factors = rescale_, *const other_factors = tile_max_;  // scratch of other steps
    c_.op.normaliser.join(my.states, others, c_.plan.vectors, factors, other_factors);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Pack<Real> factor = Pack<Real>::load(factors + v * kLanes<Real>),
                       other_factor = Pack<Real>::load(other_factors + v * kLanes<Real>);
      for (Index col = 0; col < my.out.tile.rows; ++col)
        my.out.tile.store(col, v,
                          my.out.tile.load(col, v) * factor + out.load(col, v) * other_factor);
    }
  }

  // All keys are seen: out becomes finish(state) * out.
  void finish(My& my) {
    my.out.fill();
    my.panel.require_weight(my.states);
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
      for (Index col = 0; col < my.out.tile.rows; ++col)
        my.out.tile.store(col, v, my.out.tile.load(col, v) * factor);
    }
  }

  // Panels of few queries and a part of a tile.
  void accumulate_few(std::span<My> panels, const KeyRange& keys) {
    parts_.clear();
    seers_.clear();
    Index queries = 0;
    for (My& my : panels) {
      const PanelTile tile = my.panel.tile(keys);
      if (tile.kind == TileKind::empty) continue;
      my.out.fill();
      parts_.emplace(&my.panel, tile, my.out.tile, queries);
      seers_.emplace(&my);
      queries += tile.at.rows;
    }
    const bool transforms = c_.op.score.traits.has_transform;
    if (transforms)
      for (const auto& part : parts_) build_derived(part.tile.at);
    few_.dot({parts_.data(), parts_.size()});
    for (std::size_t n = 0; n < parts_.size(); ++n) {
      const auto& part = parts_[n];
      My& my = *seers_[n];
      if (!transforms) build_derived(part.tile.at);
      std::fill(tile_max_, tile_max_ + c_.plan.lanes, -kInfinity<Real>);
      few_.score(part, tile_max_);
      move_references(my);
      few_.weigh(part, my.states);
      few_.drop(part);
      if (!part.tile.hides_pairs) continue;
      const TilePlace& at = part.tile.at;
      values_.load(at.batch, c_.geometry.kv_head(at.head), at.key, at.keys);
      few_.accumulate_visible(part, my.panel.values(at), products_.copy());
    }
    few_.mix({parts_.data(), parts_.size()});
  }

  void accumulate_streaming(My& my, const PanelTile& tile) {
    if (tile.at.rows <= kFewRows<Real>)
      return accumulate_few({&my, 1}, {tile.at.key, tile.at.key + tile.at.keys});
    build_derived(tile.at);
    std::fill(tile_max_, tile_max_ + c_.plan.lanes, -kInfinity<Real>);
    const LaneTile<Real> scores = scores_.part(0, tile.at.keys);
    my.panel.query[0].tile_scores(tile.at, tile.kind, scores, projected_, tile_max_);
    move_references(my);
    c_.op.normaliser.weigh(scores, tile.at, c_.plan.vectors, my.states);
    accumulate_tile(my, tile, scores);
  }

  // Builds the key features of the tile containing `at`, unless the group's previous panel already has.
  void build_derived(const TilePlace& at) {
    if (!lazy_keys_) return;
    const Index tile = at.key / c_.plan.tile;
    if (tile == built_tile_ && c_.keys.read_alike(built_head_, at.head)) return;
    built_tile_ = tile;
    built_head_ = at.head;
    const KeyRange keys = seen_keys(tile);
    lazy_keys_->build(derived_tiles_, c_.key, at.batch, at.head, keys.begin, keys.size());
  }

  // Tells the normaliser the maximum of the tile, and rescales what was mixed and summed before.
  void move_references(My& my) {
    const bool moved = c_.op.normaliser.move(my.states, tile_max_, rescale_, c_.plan.vectors);
    if (moved && !my.out.empty) scale_out(my);
  }

  // All tiles: scores into whole rows; once: scores become weights; all tiles: out += V^T weights.
  void accumulate_rows() {
    for (My& my : active()) my.block = my.panel.row_block();
    for_tiles([&](Index t) { load_tile(keys_, t); },
              [&](Index t) {
                group_.for_tile(t, [&](My& my, const PanelTile& tile) { score_part(my, tile); });
              });
    for (My& my : active()) {
      if (traits_.uses_extra || traits_.uses_query) {
        const ReadoutPanel<Real> own = my.panel.readout.load(my.panel.place, my.out.tile);
        my.block.extra = own.extra.data;
        my.block.query = own.query;
      }
      c_.op.normaliser.weights(my.block);
    }
    for_tiles([&](Index t) { load_tile(values_, t); },
              [&](Index t) {
                group_.for_tile(t, [&](My& my, const PanelTile& tile) {
                  if (tile.kind != TileKind::empty)
                    accumulate_tile(my, tile, my.panel.part_of(my.block.scores[0], tile.at));
                });
              });
    for (My& my : active()) {
      my.out.fill();
      for (Index i = 0; i < my.panel.place.rows; ++i)
        if (my.panel.is_nan_row(i)) make_row_nan(my, i);
      if (!saved_) continue;
      save_lse(my);
      save_diagnostics(my, my.block.diagnostics, 0, traits_.diagnostics);
    }
  }
  void score_part(My& my, const PanelTile& tile) {
    if (tile.kind != TileKind::empty) build_derived(tile.at);
    for (std::size_t m = 0; m < std::size_t(maps_); ++m) {
      const LaneTile<Real> scores = my.panel.part_of(my.block.scores[m], tile.at);
      if (tile.kind == TileKind::empty)
        scores.fill(-kInfinity<Real>);
      else
        my.panel.query[m].tile_scores(tile.at, tile.kind, scores, projected_, my.panel.rows.max[m]);
    }
  }

  // Row i of the panel becomes NaN, since all visible scores of a map are -infinity or NaN.
  void make_row_nan(My& my, Index i) {
    for (Index col = 0; col < my.out.tile.rows; ++col) my.out.tile.row(col)[i] = kNan;
    for (int m = 0; m < maps_; ++m)
      if (my.panel.rows.max[std::size_t(m)][i] == -kInfinity<Real>) my.panel.lse.row(m)[i] = kNan;
    for (int d = 0; d < traits_.diagnostics; ++d)
      my.panel.rows.diagnostics[d * c_.plan.lanes + i] = kNan;
  }

  // out += V^T weights over one tile, dropout included.
  void accumulate_tile(My& my, const PanelTile& tile, const LaneTile<Real>& weights) {
    my.panel.dropout.drop(weights, tile.at);
    products_.begin(my.panel, tile);
    products_.add_lanes(my.panel.values(tile.at), weights, my.out, &bf16_.value_rows);
  }

  void write_out(My& my) {
    const TilePlace& place = my.panel.place;
    if (!readout_.identity) {
      ReadoutPanel<Real> panel = my.panel.readout.load(place, my.out.tile);
      panel.lse = my.panel.lse.constant();
      c_.op.readout.read_out(panel);
      if (saved_)
        save_diagnostics(my, panel.diagnostics.data, traits_.diagnostics, readout_.diagnostics);
      if (readout_.counts_steps) unpack_rows(panel.steps, place, to_.steps);
    }
    unpack_rows(my.out.tile, place, to_.out);
    unpack_rows(my.panel.lse, place, to_.lse);
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
    unpack_lanes(my.out.tile.data, my.out.tile.lanes, my.panel.place.rows, dim,
                 saved_->mixed.data() + my.panel.first_row() * dim, dim);
  }

  const NormaliserTraits& traits_;
  const ReadoutTraits& readout_;
  const int maps_;
  TileOfRows<Real> keys_, values_;
  Bf16Tile bf16_;
  Context c_;  // a copy of the call's that points to this worker's keys_, values_ and bf16_
  OutputSet<TensorView<Real>> to_;
  Saved<Real>* saved_;
  DerivedKeys<Real>* lazy_keys_;
  typename DerivedKeys<Real>::Tiles derived_tiles_;
  KeyRange tiles_;                          // those that are visited
  Index built_tile_ = -1, built_head_ = 0;  // where derived values were built last
  FewQueries<Real> few_;
  PanelGroup<Real, My> group_;
  PanelProducts<Real> products_;
  LearntTile<Real> learnt_;
  bool few_queries_ = true;                           // have all its panels few?
  FixedList<typename FewQueries<Real>::Part> parts_;  // of panels of few queries,
  FixedList<My*> seers_;                              // and those panels
  LaneTile<Real> scores_, projected_;
  Real *tile_max_, *rescale_;
};

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
