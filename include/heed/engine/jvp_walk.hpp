// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward mode: groups of query panels over tiles of keys, as in the other passes. With s. from
// tile/score_tangents.hpp, w the weights and mixed = w V:
//
//   streaming  w_j. = A_j s_j. + w_j U,  U = sum_k B_k s_k.      from dL/ds_j = A_j G_j + B_j delta of its dscore(), where
//              mixed. = sum_j (A_j s_j.) v_j + w_j v_j. + U mixed,   delta = sum_k w_k G_k - dL/dlse: hence lse. = -U
//              softmax: A = w, B = -w. Its parameters add to U what its vjp() gives them for delta = 1
//   row        (w, w.) by the normaliser's jvp(), or by dual numbers through its reference(), row by row
//   readout    (out, out.) by dual numbers through its reference(), after all rows
//
// With dropout, w and w. are dropped alike. A normaliser that is Mergeable needs no state of an earlier forward: all sums
// carry the running reference, and are multiplied by finish() at the end.
//
// Memory  per worker as in backward; O(len) for the tangents of side values, and for readouts.

#include <heed/engine/queries.hpp>
#include <heed/engine/tile/products.hpp>
#include <heed/engine/tile/score_tangents.hpp>
#include <heed/engine/visiting_order.hpp>

#include <algorithm>
#include <array>
#include <deque>
#include <limits>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Has a row normaliser forward mode by hand?
template <class Normaliser, class Real>
concept HasRowJvp = requires(const Normaliser& normaliser, const RowBlock<Real>& block,
                             const RowTangents<Real>& tangents) {
  normaliser.jvp(block, tangents, normaliser);
};

// What a call in forward mode reads and writes beside its inputs and tangents.
template <class Real>
struct JvpOutputs {
  const Saved<Real>* saved = nullptr;     // of forward(), or null
  TensorView<const Real> known_out = {};  // that of the same forward()
  // Written where `saved` is not given; lse and steps as asked for.
  TensorView<Real> out = {}, lse = {}, steps = {};
  TensorView<Real> out_tangent = {}, lse_tangent = {}, steps_tangent = {};
};

// Rows before a readout that is not the identity, and what moves with them.
template <class Real>
struct ReadoutRows {
  std::vector<Real> mixed, mixed_tangent;  // (batch, heads, len_q, dim_v)
  std::vector<Real> lse, lse_tangent;      // [map][row]
};

template <class Op, class Real>
struct JvpPanel {
  static constexpr int kMaps = Op::NormaliserType::maps;
  Panel<Real> panel;
  std::deque<ScoreTangents<Op, Real>> tangents;  // [map]
  LaneTile<Real> mixed, mixed_tangent;           // [dim_v][lanes]
  StreamStates<typename Op::NormaliserType, Real> states;
  LaneTile<Real> lse_tangent;  // [map][lanes]; of streaming normalisers U until the last key
  std::array<LaneTile<Real>, std::size_t(kMaps)>
      row_tangents;  // of row normalisers, [len_kv][lanes]

  JvpPanel(const Op& op, const CallContext<Real>& c, const TangentOperands<Real>& d,
           const KeyTangents<Op, Real>& keys, const Op& direction, Scratch<Real>& scratch)
      : panel(c, scratch, false), states(scratch, c.plan.lanes) {
    const Index lanes = c.plan.lanes;
    const auto take = [&](Index rows) {
      return LaneTile<Real>{scratch.take(rows * lanes), rows, lanes};
    };
    for (auto& side : panel.query) tangents.emplace_back(op, c, d, keys, direction, side, scratch);
    mixed = take(c.geometry.dim_v);
    mixed_tangent = take(c.geometry.dim_v);
    lse_tangent = take(kMaps);
    if constexpr (!Op::NormaliserType::streams)
      for (auto& rows : row_tangents) rows = take(c.geometry.len_kv);
  }
  JvpPanel(const JvpPanel&) = delete;  // tangents refer to the panel
};

template <class Op, class Real>
class JvpWorker {
 public:
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;
  using Context = CallContext<Real>;
  static constexpr int kMaps = Normaliser::maps;

