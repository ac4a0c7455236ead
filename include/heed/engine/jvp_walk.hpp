// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward mode: groups of query panels over tiles of keys, as in the other passes. With s. from
// tile/score_tangents.hpp, w the weights and mixed = w V:
//
//   streaming  w_j. = A_j s_j. + w_j U,  U = sum_k B_k s_k.      from dL/ds_j = A_j G_j + B_j delta of its dscore(), where
//              mixed. = sum_j (A_j s_j.) v_j + w_j v_j. + U mixed,   delta = sum_k w_k G_k - dL/dlse: hence lse. = -U
//              softmax: A = w, B = -w. The normaliser's parameters add to U what its vjp() gives them for delta = 1
//   row        (w, w.) by the normaliser's jvp(), or by dual numbers through its reference(), row by row
//   readout    (out, out.) by dual numbers through its reference(), after all rows
//
// With dropout, w and w. are dropped alike. A normaliser that is Mergeable needs no state of an earlier forward: all sums
// carry the running reference, and are multiplied by finish() at the end.
//
// Memory  per worker as in backward; O(len) for the tangents of side values, and for readouts.

#include <heed/core/fixed_list.hpp>
#include <heed/engine/queries.hpp>
#include <heed/engine/tangents.hpp>
#include <heed/engine/tile/products.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// What a call in forward mode reads and writes beside its inputs and tangents.
template <class Real>
struct JvpOutputs {
  const Saved<Real>* saved = nullptr;     // of forward(), or null
  TensorView<const Real> known_out = {};  // that of the same forward()
  // Written where `saved` is not given; lse and steps as asked for.
  OutputSet<TensorView<Real>> written = {};
  OutputSet<TensorView<Real>> tangent = {};
};

// Rows before a readout that is not the identity, and what moves with them.
template <class Real>
struct ReadoutRows {
  std::vector<Real> mixed, mixed_tangent;  // (batch, heads, len_q, dim_v)
  std::vector<Real> lse, lse_tangent;      // [map][row]
};

template <class Real>
struct JvpPanel {
  Panel<Real> panel;
  FixedList<QueryTangents<Real>> tangents;  // [map]
  LaneTile<Real> mixed, mixed_tangent;      // [dim_v][lanes]
  LaneTile<Real> states;                    // of streaming normalisers, [number][lanes]
  LaneTile<Real> lse_tangent;  // [map][lanes]; of streaming normalisers U until the last key
  std::array<LaneTile<Real>, kMostMaps> row_tangents;  // of row normalisers, [len_kv][lanes] each

  JvpPanel(const CallContext<Real>& c, const TangentOperands<Real>& d,
           const KeyTangents<Real>& keys, Scratch<Real>& scratch)
      : panel(c, scratch, false), tangents(c.op.maps()) {
    const Index lanes = c.plan.lanes;
    const auto take = [&](Index rows) {
      return LaneTile<Real>{scratch.take(rows * lanes), rows, lanes};
    };
    for (const QuerySide<Real>& side : panel.query) tangents.emplace(c, d, keys, side, scratch);
    mixed = take(c.geometry.dim_v);
    mixed_tangent = take(c.geometry.dim_v);
    states = take(c.op.normaliser.traits.state_numbers);
    lse_tangent = take(c.op.maps());
    for (std::size_t m = 0; m < std::size_t(c.op.maps()) && !c.op.streams(); ++m)
      row_tangents[m] = take(c.geometry.len_kv);
  }
  JvpPanel(const JvpPanel&) = delete;  // tangents refer to the panel
};

template <class Real>
class JvpWorker {
 public:
  using Context = CallContext<Real>;

