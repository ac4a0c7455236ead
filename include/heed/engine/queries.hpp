// SPDX-License-Identifier: Apache-2.0
#pragma once

// One panel of queries, as forward and backward both see it: where it stands, its query rows, its own
// rows for the readout, its whole-row scratch for row normalisers, and the tiles of keys it walks over.

#include <heed/core/fixed_list.hpp>
#include <heed/engine/derived_queries.hpp>
#include <heed/engine/tile/dropout.hpp>
#include <heed/engine/tile/panel_rows.hpp>
#include <heed/engine/widened.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Mixed rows in and out of lanes, for readouts.
template <class Real>
class PanelReadout {
 public:
  PanelReadout(const CallContext<Real>& c, Scratch<Real>& scratch, bool backward) : c_(c) {
    const Geometry& g = c.geometry;
    const ReadoutTraits& readout = c.op.readout.traits;
    const Index lanes = c.plan.lanes;
    const auto take = [&](Index rows) { return take_lanes(scratch, rows, lanes); };
    query_ = take(c.op.own_query_dim(g));
    own_key_ = take(c.op.own_row_dim(g.dim_qk));
    own_value_ = take(c.op.own_row_dim(g.dim_v));
    if (readout.uses_own_rows) rows_ = scratch.take(lanes * std::max(g.dim_qk, g.dim_v));
    extra_ = take(c.op.extra_dim(g));
    inputs_ = take(readout.query_inputs);
    work_ = take(c.op.readout.work_rows(g, backward));
    diagnostics_ = take(readout.diagnostics);
    if (readout.counts_steps) steps_ = take(c.op.readout.step_columns(g));
  }

  // Transposes what the readout reads of the panel's own rows.
  [[nodiscard]] ReadoutPanel<Real> load(const TilePlace& place, const LaneTile<Real>& tile) const {
    pack_rows(c_.in.query, place, query_);
    load_own(c_.in.key, place, own_key_);
    load_own(c_.in.value, place, own_value_);
    pack_rows(c_.in.extra, place, extra_);
    load_inputs(c_.in.readout_query, c_.geometry, tokens_of(place), inputs_);
    ReadoutPanel<Real> panel;
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
    panel.query_inputs = inputs_.constant();
    panel.work = work_;
    panel.diagnostics = diagnostics_;
    panel.steps = steps_;
    return panel;
  }

 private:
  // The rows of the queries' own tokens, of a tensor of keys or values as it is stored.
  void load_own(const StoredView<const Real>& from, const TilePlace& place,
                const LaneTile<Real>& to) const {
    if (to.rows == 0) return;
    const Index head = c_.geometry.kv_head(place.head), dim = to.rows,
                first = c_.geometry.query_position(place.query), end = first + place.rows;
    if (!from.narrow() && from.page_rows() == 0)
      return pack_lanes(from.plain().row(place.batch, head, first), from.plain().strides().row,
                        place.rows, dim, to.data, to.lanes);
    // Invariant: the rows before t stand in rows_. Each round copies those that lie on one page.
    const Index page = from.page_rows() > 0 ? from.page_rows() : end;
    for (Index t = first; t < end;) {
      const Index count = std::min(page - t % page, end - t);
      Real* const memory = rows_ + (t - first) * dim;
      if (from.narrow())
        widen_rows(from, place.batch, head, t, count, memory, dim);
      else
        for (Index i = 0; i < count; ++i)
          std::copy_n(from.plain().row(place.batch, head, t + i), dim, memory + i * dim);
      t += count;
    }
    pack_lanes(rows_, dim, place.rows, dim, to.data, to.lanes);
  }

  const CallContext<Real>& c_;
  Real* rows_ = nullptr;
  LaneTile<Real> query_, own_key_, own_value_, extra_, inputs_, work_, diagnostics_;
  LaneTile<Real> steps_;  // in backward their gradient
};

// Whole rows and their lanes for a row normaliser.
template <class Real>
struct RowScratch {
  int maps;
  std::array<LaneTile<Real>, kMostMaps> scores;
  LaneTile<Real> work;
  std::array<Real*, kMostMaps> max{};
  Real* diagnostics = nullptr;

  [[nodiscard]] static Index tiles(const OpTiles<Real>& op, bool backward) {
    return op.streams() ? 0 : op.maps() + op.normaliser.work_tiles(backward);
  }