  JvpWorker(const Op& op, const Context& c, const TangentOperands<Real>& d, const KeyTangents<Op, Real>& keys,
            const Op& direction, const JvpOutputs<Real>& to, ReadoutRows<Real>& rows,
            Scratch<Real>& scratch)
      : op_(op), c_(c), d_(d), direction_(direction), to_(to), rows_(rows) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const auto take = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    for (Index i = 0; i < c.plan.group; ++i) panels_.emplace_back(op, c, d, keys, direction, scratch);
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
    extra_tangents_ = take(Normaliser::uses_extra ? 1 : 0);
    input_tangents_ = take(query_inputs_of<Normaliser>);
    input_slopes_ = take(query_inputs_of<Normaliser>);
    no_key_inputs_ = scratch.take(key_inputs_of<Normaliser>);
    if constexpr (Normaliser::streams)
      normaliser_moves_ = moves(direction.normaliser);
    else if constexpr (!HasRowJvp<Normaliser, Real>)
      lifted_ = moving_part(op.normaliser, direction.normaliser);
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
    if constexpr (Normaliser::streams)
      mix_streaming();
    else
      mix_rows();
    for_active([&](My& my) { write(my); });
  }

 private:
  using My = JvpPanel<Op, Real>;
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
  [[nodiscard]] bool knows_mixed() const { return Readout::identity && to_.saved; }

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
  void mix_streaming() requires Normaliser::streams {
    for_active([&](My& my) {
      for (int v = 0; v < c_.plan.vectors; ++v)
        my.states.store(v, op_.normaliser.begin(my.panel.queries(v)));
      if (!finds_state())
        my.states.restore(to_.saved->state.data() + my.panel.first_row(), c_.geometry.query_rows(),
                          my.panel.place.rows);
    });
    for_tiles(
        [&](My& my, const PanelTile& tile) {
          const LaneTile<Real> scores = scores_.part(0, tile.at.keys),
                               tangents = tangents_.part(0, tile.at.keys);
          std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
          score_tile(my, 0, tile, scores, tangents, top_);
          if (finds_state()) move_references(my);
          for (int v = 0; v < c_.plan.vectors; ++v) {
            const KeyRange keys = tile.at.keys_of(v);
            weigh(my, v, scores.part(keys.begin, keys.size()),
                  tangents.part(keys.begin, keys.size()));
          }
          mix_tile(my, tile, scores, tangents);
        },
        [](My&, const PanelTile&) {});
    for_active([&](My& my) { finish(my); });
  }

  // Tells the normaliser the maximum of the tile, and rescales what was added up before.
  void move_references(My& my) requires Normaliser::streams {
    bool moved = false;
    for (int v = 0; v < c_.plan.vectors; ++v) {
      auto state = my.states.load(v);
      const P rescale = op_.normaliser.move(state, P::load(top_ + v * kLanes<Real>), moved);
      rescale.store(rescale_ + v * kLanes<Real>);
      state.sum = state.sum * rescale;
      my.states.store(v, state);
    }
    if (moved) scale_sums(my, [&](int v) { return P::load(rescale_ + v * kLanes<Real>); });
  }
  // What was added up, times factor(vector).
  template <class Factor>
  void scale_sums(My& my, Factor&& factor) {
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const P by = factor(v);
      for (const auto& sums : {my.mixed, my.mixed_tangent, my.lse_tangent})
        for (Index r = 0; r < sums.rows; ++r) sums.store(r, v, sums.load(r, v) * by);
    }
  }

  // Scores become weights w, tangents A s.; sum of B s. to lse_tangent.
  void weigh(My& my, int v, const LaneTile<Real>& scores,
             const LaneTile<Real>& tangents) const requires Normaliser::streams {
    const Normaliser& normaliser = op_.normaliser;
    auto state = my.states.load(v);
    const bool finds = finds_state();
    const P factor = finds ? P(Real(1)) : normaliser.finish(state);
    P sum = state.sum, pulled = my.lse_tangent.load(0, v);
    Normaliser::with_weight(normaliser, state, [&](const auto& weight_of) {
      const P zero = Real(0), one = Real(1);
      for (Index j = 0; j < scores.rows; ++j) {
        const P score = scores.load(j, v), tangent = tangents.load(j, v);
        const P raw = weight_of(score), weight = raw * factor;
        const auto hidden = is_hidden(score);
        sum += raw;
        const P own = normaliser.dscore(state, score, weight, one, zero) * tangent;
        const P shared = normaliser.dscore(state, score, weight, zero, one) * tangent;
        pulled += zero_where(hidden, shared);
        scores.store(j, v, zero_where(hidden, weight));
        tangents.store(j, v, zero_where(hidden, own));
      }
    });
    pulled.store(my.lse_tangent.row(0) + v * kLanes<Real>);
    if (!finds) return;
    state.sum = sum;
    my.states.store(v, state);
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
  void finish(My& my) requires Normaliser::streams {
    const Normaliser& normaliser = op_.normaliser;
    if (finds_state()) {
      if constexpr (Normaliser::needs_weight)
        for (Index i = 0; i < my.panel.place.rows; ++i)
          if (my.states.sums()[i] == Real(0) && my.panel.sees_any(i)) my.states.sums()[i] = kNan;
      scale_sums(my, [&](int v) { return normaliser.finish(my.states.load(v)); });
    } else if (knows_mixed()) {
      load_rows(my, to_.known_out, my.mixed);
    }
    if constexpr (query_inputs_of<Normaliser> != 0) load_input_tangents(my);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      my.panel.lse.store(0, v, normaliser.lse(my.states.load(v)));
      const P pulled = my.lse_tangent.load(0, v) + pull_of_parameters(my, v);
      my.lse_tangent.store(0, v, -pulled);
      for (Index col = 0; col < my.mixed.rows; ++col)
        my.mixed_tangent.store(
            col, v, mul_add(pulled, my.mixed.load(col, v), my.mixed_tangent.load(col, v)));
    }
  }
  void load_input_tangents(const My& my) const {
    const TilePlace& place = my.panel.place;
    load_inputs(d_.part_inputs.normaliser_query, c_.geometry,
                {place.batch, place.head, place.query, place.rows}, input_tangents_);
  }
  // What the numbers of queries' tokens add to U: each lane has numbers of its own, whose gradients for delta = 1 are
  // multiplied by their tangents.
  [[nodiscard]] P pull_of_inputs(const My& my, int v) const {
    P pulled = Real(0);
    input_slopes_.fill(Real(0));
    Normaliser slope = op_.normaliser;
    op_.normaliser.vjp(my.panel.queries(v, input_slopes_), my.states.load(v), P(Real(1)), slope);
    for (Index n = 0; n < input_slopes_.rows; ++n)
      pulled += input_slopes_.load(n, v) * input_tangents_.load(n, v);
    return pulled;
  }
  // What the parameters of a streaming normaliser add to U: their gradients for delta = 1 in one lane, times their
  // tangents.
  [[nodiscard]] P pull_of_parameters(const My& my, int v) const {
    P pulled = Real(0);
    if constexpr (query_inputs_of<Normaliser> != 0) pulled = pull_of_inputs(my, v);
    if (!normaliser_moves_) return pulled;
    const auto queries = my.panel.queries(v, input_slopes_);
    for (Index lane = 0; lane < queries.valid; ++lane) {
      P delta = Real(0);
      delta.v[lane] = Real(1);
      Normaliser slope = op_.normaliser;
      visit_parameters(slope, [](const char*, auto& param) { param.set_zero(); });
      op_.normaliser.vjp(queries, my.states.load(v), delta, slope);
      pulled.v[lane] += along(slope);
    }
    return pulled;
  }
  // The sum of slopes times tangents over the normaliser's parameters.
  [[nodiscard]] Real along(const Normaliser& slope) const {
    std::vector<Real> slopes;
    visit_parameters(slope, [&](const char*, const auto& param) {
      slopes.insert(slopes.end(), param.data(), param.data() + param.size());
    });
    double sum = 0;
    auto next = slopes.begin();
    visit_parameters(direction_.normaliser, [&](const char*, const auto& param) {
      for (Index i = 0; i < param.size(); ++i) sum += double(*next++) * double(param[i]);
    });
    return Real(sum);
  }

  void load_rows(const My& my, const TensorView<const Real>& view, const LaneTile<Real>& to) const {
    const TilePlace& place = my.panel.place;
    pack_lanes(view.row(place.batch, place.head, place.query), view.strides().row, place.rows,
               to.rows, to.data, to.lanes);
  }

  // All tiles: scores and tangents of whole rows; once: both become weights and theirs; all tiles: the products.
  void mix_rows() requires(!Normaliser::streams) {
    std::vector<RowBlock<Real>> blocks;
    for_active([&](My& my) { blocks.push_back(my.panel.row_block()); });
    const auto part = [](const My& my, const LaneTile<Real>& row, const TilePlace& at) {
      return row.part(at.key - my.panel.seen_by_any.begin, at.keys);
    };
    for_tiles(
        [&](My& my, const PanelTile& tile) {
          for (int m = 0; m < kMaps; ++m) {
            const auto tangents = part(my, my.row_tangents[std::size_t(m)], tile.at);
            score_tile(my, m, tile, part(my, my.panel.rows.scores[std::size_t(m)], tile.at), tangents,
                       my.panel.rows.max[std::size_t(m)]);
          }
        },
        [&](My& my, const PanelTile& tile) {
          for (int m = 0; m < kMaps; ++m)
            part(my, my.panel.rows.scores[std::size_t(m)], tile.at).fill(-kInfinity<Real>);
        });
    Index n = 0;
    for_active([&](My& my) {
      if constexpr (HasRowJvp<Normaliser, Real>)
        weigh_block(my, blocks[std::size_t(n++)]);
      else
        weigh_rows(my);
    });
    for_tiles(
        [&](My& my, const PanelTile& tile) {
          mix_tile(my, tile, part(my, my.panel.rows.scores[0], tile.at),
                   part(my, my.row_tangents[0], tile.at));
        },
        [](My&, const PanelTile&) {});
  }
  // Rows of scores become rows of weights, and likewise their tangents, by the normaliser itself.
  void weigh_block(My& my, RowBlock<Real>& block) requires(!Normaliser::streams) {
    const TilePlace& place = my.panel.place;
    const ReadoutPanel<Real> own = my.panel.readout.load(place, my.mixed);
    block.extra = own.extra.data;
    block.query = own.query;
    RowTangents<Real> moved;
    for (int m = 0; m < kMaps; ++m) {
      const LaneTile<Real>& rows = my.row_tangents[std::size_t(m)];
      moved.scores[std::size_t(m)] = rows.part(0, my.panel.seen_by_any.size());
      moved.lse[std::size_t(m)] = my.lse_tangent.row(m);
    }
    if constexpr (Normaliser::uses_extra) {
      extra_tangents_.fill(Real(0));
      if (d_.extra.given()) load_rows(my, d_.extra, extra_tangents_);
      moved.extra = extra_tangents_.data;
    }
    if constexpr (query_inputs_of<Normaliser> != 0) {
      load_input_tangents(my);
      moved.query_inputs = input_tangents_.constant();
    }
    if constexpr (key_inputs_of<Normaliser> != 0) {
      const auto& keys = d_.part_inputs.normaliser_key;
      if (keys.given()) {
        moved.key_inputs = {
            input_row(keys, c_.geometry, place.batch, place.head, my.panel.seen_by_any.begin),
            keys.strides().row};
      } else {
        std::fill_n(no_key_inputs_, key_inputs_of<Normaliser>, Real(0));
        moved.key_inputs = {no_key_inputs_, 0};
      }
    }
    op_.normaliser.jvp(block, moved, direction_.normaliser);
    for (Index i = 0; i < place.rows; ++i)
      if (my.panel.rows.saw_nothing(i) && my.panel.sees_any(i))
        for (int m = 0; m < kMaps; ++m) my.panel.lse.row(m)[i] = my.lse_tangent.row(m)[i] = kNan;
  }
  // The same by dual numbers.
  void weigh_rows(My& my) requires(!Normaliser::streams) {
    const TilePlace& place = my.panel.place;
    const Index keys = my.panel.seen_by_any.size();
    for (Index i = 0; i < c_.plan.lanes; ++i) {
      LongHandRow<Moving> row = row_of(my, i, keys);
      for (Index j = 0; j < keys; ++j)
        my.panel.rows.scores[0].row(j)[i] = my.row_tangents[0].row(j)[i] = Real(0);
      const std::vector<Moving> weights =
          i < place.rows ? long_hand_weights(lifted_, row) : std::vector<Moving>();
      for (std::size_t n = 0; n < weights.size(); ++n) {
        const Index j = row.keys[n] - my.panel.seen_by_any.begin;
        my.panel.rows.scores[0].row(j)[i] = Real(weights[n].value);
        my.row_tangents[0].row(j)[i] = Real(weights[n].grad[0]);
      }
      const bool spoilt = i < place.rows && my.panel.rows.saw_nothing(i) && my.panel.sees_any(i);
      for (int m = 0; m < kMaps; ++m) {
        const Moving lse = row.keys.empty() ? moving(double(-kInfinity<Real>), 0)
                                            : lifted_.reference_lse(row, std::size_t(m));
        my.panel.lse.row(m)[i] = spoilt ? kNan : Real(lse.value);
        my.lse_tangent.row(m)[i] = spoilt ? kNan : Real(lse.grad[0]);
      }
    }
  }
  // What query i of the panel sees: keys that some map has a score for.
  [[nodiscard]] LongHandRow<Moving> row_of(const My& my, Index i, Index keys) const {
    const TilePlace& place = my.panel.place;
    LongHandRow<Moving> row;
    row.scores.resize(std::size_t(kMaps));
    row.head = place.head;
    const Index query = place.query + i;
    row.query = c_.geometry.query_position(query);
    if (i >= place.rows) return row;
    for (Index j = 0; j < keys; ++j) {
      bool seen = false;
      for (int m = 0; m < kMaps; ++m)
        seen = seen || my.panel.rows.scores[std::size_t(m)].row(j)[i] != -kInfinity<Real>;
      if (!seen) continue;
      row.keys.push_back(my.panel.seen_by_any.begin + j);
      for (int m = 0; m < kMaps; ++m) {
        const double score = double(my.panel.rows.scores[std::size_t(m)].row(j)[i]);
        const double tangent = double(my.row_tangents[std::size_t(m)].row(j)[i]);
        row.scores[std::size_t(m)].push_back(
            moving(score, score == double(-kInfinity<Real>) ? 0 : tangent));
      }
    }
    if constexpr (Normaliser::uses_extra)
      row.extra = moving(c_.in.extra(place.batch, place.head, query, 0),
                         d_.extra.given() ? d_.extra(place.batch, place.head, query, 0) : 0);
    if constexpr (Normaliser::uses_query)
      for (Index col = 0; col < c_.geometry.dim_qk; ++col)
        row.query_row.push_back(
            moving(c_.in.query(place.batch, place.head, query, col),
                   d_.query.given() ? d_.query(place.batch, place.head, query, col) : 0));
    const auto &inputs = c_.in.part_inputs, &tangents = d_.part_inputs;
    const auto at = [&](Index token) { return TokenRange{place.batch, place.head, token, 1}; };
    for (Index n = 0; n < query_inputs_of<Normaliser>; ++n)
      row.query_inputs.push_back(moving_input(inputs.normaliser_query, tangents.normaliser_query,
                                              c_.geometry, at(query), n));
    for (std::size_t k = 0; key_inputs_of<Normaliser> != 0 && k < row.keys.size(); ++k) {
      row.key_inputs.emplace_back();
      for (Index n = 0; n < key_inputs_of<Normaliser>; ++n)
        row.key_inputs.back().push_back(moving_input(inputs.normaliser_key, tangents.normaliser_key,
                                                     c_.geometry, at(row.keys[k]), n));
    }
    return row;
  }

  void write(My& my) {
    const TilePlace& place = my.panel.place;
    if constexpr (!Normaliser::streams)
      for (Index i = 0; i < place.rows; ++i)
        if (my.panel.rows.saw_nothing(i) && my.panel.sees_any(i))
          for (const auto& rows : {my.mixed, my.mixed_tangent})
            for (Index col = 0; col < rows.rows; ++col) rows.row(col)[i] = kNan;
    const auto unpack = [&](const LaneTile<Real>& from, const TensorView<Real>& to) {
      if (to.given())
        unpack_lanes(from.data, from.lanes, place.rows, from.rows,
                     to.row(place.batch, place.head, place.query), to.strides().row);
    };
    unpack(my.panel.lse, to_.lse);
    unpack(my.lse_tangent, to_.lse_tangent);
    if constexpr (Readout::identity) {
      unpack(my.mixed, to_.out);
      unpack(my.mixed_tangent, to_.out_tangent);
    } else {
      const Index dim = c_.geometry.dim_v, first = my.panel.first_row();
      const auto keep = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
        unpack_lanes(from.data, from.lanes, place.rows, dim, to.data() + first * dim, dim);
      };
      keep(my.mixed, rows_.mixed);
      keep(my.mixed_tangent, rows_.mixed_tangent);
      for (int m = 0; m < kMaps; ++m) {
        const Index at = m * c_.geometry.query_rows() + first;
        std::copy_n(my.panel.lse.row(m), place.rows, rows_.lse.data() + at);
        std::copy_n(my.lse_tangent.row(m), place.rows, rows_.lse_tangent.data() + at);
      }
    }
  }

  struct Nothing {};
  using Lifted = typename std::conditional_t<Normaliser::streams || HasRowJvp<Normaliser, Real>,
                                             std::type_identity<Nothing>,
                                             std::type_identity<Rebound<Normaliser, Moving>>>::type;

  const Op& op_;
  const Context& c_;
  TangentOperands<Real> d_;
  const Op& direction_;
  JvpOutputs<Real> to_;
  ReadoutRows<Real>& rows_;
  Lifted lifted_;                  // of row normalisers
  bool normaliser_moves_ = false;  // of streaming ones
  std::deque<My> panels_;
  Index active_ = 0;
  LaneTile<Real> dots_, scores_, tangents_, marks_, projected_, projected_tangents_,
      extra_tangents_;
  LaneTile<Real> input_tangents_, input_slopes_;  // of numbers of queries' tokens (normaliser)
  Real* no_key_inputs_;                           // zeros, where such numbers of keys hold still
  Real *transposed_, *copy_, *top_, *rescale_;
};