  JvpWorker(const Context& c, const OpJvps<Real>& jvps, const TangentOperands<Real>& d,
            const KeyTangents<Real>& keys, const JvpOutputs<Real>& to, ReadoutRows<Real>& rows,
            Scratch<Real>& scratch)
      : traits_(c.op.normaliser.traits),
        readout_(c.op.readout.traits),
        maps_(c.op.maps()),
        c_(c),
        jvps_(jvps),
        d_(d),
        to_(to),
        rows_(rows),
        panels_(c.plan.group) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const auto take = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    for (Index i = 0; i < c.plan.group; ++i) panels_.emplace(c, d, keys, scratch);
    dots_ = take(tile);
    scores_ = take(tile);
    tangents_ = take(tile);
    marks_ = take(tile);
    projected_ = take(c.keys.needs().rank > 0 ? tile : 0);
    projected_tangents_ = take(c.keys.needs().rank > 0 ? tile : 0);
    transposed_ = scratch.take(d.bias.given() ? tile * lanes : 0);
    copy_ = scratch.take(tile * c.geometry.dim_v);
    top_ = scratch.take(lanes);
    rescale_ = scratch.take(lanes);
    extra_tangents_ = take(traits_.uses_extra ? 1 : 0);
    query_tangents_ = take(traits_.uses_query ? c.geometry.dim_qk : 0);
    input_tangents_ = take(traits_.query_inputs);
    input_slopes_ = take(traits_.query_inputs);
    no_key_inputs_ = scratch.take(traits_.key_inputs);
  }
  JvpWorker(const JvpWorker&) = delete;

  // All rows of a group of panels of one head.
  void run(Index b, Index h, Index group) {
    const Index first = group * c_.plan.group;
    active_ = std::min(c_.plan.group, c_.plan.panels - first);
    for (Index i = 0; i < active_; ++i) {
      My& my = panels_[std::size_t(i)];
      my.panel.move_to(b, h, first + i);
      my.panel.load_queries();
      for (auto& tangents : my.tangents) tangents.load(my.panel.place);
      for (const auto& sums : {my.mixed, my.mixed_tangent, my.lse_tangent}) sums.fill(Real(0));
    }
    if (traits_.streams)
      mix_streaming();
    else
      mix_rows();
    for_active([&](My& my) { write(my); });
  }

 private:
  using My = JvpPanel<Real>;
  using P = Pack<Real>;
  static constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

  template <class Body>
  void for_active(Body&& body) {
    for (Index i = 0; i < active_; ++i) body(panels_[std::size_t(i)]);
  }
  // body(my, tile), part of a tile by part, for all panels that see it; empty(my, tile) for the others.
  template <class Body, class Empty>
  void for_tiles(Body&& body, Empty&& empty) {
    const KeyRange core = core_keys(panels_, active_);
    for (Index t = 0; t < c_.plan.tiles; ++t)
      for_parts(c_.plan, t, c_.geometry.len_kv, core, [&](const KeyRange& keys) {
        for_active([&](My& my) {
          const PanelTile tile = my.panel.tile(keys);
          if (tile.kind == TileKind::empty)
            empty(my, tile);
          else
            body(my, tile);
        });
      });
  }
  // Is the state found on the way, for want of that of an earlier forward?
  [[nodiscard]] bool finds_state() const { return to_.saved == nullptr; }
  // Is mixed out, which is known?
  [[nodiscard]] bool knows_mixed() const { return readout_.identity && to_.saved; }

  // Scores and their tangents.
  void score_tile(My& my, int m, const PanelTile& tile, const LaneTile<Real>& scores,
                  const LaneTile<Real>& tangents, Real* top) {
    const TilePlace& at = tile.at;
    const auto& side = my.panel.query[std::size_t(m)];
    const auto& moving = my.tangents[std::size_t(m)];
    moving.dots(at, tangents, projected_tangents_);
    if (c_.plain()) {
      side.tile_scores(at, tile.kind, scores, projected_, top);
    } else {
      side.dots(at, dots_);
      side.projected_dots(at, projected_);
      side.scores(at, tile.kind, dots_, projected_, scores, top);
    }
    moving.scores(at, dots_, projected_, projected_tangents_, tangents, transposed_);
  }

  // Invariant, behind each tile: over the keys j so far, with w as the state has it,
  //   mixed = sum w_j v_j (unless it is known),  mixed. = sum (A_j s_j.) v_j + w_j v_j.,  lse_tangent = sum B_j s_j.
  void mix_streaming() {
    for_active([&](My& my) {
      for (int v = 0; v < c_.plan.vectors; ++v)
        c_.op.normaliser.begin(my.panel.queries(v), v, my.states);
      for (Index n = 0; n < traits_.state_numbers && !finds_state(); ++n)
        std::copy_n(to_.saved->state.data() + my.panel.first_row() + n * c_.geometry.query_rows(),
                    my.panel.place.rows, my.states.row(n));
    });
    for_tiles(
        [&](My& my, const PanelTile& tile) {
          const LaneTile<Real> scores = scores_.part(0, tile.at.keys),
                               tangents = tangents_.part(0, tile.at.keys);
          std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
          score_tile(my, 0, tile, scores, tangents, top_);
          if (finds_state() && c_.op.normaliser.move(my.states, top_, rescale_, c_.plan.vectors))
            scale_sums(my);
          jvps_.normaliser.weigh(scores, tangents, tile.at, c_.plan.vectors, my.states,
                                 finds_state(), my.lse_tangent.row(0));
          mix_tile(my, tile, scores, tangents);
        },
        [](My&, const PanelTile&) {});
    for_active([&](My& my) { finish(my); });
  }
  // What was added up, times rescale_.
  void scale_sums(My& my) {
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const P by = P::load(rescale_ + v * kLanes<Real>);
      for (const auto& sums : {my.mixed, my.mixed_tangent, my.lse_tangent})
        for (Index r = 0; r < sums.rows; ++r) sums.store(r, v, sums.load(r, v) * by);
    }
  }
  // mixed += V^T w,  mixed. += V^T w. + V.^T w
  void mix_tile(My& my, const PanelTile& tile, const LaneTile<Real>& weights,
                const LaneTile<Real>& tangents) {
    const TilePlace& at = tile.at;
    my.panel.dropout.drop(weights, at);
    my.panel.dropout.drop(tangents, at);
    const Index kv = c_.geometry.kv_head(at.head);
    const Rows<Real> values = my.panel.values(at);
    if (!knows_mixed()) add_product(my, tile, values, weights, my.mixed);
    add_product(my, tile, values, tangents, my.mixed_tangent);
    if (d_.value.given())
      add_product(
          my, tile,
          {d_.value.row(at.batch, kv, at.key), at.keys, c_.geometry.dim_v, d_.value.strides().row},
          weights, my.mixed_tangent);
  }
  void add_product(My& my, const PanelTile& tile, const Rows<Real>& rows,
                   const LaneTile<Real>& weights, const LaneTile<Real>& sums) {
    const TilePlace& at = tile.at;
    const bool plainly = !tile.hides_pairs || all_finite(rows);
    const LaneTile<Real> marks = marks_.part(0, at.keys);
    if (!plainly) my.panel.mark_hidden(at, tile.kind, marks);
    for_strips(at, c_.plan.vectors, [&](const Strip& strip) {
      const Rows<Real> own = rows.part(strip.keys.begin, strip.keys.size());
      const LaneTile<Real> of = strip.of(weights), to = strip.lanes_of(sums);
      if (plainly)
        add_lane_product(own, of, strip.vectors, at.rows, to);
      else
        add_lane_product_guarded(own, of, strip.of(marks), strip.vectors, at.rows, to, copy_);
    });
  }

  // All keys are seen.
  void finish(My& my) {
    Real* sums = my.states.row(0);
    if (finds_state() && traits_.needs_weight)
      for (Index i = 0; i < my.panel.place.rows; ++i)
        if (sums[i] == Real(0) && my.panel.sees_any(i)) sums[i] = kNan;
    c_.op.normaliser.finish(my.states, c_.plan.vectors, rescale_, my.panel.lse.row(0));
    if (finds_state())
      scale_sums(my);
    else if (knows_mixed())
      load_rows(my, to_.known_out, my.mixed);
    load_input_tangents(my);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      Real* const pulled_lanes = my.lse_tangent.row(0) + v * kLanes<Real>;
      jvps_.normaliser.pull(my.panel.queries(v, input_slopes_), v, my.states, input_tangents_,
                            pulled_lanes);
      const P pulled = P::load(pulled_lanes);
      my.lse_tangent.store(0, v, -pulled);
      for (Index col = 0; col < my.mixed.rows; ++col)
        my.mixed_tangent.store(
            col, v, mul_add(pulled, my.mixed.load(col, v), my.mixed_tangent.load(col, v)));
    }
  }
  void load_input_tangents(const My& my) const {
    const TilePlace& place = my.panel.place;
    load_inputs(d_.normaliser_query, c_.geometry,
                {place.batch, place.head, place.query, place.rows}, input_tangents_);
  }
  void load_rows(const My& my, const TensorView<const Real>& view, const LaneTile<Real>& to) const {
    const TilePlace& place = my.panel.place;
    pack_lanes(view.row(place.batch, place.head, place.query), view.strides().row, place.rows,
               to.rows, to.data, to.lanes);
  }

  // All tiles: scores and tangents of whole rows; once: both become weights and theirs; all tiles: the products.
  void mix_rows() {
    std::vector<RowBlock<Real>> blocks;
    for_active([&](My& my) { blocks.push_back(my.panel.row_block()); });
    const auto part = [](const My& my, const LaneTile<Real>& row, const TilePlace& at) {
      return row.part(at.key - my.panel.seen_by_any.begin, at.keys);
    };
    for_tiles(
        [&](My& my, const PanelTile& tile) {
          for (std::size_t m = 0; m < std::size_t(maps_); ++m)
            score_tile(my, int(m), tile, part(my, my.panel.rows.scores[m], tile.at),
                       part(my, my.row_tangents[m], tile.at), my.panel.rows.max[m]);
        },
        [&](My& my, const PanelTile& tile) {
          for (std::size_t m = 0; m < std::size_t(maps_); ++m)
            part(my, my.panel.rows.scores[m], tile.at).fill(-kInfinity<Real>);
        });
    std::size_t n = 0;
    for_active([&](My& my) { weigh_rows(my, blocks[n++]); });
    for_tiles(
        [&](My& my, const PanelTile& tile) {
          mix_tile(my, tile, part(my, my.panel.rows.scores[0], tile.at),
                   part(my, my.row_tangents[0], tile.at));
        },
        [](My&, const PanelTile&) {});
  }
  // Rows of scores become rows of weights, and likewise their tangents.
  void weigh_rows(My& my, RowBlock<Real>& block) {
    const TilePlace& place = my.panel.place;
    const ReadoutPanel<Real> own = my.panel.readout.load(place, my.mixed);
    block.extra = own.extra.data;
    block.query = own.query;
    RowTangents<Real> moved;
    for (std::size_t m = 0; m < std::size_t(maps_); ++m) {
      moved.scores[m] = my.row_tangents[m].part(0, my.panel.seen_by_any.size());
      moved.lse[m] = my.lse_tangent.row(Index(m));
    }
    load_rows_or_zeros(my, d_.extra, extra_tangents_);
    load_rows_or_zeros(my, d_.query, query_tangents_);
    load_input_tangents(my);
    moved.extra = extra_tangents_.data;
    moved.query = query_tangents_.constant();
    moved.query_inputs = input_tangents_.constant();
    const auto& keys = d_.normaliser_key;
    std::fill_n(no_key_inputs_, traits_.key_inputs, Real(0));
    moved.key_inputs = {no_key_inputs_, 0};
    if (keys.given())
      moved.key_inputs = {
          input_row(keys, c_.geometry, place.batch, place.head, my.panel.seen_by_any.begin),
          keys.strides().row};
    jvps_.normaliser.weights(block, moved);
    for (Index i = 0; i < place.rows; ++i)
      if (my.panel.rows.saw_nothing(i) && my.panel.sees_any(i))
        for (int m = 0; m < maps_; ++m) my.panel.lse.row(m)[i] = my.lse_tangent.row(m)[i] = kNan;
  }
  void load_rows_or_zeros(const My& my, const TensorView<const Real>& view,
                          const LaneTile<Real>& to) const {
    if (to.rows > 0 && view.given())
      load_rows(my, view, to);
    else
      to.fill(Real(0));
  }
  void write(My& my) {
    const TilePlace& place = my.panel.place;
    if (!traits_.streams)
      for (Index i = 0; i < place.rows; ++i)
        if (my.panel.rows.saw_nothing(i) && my.panel.sees_any(i))
          for (const auto& rows : {my.mixed, my.mixed_tangent})
            for (Index col = 0; col < rows.rows; ++col) rows.row(col)[i] = kNan;
    const auto unpack = [&](const LaneTile<Real>& from, const TensorView<Real>& to) {
      if (to.given())
        unpack_lanes(from.data, from.lanes, place.rows, from.rows,
                     to.row(place.batch, place.head, place.query), to.strides().row);
    };
    unpack(my.panel.lse, to_.written.lse);
    unpack(my.lse_tangent, to_.tangent.lse);
    if (readout_.identity) {
      unpack(my.mixed, to_.written.out);
      unpack(my.mixed_tangent, to_.tangent.out);
    } else {
      const Index dim = c_.geometry.dim_v, first = my.panel.first_row();
      const auto keep = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
        unpack_lanes(from.data, from.lanes, place.rows, dim, to.data() + first * dim, dim);
      };
      keep(my.mixed, rows_.mixed);
      keep(my.mixed_tangent, rows_.mixed_tangent);
      for (int m = 0; m < maps_; ++m) {
        const Index at = m * c_.geometry.query_rows() + first;
        std::copy_n(my.panel.lse.row(m), place.rows, rows_.lse.data() + at);
        std::copy_n(my.lse_tangent.row(m), place.rows, rows_.lse_tangent.data() + at);
      }
    }
  }

  const NormaliserTraits& traits_;
  const ReadoutTraits& readout_;
  const int maps_;
  const Context& c_;
  const OpJvps<Real>& jvps_;
  TangentOperands<Real> d_;
  JvpOutputs<Real> to_;
  ReadoutRows<Real>& rows_;
  FixedList<My> panels_;
  Index active_ = 0;
  LaneTile<Real> dots_, scores_, tangents_, marks_, projected_, projected_tangents_,
      extra_tangents_, query_tangents_;
  LaneTile<Real> input_tangents_, input_slopes_;  // of numbers of queries' tokens (normaliser)
  Real* no_key_inputs_;                           // zeros, where such numbers of keys hold still
  Real *transposed_, *copy_, *top_, *rescale_;
};

