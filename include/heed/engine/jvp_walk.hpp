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
// Memory  per worker as in backward; O(len) for the tangents of derived values, and for readouts.

#include <heed/engine/group.hpp>
#include <heed/engine/learnt_keys.hpp>
#include <heed/engine/panel_products.hpp>
#include <heed/engine/tangents.hpp>

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
  RowBlock<Real> block;                                // likewise

  JvpPanel(const CallContext<Real>& c, const ScoreJvps<Real>& score, const TangentOperands<Real>& d,
           Scratch<Real>& scratch)
      : panel(c, scratch, false), tangents(c.op.maps()) {
    const auto take = [&](Index rows) { return take_lanes(scratch, rows, c.plan.lanes); };
    for (const auto& queries : panel.query) tangents.emplace(c, score, d, queries, scratch);
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
            const JvpOutputs<Real>& to, ReadoutRows<Real>& rows, Scratch<Real>& scratch)
      : traits_(c.op.normaliser.traits),
        readout_(c.op.readout.traits),
        maps_(c.op.maps()),
        c_(c),
        jvps_(jvps),
        d_(d),
        to_(to),
        rows_(rows),
        group_(c),
        products_(c, scratch),
        learnt_(c, true, scratch) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const auto take = [&](Index n) { return take_lanes(scratch, n, lanes); };
    for (Index i = 0; i < c.plan.group; ++i) group_.emplace(c, jvps.score, d, scratch);
    dots_ = take(tile);
    scores_ = take(tile);
    tangents_ = take(tile);
    projected_ = take(c.keys.needs().rank > 0 ? tile : 0);
    projected_tangents_ = take(c.keys.needs().rank > 0 ? tile : 0);
    transposed_ = scratch.take(d.bias.given() ? tile * lanes : 0);
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
    products_.forget();
    group_.move_to(b, h, 1, group);
    for (My& my : group_.active()) {
      my.panel.load_queries();
      for (auto& tangents : my.tangents) tangents.load(my.panel.place);
      for (const auto& sums : {my.mixed, my.mixed_tangent, my.lse_tangent}) sums.fill(Real(0));
    }
    if (traits_.streams)
      accumulate_streaming();
    else
      accumulate_rows();
    for (My& my : group_.active()) write(my);
  }

 private:
  using My = JvpPanel<Real>;
  using P = Pack<Real>;
  static constexpr Real kNan = std::numeric_limits<Real>::quiet_NaN();

  // Is the state found on the way, for want of that of an earlier forward?
  [[nodiscard]] bool finds_state() const { return to_.saved == nullptr; }
  // Is mixed out, which is known?
  [[nodiscard]] bool knows_mixed() const { return readout_.identity && to_.saved; }

  // Scores and their tangents.
  void score_tile(My& my, int m, const PanelTile& tile, const LaneTile<Real>& scores,
                  const LaneTile<Real>& tangents, Real* top) {
    const TilePlace& at = tile.at;
    const auto& queries = my.panel.query[std::size_t(m)];
    const auto& derived_tangents = my.tangents[std::size_t(m)];
    derived_tangents.dots(at, tangents, projected_tangents_);
    queries.tile_scores(at, tile.kind, dots_, projected_, scores, top);
    derived_tangents.scores(at, dots_, projected_, projected_tangents_, tangents, transposed_);
  }

  // Invariant, behind each tile: over the keys j so far, with w as the state has it,
  //   mixed = sum w_j v_j (unless it is known),  mixed. = sum (A_j s_j.) v_j + w_j v_j.,  lse_tangent = sum B_j s_j.
  void accumulate_streaming() {
    for (My& my : group_.active()) {
      my.panel.load_states(my.states, to_.saved);
      if (learnt_.given()) accumulate_learnt(my);
    }
    for (Index t = 0; t < c_.plan.tiles; ++t)
      group_.for_tile(t, [&](My& my, const PanelTile& tile) {
        if (tile.kind != TileKind::empty) accumulate_streaming(my, tile);
      });
    for (My& my : group_.active()) finish(my);
  }
  void accumulate_streaming(My& my, const PanelTile& tile) {
    const LaneTile<Real> scores = scores_.part(0, tile.at.keys),
                         tangents = tangents_.part(0, tile.at.keys);
    std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
    score_tile(my, 0, tile, scores, tangents, top_);
    if (finds_state() && c_.op.normaliser.move(my.states, top_, rescale_, c_.plan.vectors))
      scale_sums(my);
    jvps_.normaliser.weigh(scores, tangents, tile.at, c_.plan.vectors, my.states, finds_state(),
                           my.lse_tangent.row(0));
    accumulate_tile(my, tile, scores, tangents);
  }
  void accumulate_learnt(My& my) {
    const LearntRows<const Real> moved = jvps_.normaliser.learnt.of_head(my.panel.place.head);
    std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
    learnt_.load(my.panel.place, top_);
    learnt_.dots(Store::overwrite, moved.keys, learnt_.query, learnt_.other);
    learnt_.load_query(d_.query);
    learnt_.dots(Store::add, learnt_.of_head.keys, learnt_.query, learnt_.other);
    if (finds_state()) (void)c_.op.normaliser.move(my.states, top_, rescale_, c_.plan.vectors);
    jvps_.normaliser.weigh(learnt_.scores, learnt_.other, learnt_.place, c_.plan.vectors, my.states,
                           finds_state(), my.lse_tangent.row(0));
    for (const auto& tile : {learnt_.scores, learnt_.other})
      my.panel.dropout.drop(tile, learnt_.place);
    const Real* const values = learnt_.of_head.values;
    if (!knows_mixed()) learnt_.mix(values, learnt_.scores, my.mixed);
    learnt_.mix(values, learnt_.other, my.mixed_tangent);
    learnt_.mix(moved.values, learnt_.scores, my.mixed_tangent);
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
  void accumulate_tile(My& my, const PanelTile& tile, const LaneTile<Real>& weights,
                       const LaneTile<Real>& tangents) {
    const TilePlace& at = tile.at;
    my.panel.dropout.drop(weights, at);
    my.panel.dropout.drop(tangents, at);
    products_.begin(my.panel, tile);
    const Rows<Real> values = my.panel.values(at);
    if (!knows_mixed()) products_.add_lanes(values, weights, my.mixed);
    products_.add_lanes(values, tangents, my.mixed_tangent);
    if (d_.value.given())
      products_.add_lanes({d_.value.row(at.batch, c_.geometry.kv_head(at.head), at.key), at.keys,
                           c_.geometry.dim_v, d_.value.strides().row},
                          weights, my.mixed_tangent);
  }

  // All keys are seen.
  void finish(My& my) {
    if (finds_state()) my.panel.require_weight(my.states);
    c_.op.normaliser.finish(my.states, c_.plan.vectors, rescale_, my.panel.lse.row(0));
    if (finds_state())
      scale_sums(my);
    else if (knows_mixed())
      pack_rows(to_.known_out, my.panel.place, my.mixed);
    load_inputs(d_.normaliser_query, c_.geometry, tokens_of(my.panel.place), input_tangents_);
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

  // All tiles: scores and tangents of whole rows; once: both become weights and theirs; all tiles: the products.
  void accumulate_rows() {
    for (My& my : group_.active()) my.block = my.panel.row_block();
    for (Index t = 0; t < c_.plan.tiles; ++t)
      group_.for_tile(t, [&](My& my, const PanelTile& tile) {
        for (std::size_t m = 0; m < std::size_t(maps_); ++m) {
          const LaneTile<Real> scores = my.panel.part_of(my.panel.rows.scores[m], tile.at);
          if (tile.kind == TileKind::empty)
            scores.fill(-kInfinity<Real>);
          else
            score_tile(my, int(m), tile, scores, my.panel.part_of(my.row_tangents[m], tile.at),
                       my.panel.rows.max[m]);
        }
      });
    for (My& my : group_.active()) weigh_rows(my);
    for (Index t = 0; t < c_.plan.tiles; ++t)
      group_.for_tile(t, [&](My& my, const PanelTile& tile) {
        if (tile.kind != TileKind::empty)
          accumulate_tile(my, tile, my.panel.part_of(my.panel.rows.scores[0], tile.at),
                          my.panel.part_of(my.row_tangents[0], tile.at));
      });
  }
  // Rows of scores become rows of weights, and likewise their tangents.
  void weigh_rows(My& my) {
    const TilePlace& place = my.panel.place;
    RowBlock<Real>& block = my.block;
    const ReadoutPanel<Real> own = my.panel.readout.load(place, my.mixed);
    block.extra = own.extra.data;
    block.query = own.query;
    RowTangents<Real> moved;
    for (std::size_t m = 0; m < std::size_t(maps_); ++m) {
      moved.scores[m] = my.row_tangents[m].part(0, my.panel.seen_by_any.size());
      moved.lse[m] = my.lse_tangent.row(Index(m));
    }
    pack_rows(d_.extra, place, extra_tangents_);
    pack_rows(d_.query, place, query_tangents_);
    load_inputs(d_.normaliser_query, c_.geometry, tokens_of(place), input_tangents_);
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
      if (my.panel.is_nan_row(i))
        for (int m = 0; m < maps_; ++m) my.panel.lse.row(m)[i] = my.lse_tangent.row(m)[i] = kNan;
  }
  void write(My& my) {
    const TilePlace& place = my.panel.place;
    if (!traits_.streams)
      for (Index i = 0; i < place.rows; ++i)
        if (my.panel.is_nan_row(i))
          for (const auto& rows : {my.mixed, my.mixed_tangent})
            for (Index col = 0; col < rows.rows; ++col) rows.row(col)[i] = kNan;
    unpack_rows(my.panel.lse, place, to_.written.lse);
    unpack_rows(my.lse_tangent, place, to_.tangent.lse);
    if (readout_.identity) {
      unpack_rows(my.mixed, place, to_.written.out);
      unpack_rows(my.mixed_tangent, place, to_.tangent.out);
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
  PanelGroup<Real, My> group_;
  PanelProducts<Real> products_;
  LearntTile<Real> learnt_;
  LaneTile<Real> dots_, scores_, tangents_, projected_, projected_tangents_, extra_tangents_,
      query_tangents_;
  LaneTile<Real> input_tangents_, input_slopes_;  // of numbers of queries' tokens (normaliser)
  Real* no_key_inputs_;                           // zeros, where such numbers of keys hold still
  Real *transposed_, *top_, *rescale_;
};

// Rows and their tangents through the readout, all at once: a readout may look at all rows of a call.
template <class Real>
void read_out_duals(const CallContext<Real>& c, const ReadoutJvps& readout,
                    const TangentOperands<Real>& d, const ReadoutRows<Real>& rows,
                    const JvpOutputs<Real>& to) {
  const ReadoutTraits& traits = c.op.readout.traits;
  const Geometry& g = c.geometry;
  const auto zip = [](const std::vector<Real>& x, const std::vector<Real>& dx) {
    std::vector<DualNumber> both(x.size());
    for (std::size_t n = 0; n < x.size(); ++n) both[n] = {double(x[n]), {double(dx[n])}};
    return both;
  };
  // Rows of `heads` heads as row(view, b, h, t) finds them; none where they are not used.
  const auto dense = [&](bool used, const TensorView<const Real>& values,
                         const TensorView<const Real>& tangents, Index heads, auto&& row) {
    std::vector<DualNumber> both;
    if (!used) return both;
    const Shape& s = values.shape();
    for_each_row({s.batch, heads, s.len}, [&](Index b, Index h, Index t) {
      for (Index n = 0; n < s.dim; ++n)
        both.push_back({double(row(values, b, h, t)[n]),
                        {tangents.given() ? double(row(tangents, b, h, t)[n]) : 0.0}});
    });
    return both;
  };
  const auto of_tensor = [&](bool used, const TensorView<const Real>& values,
                             const TensorView<const Real>& tangents) {
    return dense(used, values, tangents, values.shape().heads,
                 [](const auto& view, Index b, Index h, Index t) { return view.row(b, h, t); });
  };
  ReadoutContext<DualNumber> context;
  context.geometry = g;
  context.out = zip(rows.mixed, rows.mixed_tangent);
  context.query = of_tensor(traits.uses_query, c.in.query, d.query);
  context.key = of_tensor(traits.uses_own_rows, c.in.key.plain(), d.key);
  context.value = of_tensor(traits.uses_own_rows, c.in.value.plain(), d.value);
  context.extra = of_tensor(traits.uses_extra, c.in.extra, d.extra);
  context.query_inputs = dense(
      traits.query_inputs > 0, c.in.readout_query, d.readout_query, g.heads,
      [&](const auto& view, Index b, Index h, Index t) { return input_row(view, g, b, h, t); });
  const std::vector<DualNumber> lse = zip(rows.lse, rows.lse_tangent);
  for (Index m = 0; m < c.op.maps(); ++m)
    context.lse.emplace_back(lse.begin() + m * g.query_rows(),
                             lse.begin() + (m + 1) * g.query_rows());
  context.diagnostics.assign(std::size_t(traits.diagnostics),
                             std::vector<double>(std::size_t(g.query_rows())));
  readout.read_out(context);
  const auto write = [&](const std::vector<DualNumber>& from, Index columns,
                         const TensorView<Real>& values, const TensorView<Real>& tangents) {
    if (from.empty()) return;
    std::size_t next = 0;
    for_each_row(g.out_shape(), [&](Index b, Index h, Index t) {
      for (Index n = 0; n < columns; ++n, ++next) {
        if (values.given()) values(b, h, t, n) = Real(from[next].value);
        if (tangents.given()) tangents(b, h, t, n) = Real(from[next].grad[0]);
      }
    });
  };
  write(context.out, g.dim_v, to.written.out, to.tangent.out);
  if (traits.counts_steps)
    write(context.steps, c.op.readout.step_columns(g), to.written.steps, to.tangent.steps);
}

// Builds the derived values of the keys of `c`, which are `keys`, and their tangents, and walks over all panels.
template <class Real>
void walk_jvp(const CallContext<Real>& c, const OpJvps<Real>& jvps, DerivedKeys<Real>& keys,
              const TangentOperands<Real>& d, const JvpOutputs<Real>& to, const Options& options) {
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
      c, options, [&](Scratch<Real>& scratch) { return Worker(c, jvps, d, to, rows, scratch); },
      [&](int workers) { keys.template build<DualLanes<Real>>(workers); });
  if (reads_out) read_out_duals(c, jvps.readout, d, rows, to);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