// Rows and their tangents through the readout, all at once: a readout may look at all rows of a call.
template <class Op, class Real>
void read_out_moving(const Op& op, const Op& direction, const Geometry& g, const Operands<Real>& in,
                     const TangentOperands<Real>& d, const ReadoutRows<Real>& rows,
                     const JvpOutputs<Real>& to) {
  using Readout = typename Op::ReadoutType;
  const auto zip = [](const std::vector<Real>& values, const std::vector<Real>& tangents) {
    std::vector<Moving> both;
    for (std::size_t n = 0; n < values.size(); ++n)
      both.push_back(moving(double(values[n]), double(tangents[n])));
    return both;
  };
  const auto dense = [](bool used, const TensorView<const Real>& values,
                        const TensorView<const Real>& tangents) {
    std::vector<Moving> both;
    const Shape s = used ? values.shape() : Shape{};
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.heads; ++h)
        for (Index t = 0; t < s.len; ++t)
          for (Index c = 0; c < s.dim; ++c)
            both.push_back(moving(double(values(b, h, t, c)),
                                  tangents.given() ? double(tangents(b, h, t, c)) : 0.0));
    return both;
  };
  ReadoutContext<Moving> context;
  context.geometry = g;
  context.out = zip(rows.mixed, rows.mixed_tangent);
  context.query = dense(Readout::uses_query, in.query, d.query);
  context.key = dense(Readout::uses_own_rows, in.key.plain(), d.key);
  context.value = dense(Readout::uses_own_rows, in.value.plain(), d.value);
  context.extra = dense(Readout::uses_extra, in.extra, d.extra);
  for (Index b = 0; b < g.batch && query_inputs_of<Readout> != 0; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index t = 0; t < g.len_q; ++t)
        for (Index n = 0; n < query_inputs_of<Readout>; ++n)
          context.query_inputs.push_back(moving_input(
              in.part_inputs.readout_query, d.part_inputs.readout_query, g, {b, h, t, 1}, n));
  const std::vector<Moving> lse = zip(rows.lse, rows.lse_tangent);
  for (std::size_t m = 0; m < std::size_t(Op::NormaliserType::maps); ++m)
    context.lse.emplace_back(lse.begin() + std::ptrdiff_t(m) * g.query_rows(),
                             lse.begin() + std::ptrdiff_t(m + 1) * g.query_rows());
  context.diagnostics.assign(std::size_t(Readout::diagnostics),
                             std::vector<double>(std::size_t(g.query_rows())));
  typename Op::template rebind<Moving> lifted;
  lifted.score = moving_part(op.score, direction.score);
  lifted.readout = moving_part(op.readout, direction.readout);
  lifted.read_out_reference(context);
  std::size_t next = 0;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index t = 0; t < g.len_q; ++t)
        for (Index c = 0; c < g.dim_v; ++c, ++next) {
          if (to.out.given()) to.out(b, h, t, c) = Real(context.out[next].value);
          to.out_tangent(b, h, t, c) = Real(context.out[next].grad[0]);
        }
  if constexpr (Readout::counts_steps) {
    next = 0;
    for (Index b = 0; b < g.batch && !context.steps.empty(); ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index t = 0; t < g.len_q; ++t)
          for (Index c = 0; c < op.readout.step_columns(g); ++c, ++next) {
            if (to.steps.given()) to.steps(b, h, t, c) = Real(context.steps[next].value);
            if (to.steps_tangent.given())
              to.steps_tangent(b, h, t, c) = Real(context.steps[next].grad[0]);
          }
  }
}