  RowScratch(const CallContext<Real>& c, Scratch<Real>& scratch, bool backward)
      : maps(c.op.maps()) {
    if (c.op.streams()) return;
    const Index lanes = c.plan.lanes, keys = c.geometry.len_kv;
    const std::size_t count = std::size_t(maps);
    for (std::size_t m = 0; m < count; ++m) scores[m] = {scratch.take(keys * lanes), keys, lanes};
    const Index rows = c.op.normaliser.work_tiles(backward) * keys;
    work = {scratch.take(rows * lanes), rows, lanes};
    for (std::size_t m = 0; m < count; ++m) max[m] = scratch.take(lanes);
    diagnostics = scratch.take(c.op.normaliser.traits.diagnostics * lanes);
  }
  // After all scores: has lane i no number in one of its maps?
  [[nodiscard]] bool saw_nothing(Index i) const {
    bool nothing = false;
    for (std::size_t m = 0; m < std::size_t(maps); ++m)
      nothing = nothing || max[m][i] == -kInfinity<Real>;
    return nothing;
  }
};

// The plan of a call; in backward a row normaliser keeps the gradients of a row's weights, too.
template <class Real>
[[nodiscard]] Plan plan_call(const OpTiles<Real>& op, const Geometry& g,
                             const BoundMask<Real>& mask, const Options& options, Index page_rows,
                             bool backward) {
  const Index rows = RowScratch<Real>::tiles(op, backward);
  return make_plan<Real>(g, mask, options, rows > 0 && backward ? rows + 1 : rows, page_rows,
                         backward);
}

// The pairs of a panel with some keys.
struct PanelTile {
  TilePlace at;
  TileKind kind;     // partial, too, where only lanes beyond the last query are hidden
  bool hides_pairs;  // may the mask or a bias hide a pair of it?
};

// How many pairs the products of a tile take.
template <class Real>
[[nodiscard]] double computed_pairs(const TilePlace& at, int vectors) {
  if (at.rows <= kFewRows<Real>) return double(at.keys * at.rows);
  Index keys = 0;
  for (int v = 0; v < vectors; ++v) keys += at.keys_of(v).size();
  return double(keys * kLanes<Real>);
}

// A core of fewer keys is not worth a part of its own.
inline constexpr Index kCoreKeys = 32;

// Splits tile `t` into a core, the keys that every query of the panels sees (`core` are those of the whole row), and
// the ragged strips on both sides of it: only the strips pay for masking. Calls body(keys) for each.
inline void for_parts(const Plan& plan, Index t, Index len_kv, const KeyRange& core,
                      FunctionRef<const KeyRange&> body) {
  const KeyRange tile{t * plan.tile, std::min((t + 1) * plan.tile, len_kv)};
  const Index from = std::clamp(core.begin, tile.begin, tile.end);
  const Index to = std::clamp(core.end, from, tile.end);
  if (to - from < kCoreKeys) return body(tile);
  if (tile.begin < from) body(KeyRange{tile.begin, from});
  body(KeyRange{from, to});
  if (to < tile.end) body(KeyRange{to, tile.end});
}

// The tiles that have some of these keys; none, 0 to 0, where there are none.
[[nodiscard]] inline KeyRange tiles_of(const Plan& plan, const KeyRange& keys) {
  if (keys.size() == 0) return {};
  return {keys.begin / plan.tile, (keys.end + plan.tile - 1) / plan.tile};
}

template <class Real>
class Panel {
 public:
  using Context = CallContext<Real>;

  FixedList<DerivedQueries<Real>> query;  // [map]
  PanelReadout<Real> readout;
  RowScratch<Real> rows;
  PanelDropout<Real> dropout;
  TilePlace place;
  KeyRange seen_by_any;  // keys that some query sees, the band and the key length looked at
  KeyRange seen_by_all;  // keys that every query sees, likewise
  LaneTile<Real> lse;    // [map][lanes]