// Rows and their tangents through the readout, all at once: a readout may look at all rows of a call.
template <class Real>
void read_out_moving(const CallContext<Real>& c, const ReadoutJvps& readout,
                     const TangentOperands<Real>& d, const ReadoutRows<Real>& rows,
                     const JvpOutputs<Real>& to) {
  const ReadoutTraits& traits = c.op.readout.traits;
  const Geometry& g = c.geometry;
  const auto zip = [](const std::vector<Real>& values, const std::vector<Real>& tangents) {
    std::vector<Moving> both;
    for (std::size_t n = 0; n < values.size(); ++n)
      both.push_back({double(values[n]), {double(tangents[n])}});
    return both;
  };
  // Rows of `heads` heads as row(view, b, h, t) finds them; none where they are not used.
  const auto dense = [&](bool used, const TensorView<const Real>& values,
                         const TensorView<const Real>& tangents, Index heads, auto&& row) {
    std::vector<Moving> both;
    const Shape s = used ? values.shape() : Shape{};
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < heads; ++h)
        for (Index t = 0; t < s.len; ++t)
          for (Index n = 0; n < s.dim; ++n)
            both.push_back({double(row(values, b, h, t)[n]),
                            {tangents.given() ? double(row(tangents, b, h, t)[n]) : 0.0}});
    return both;
  };
  const auto of_tensor = [&](bool used, const TensorView<const Real>& values,
                             const TensorView<const Real>& tangents) {
    return dense(used, values, tangents, values.shape().heads,
                 [](const auto& view, Index b, Index h, Index t) { return view.row(b, h, t); });
  };
  ReadoutContext<Moving> context;
  context.geometry = g;
  context.out = zip(rows.mixed, rows.mixed_tangent);
  context.query = of_tensor(traits.uses_query, c.in.query, d.query);
  context.key = of_tensor(traits.uses_own_rows, c.in.key.plain(), d.key);
  context.value = of_tensor(traits.uses_own_rows, c.in.value.plain(), d.value);
  context.extra = of_tensor(traits.uses_extra, c.in.extra, d.extra);
  context.query_inputs = dense(
      traits.query_inputs > 0, c.in.readout_query, d.readout_query, g.heads,
      [&](const auto& view, Index b, Index h, Index t) { return input_row(view, g, b, h, t); });
  const std::vector<Moving> lse = zip(rows.lse, rows.lse_tangent);
  for (Index m = 0; m < c.op.maps(); ++m)
    context.lse.emplace_back(lse.begin() + m * g.query_rows(),
                             lse.begin() + (m + 1) * g.query_rows());
  context.diagnostics.assign(std::size_t(traits.diagnostics),
                             std::vector<double>(std::size_t(g.query_rows())));
  readout.read_out(context);
  const auto write = [&](const std::vector<Moving>& from, Index columns,
                         const TensorView<Real>& values, const TensorView<Real>& tangents) {
    std::size_t next = 0;
    for (Index b = 0; b < g.batch && !from.empty(); ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index t = 0; t < g.len_q; ++t)
          for (Index n = 0; n < columns; ++n, ++next) {
            if (values.given()) values(b, h, t, n) = Real(from[next].value);
            if (tangents.given()) tangents(b, h, t, n) = Real(from[next].grad[0]);
          }
  };
  write(context.out, g.dim_v, to.written.out, to.tangent.out);
  if (traits.counts_steps)
    write(context.steps, c.op.readout.step_columns(g), to.written.steps, to.tangent.steps);
}

// Builds the side values of the keys of `c`, which are `keys`, and their tangents, and walks over all panels.
template <class Real>
void walk_jvp(const CallContext<Real>& c, const OpJvps<Real>& jvps, KeySide<Real>& keys,
              KeyTangents<Real>& key_tangents, const TangentOperands<Real>& d,
              const JvpOutputs<Real>& to, const Options& options) {
  using Worker = JvpWorker<Real>;
  const Geometry& g = c.geometry;
  const bool reads_out = !c.op.readout.traits.identity;
  ReadoutRows<Real> rows;
  if (reads_out) {
    for (auto* numbers : {&rows.mixed, &rows.mixed_tangent})
      numbers->resize(std::size_t(g.query_rows() * g.dim_v));
    for (auto* numbers : {&rows.lse, &rows.lse_tangent})
      numbers->resize(std::size_t(g.query_rows() * c.op.maps()));
  }
  run_groups(
      c, options,
      [&](Scratch<Real>& scratch) { return Worker(c, jvps, d, key_tangents, to, rows, scratch); },
      [&](int workers) {
        keys.build(workers);
        key_tangents.build(workers);
      });
  if (reads_out) read_out_moving(c, jvps.readout, d, rows, to);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