// Builds the side values of the keys of `c`, which are `keys`, and their tangents, and walks over all panels.
template <class Op, class Real>
void walk_jvp(const Op& op, const CallContext<Real>& c, KeySide<Real>& keys,
              KeyTangents<Op, Real>& key_tangents, const TangentOperands<Real>& d,
              const Op& direction, const JvpOutputs<Real>& to, const Options& options) {
  using Worker = JvpWorker<Op, Real>;
  using Normaliser = typename Op::NormaliserType;
  const Geometry& g = c.geometry;
  ReadoutRows<Real> rows;
  if constexpr (!Op::ReadoutType::identity) {
    for (auto* numbers : {&rows.mixed, &rows.mixed_tangent})
      numbers->resize(std::size_t(g.query_rows() * g.dim_v));
    for (auto* numbers : {&rows.lse, &rows.lse_tangent})
      numbers->resize(std::size_t(g.query_rows() * Normaliser::maps));
  }
  const Index groups = c.groups_of(1), units = g.batch * g.heads * groups;
  const Index elements = scratch_elements<Real>([&](Scratch<Real>& scratch) {
    return Worker(op, c, d, key_tangents, direction, to, rows, scratch);
  });
  const int workers = worker_count(options, g, units, elements * Index(sizeof(Real)));
  keys.build(workers);
  key_tangents.build(workers);
  Dispenser dispenser(units);
  if (units > 0)
    run_workers(workers, [&](int) {
      Scratch<Real> scratch(elements);
      Worker worker(op, c, d, key_tangents, direction, to, rows, scratch);
      // Longest groups first: under a causal mask the last one.
      for (Index unit = dispenser.next(); unit >= 0; unit = dispenser.next())
        worker.run(unit / groups / g.heads, unit / groups % g.heads, groups - 1 - unit % groups);
    });
  if constexpr (!Op::ReadoutType::identity) read_out_moving(op, direction, g, c.in, d, rows, to);
}

// A checked call.
template <class Op, class Real>
void run_jvp(const Op& op, const Geometry& g, const Operands<Real>& in,
             const BoundMask<Real>& bound, const TangentOperands<Real>& d, const Op& direction,
             const JvpOutputs<Real>& to, const Options& options) {
  using Normaliser = typename Op::NormaliserType;
  const OpTilesOf<Op> of(op);
  const OpTiles<Real> tiles = of.tiles();
  KeySide<Real> keys(tiles, g, in.key, nullptr, {}, in.key_inputs);
  Index row_tiles = 0;
  if constexpr (!Normaliser::streams)
    row_tiles = 2 * Normaliser::maps + row_work_tiles<Real>(op.normaliser, false);
  const CallContext<Real> c{tiles,
                                g,
                                bound,
                                in,
                                make_plan<Real>(g, bound, options, row_tiles, 0, true),
                                Real(scale_of(tiles, g, options)),
                                keys,
                                options.dropout};
  KeyTangents<Op, Real> key_tangents(op, c, d, direction);
  walk_jvp(op, c, keys, key_tangents, d, direction, to, options);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