  Panel(const Context& c, Scratch<Real>& scratch, bool backward)
      : query(c.op.maps()),
        readout(c, with_queries(c, scratch), backward),
        rows(c, scratch, backward),
        dropout(c.dropout),
        lse{scratch.take(c.op.maps() * c.plan.lanes), c.op.maps(), c.plan.lanes},
        traits_(c.op.normaliser.traits),
        visible_(scratch.take(traits_.counts_visible ? c.plan.lanes : 0)),
        inputs_{scratch.take(traits_.query_inputs * c.plan.lanes), traits_.query_inputs,
                c.plan.lanes},
        c_(c) {}

  // Takes over panel `panel` of head (b, h).
  void move_to(Index b, Index h, Index panel) {
    place = {b, h, panel * c_.plan.lanes, 0, 0, 0};
    place.rows = std::min(c_.plan.lanes, c_.geometry.len_q - place.query);
    // Products of pairs take whole tiles.
    if (place.rows > kFewRows<Real> && !c_.in_bf16(place.rows))
      for (int v = 0; v < c_.plan.vectors; ++v) {
        constexpr Index width = kStripVectors<Real> * kLanes<Real>;
        const Index first = v / kStripVectors<Real> * width;
        place.seen_by_vector[std::size_t(v)] = c_.mask.keys_of_rows(
            b, place.query + first, std::clamp<Index>(place.rows - first, 0, width));
      }
    dropout.move_to(place);
    seen_by_any = c_.mask.keys_of_rows(b, place.query, place.rows);
    seen_by_all = c_.mask.keys_of_all_rows(b, place.query, place.rows);
    if (traits_.counts_visible)
      for (Index i = 0; i < c_.plan.lanes; ++i)
        visible_[i] = Real(i < place.rows ? c_.mask.count_visible(b, h, place.query + i) : 0);
  }
  void load_queries() {
    for (auto& queries : query) queries.load(place.batch, place.head, place.query, place.rows);
    load_inputs(c_.in.normaliser_query, c_.geometry, tokens_of(place), inputs_);
  }

  // Vector v of the panel, as a streaming normaliser sees its queries. dinputs: where gradients of the numbers of their
  // tokens are added, in backward.
  [[nodiscard]] StreamQueries<Real> queries(int v, const LaneTile<Real>& dinputs = {}) const {
    const Index first = v * kLanes<Real>;
    StreamQueries<Real> of{
        place.head, std::clamp<Index>(place.rows - first, 0, kLanes<Real>),
        Pack<Real>::iota() + Real(c_.geometry.query_position(place.query + first)), Real(0)};
    if (traits_.counts_visible) of.visible = Pack<Real>::load(visible_ + first);
    if (inputs_.rows > 0) {
      of.inputs = inputs_.constant();
      of.dinputs = dinputs;
      of.vector = v;
    }
    return of;
  }
  // The states of a streaming normaliser before the first key, or those that forward has saved, [number][lanes].
  void load_states(const LaneTile<Real>& states, const Saved<Real>* saved) const {
    for (int v = 0; v < c_.plan.vectors; ++v) c_.op.normaliser.begin(queries(v), v, states);
    for (Index n = 0; n < states.rows && saved; ++n)
      std::copy_n(saved->state.data() + first_row() + n * c_.geometry.query_rows(), place.rows,
                  states.row(n));
  }
  // All keys are seen: sums of 0 become NaN where a query saw keys and the normaliser needs a weight.
  void require_weight(const LaneTile<Real>& states) const {
    Real* sums = states.row(0);
    for (Index i = 0; i < place.rows && traits_.needs_weight; ++i)
      if (sums[i] == Real(0) && sees_any(i)) sums[i] = std::numeric_limits<Real>::quiet_NaN();
  }
  // Position of the first query in arrays over (batch, head, query).
  [[nodiscard]] Index first_row() const {
    return c_.geometry.row_index(place.batch, place.head, place.query);
  }
  [[nodiscard]] Rows<Real> values(const TilePlace& at) const {
    const auto& value = c_.value;
    return {value.row(at.batch, c_.geometry.kv_head(at.head), at.key), at.keys, c_.geometry.dim_v,
            value.strides().row};
  }

  // The tile of these keys, cut to those that the panel sees: empty, without a key, outside of them.
  [[nodiscard]] PanelTile tile(const KeyRange& keys) const {
    PanelTile tile{place, TileKind::empty, false};
    TilePlace& at = tile.at;
    at.key = std::clamp(keys.begin, seen_by_any.begin, seen_by_any.end);
    at.keys = std::clamp(keys.end, seen_by_any.begin, seen_by_any.end) - at.key;
    if (at.keys == 0) return tile;
    tile.kind = c_.mask.classify(at.batch, at.head, at.query, at.rows, at.key, at.keys);
    tile.hides_pairs = tile.kind == TileKind::partial || c_.mask.has_bias();
    if (tile.kind == TileKind::full && at.rows < c_.plan.lanes) tile.kind = TileKind::partial;
    return tile;
  }

  // All keys that some query sees.
  [[nodiscard]] TilePlace whole_rows() const {
    TilePlace at = place;
    at.key = seen_by_any.begin;
    at.keys = seen_by_any.size();
    return at;
  }

  // Does query i of the panel see any key? Asked where its sum is 0: hidden pairs and visible pairs of score
  // -infinity weigh nothing alike, but with visible ones alone the row is NaN, with hidden ones alone 0.
  [[nodiscard]] bool sees_any(Index i) const {
    return c_.mask.sees_any(place.batch, place.head, place.query + i);
  }
  // Is query i NaN, whose row a row normaliser weighs: all visible scores of a map are -infinity or NaN?
  [[nodiscard]] bool is_nan_row(Index i) const { return rows.saw_nothing(i) && sees_any(i); }
  [[nodiscard]] bool sees(Index i, Index key) const {
    return c_.mask.visible(place.batch, place.head, place.query + i, key);
  }
  // NaN in lane i of a tile from `key` on, where the pair is visible.
  void spoil(const LaneTile<Real>& tile, Index i, Index key) const {
    for (Index j = 0; j < tile.rows; ++j)
      if (sees(i, key + j)) tile.row(j)[i] = std::numeric_limits<Real>::quiet_NaN();
  }

  // -infinity where a computed pair of the tile is hidden, else 0.
  void fill_hidden(const TilePlace& at, TileKind kind, const LaneTile<Real>& hidden) const {
    hidden.fill(Real(0));
    const TileMask<Real> tile_mask(c_.mask, at, c_.plan.vectors);
    if (kind == TileKind::partial) tile_mask.hide(hidden);
    if (c_.mask.has_bias()) tile_mask.hide_biased(hidden);
  }

  // The part of whole rows over the keys that the panel sees which a tile has.
  [[nodiscard]] LaneTile<Real> part_of(const LaneTile<Real>& row, const TilePlace& at) const {
    return row.part(at.key - seen_by_any.begin, at.keys);
  }
  // Whole rows over the keys that the panel sees, with no score in them yet.
  [[nodiscard]] RowBlock<Real> row_block() const {
    RowBlock<Real> block;
    block.head = place.head;
    block.vectors = c_.plan.vectors;
    block.valid_lanes = place.rows;
    block.work = rows.work;
    block.diagnostics = rows.diagnostics;
    block.first_query = c_.geometry.query_position(place.query);
    block.first_key = seen_by_any.begin;
    block.visible = visible_;
    block.query_inputs = inputs_.constant();
    if (traits_.key_inputs > 0) {
      const auto& inputs = c_.in.normaliser_key;
      block.key_inputs = {
          input_row(inputs, c_.geometry, place.batch, place.head, seen_by_any.begin),
          inputs.strides().row};
    }
    for (Index m = 0; m < c_.op.maps(); ++m) {
      const std::size_t i = std::size_t(m);
      block.scores[i] = {rows.scores[i].data, seen_by_any.size(), c_.plan.lanes};
      block.score_max[i] = rows.max[i];
      block.lse[i] = lse.row(m);
      std::fill_n(rows.max[i], c_.plan.lanes, -kInfinity<Real>);
      std::fill_n(lse.row(m), c_.plan.lanes, Real(0));
    }
    return block;
  }

 private:
  // Takes the queries' memory first, where it is read most.
  [[nodiscard]] Scratch<Real>& with_queries(const Context& c, Scratch<Real>& scratch) {
    for (int map = 0; map < c.op.maps(); ++map) query.emplace(c, scratch, map);
    return scratch;
  }

  const NormaliserTraits& traits_;
  Real* visible_;          // [lanes], where the normaliser counts keys
  LaneTile<Real> inputs_;  // [inputs][lanes], of the queries' tokens, where it reads some
  const Context& c_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
