// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward over backward: how the gradients of softmax attention move. First the pass of jvp() gives out. and lse.; then
// panels of queries walk over tiles of keys as in backward, and behind each line of backward stands its tangent:
//
//   w = exp(s - lse)                      w. = w (s. - lse.)
//   X = V dO^T                            X. = V dO.^T + V. dO^T
//   delta = rowsum(dO o out)              delta. = rowsum(dO. o out + dO o out.)
//   g = w (X - delta)                     g. = w. (X - delta) + w (X. - delta.)
//   D = score's vjp of g                  D. by dual numbers (op_hvps.hpp)
//   dQ = D K                              dQ. = D. K + D K.
//   dK = D^T Q                            dK. = D.^T Q + D^T Q.
//   dV = w^T dO                           dV. = w.^T dO + w^T dO.
//
// Q and K are rows behind the score's transform. What is derived of rows is chained once per row, on numbers that move: that of
// a panel's queries by QuerySums, that of keys at the end by DerivedKeys::chain(). Rows that are transformed need dQ and dK, too.
//
// With dropout, X and X. are dropped, and so are the w and w. that are summed into dV. What panels add to shared rows they
// add tile by tile in the order of backward, behind the same gates.
//
// Memory  per worker as in backward; O(len) for out., lse. and the gradients of key features with their tangents.

#include <heed/engine/backward_walk.hpp>
#include <heed/engine/hvp_inputs.hpp>
#include <heed/engine/hvps.hpp>
#include <heed/engine/jvp_walk.hpp>
#include <heed/engine/panel_products.hpp>

#include <algorithm>
#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// What a Hessian-vector product reads beside inputs and tangents. out_tangent and lse_tangent are those of jvp().
template <class Real>
struct HvpOperands {
  TensorView<const Real> out, grad_out, grad_out_tangent;
  TensorView<const Real> out_tangent = {}, lse_tangent = {};
};

// One panel, one score map. Rows by lanes, and by rows with whole vectors.
template <class Real>
class HvpWorker {
 public:
  using Context = CallContext<Real>;
  using P = Pack<Real>;

  HvpWorker(const Context& c, const OpJvps<Real>& jvps, const ScoreHvps<Real>& hvps,
            const TangentOperands<Real>& d, const HvpOperands<Real>& operands,
            BackwardShared<Real>& shared, Scratch<Real>& scratch)
      : c_(c),
        traits_(c.op.score.traits),
        jvps_(jvps),
        hvps_(hvps),
        d_(d),
        o_(operands),
        s_(shared),
        own_(shared.vjps),
        panel_(c, scratch, false),
        tangents_(c, jvps.score, d, panel_.query[0], scratch),
        queries_(c, scratch),
        products_(c, scratch),
        positions_(c.keys.positions(), scratch),
        passage_(shared.gates) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const Index dim_qk = c.geometry.dim_qk, dim_v = c.geometry.dim_v;
    const auto take = [&](Index n) { return take_lanes(scratch, n, lanes); };
    for (LaneTile<Real>* one : {&dots_, &dot_tangents_, &weights_, &weight_tangents_, &dscores_,
                                &dscore_tangents_, &pull_tangents_})
      *one = take(tile);
    for (LaneTile<Real>* one : {&dout_, &dout_tangent_, &out_}) *one = take(dim_v);
    for (LaneTile<Real>* one : {&delta_, &delta_tangent_, &lse_tangent_, &pulled_}) *one = take(1);
    states_ = take(c.op.normaliser.traits.state_numbers);
    transposed_ = scratch.take(d.bias.given() ? tile * lanes : 0);
    top_ = scratch.take(lanes);
    for (PanelRows<Real>* rows : {&q_, &q_tangent_, &do_, &do_tangent_}) {
      const Index columns = rows == &q_ || rows == &q_tangent_ ? dim_qk : dim_v;
      rows->memory = scratch.take(lanes * whole_vectors<Real>(columns));
      rows->clean_memory = scratch.take(lanes * whole_vectors<Real>(columns));
    }
    key_lanes_ = scratch.take(traits_.key_features * tile * kLanes<Real>);
    key_tangent_lanes_ = scratch.take(traits_.key_features * tile * kLanes<Real>);
    dtable_ = scratch.take(table_size());
    if (c.op.score.columns)
      column_keys_ = DualLanes<Real>::take(scratch, dim_qk, column_key_lanes<Real>(tile));
  }
  HvpWorker(const HvpWorker&) = delete;

  // All that one panel adds.
  void run(const VisitingOrder::Visit& visit, OrderedSums& ordered) {
    own_.set_zero();
    products_.forget();
    positions_.begin();
    panel_.move_to(visit.batch, visit.head, visit.group);
    const KeyRange tiles = tiles_of(c_.plan, panel_.seen_by_any);
    passage_.begin(visit, tiles);
    panel_.load_queries();
    tangents_.load(panel_.place);
    load();
    // Invariant: behind tile t, the rows of dK. and dV. in tiles 0 ... t have all that this panel and those before it in
    // the family add to them, and queries_ holds the sums over the keys of these tiles.
    for (Index t = tiles.begin; t < tiles.end; ++t) {
      passage_.enter(t);
      for_parts(c_.plan, t, c_.geometry.len_kv, panel_.seen_by_all, [&](const KeyRange& keys) {
        const PanelTile tile = panel_.tile(keys);
        if (tile.kind != TileKind::empty) run_tile(tile);
      });
      passage_.leave();
    }
    queries_.finish(panel_.place, tangents_, hvps_, s_, *own_.score);
    if (traits_.has_table) multiply_table();
    if (!s_.sums_queries) write_query_gradients();
    if (traits_.has_positions)
      s_.vjps.score.add_positions(visit.head, positions_.finish().data(), *own_.score);
    ordered.add(visit, s_.sums_queries, [&](double* sums) {
      if (s_.sums_queries) write_query_gradients();
      own_.add_to(sums);
      double* to = sums + s_.first_table() + visit.head * table_size();
      for (Index i = 0; i < table_size(); ++i) to[i] += double(dtable_[i]);
    });
  }

 private:
  void write_query_gradients() const {
    if (s_.grads.query.given()) queries_.write(panel_.place, tangents_.source(), s_);
  }
  [[nodiscard]] Index table_size() const { return c_.keys.needs().table_rows * c_.geometry.dim_qk; }

  void load() {
    const TilePlace& place = panel_.place;
    const DerivedQueries<Real>& queries = panel_.query[0];
    pack_rows(o_.grad_out, place, dout_);
    pack_rows(o_.grad_out_tangent, place, dout_tangent_);
    // delta = rowsum(dO o out),  delta. = rowsum(dO. o out + dO o out.)
    pack_rows(o_.out, place, out_);
    lane_dot<Real>(dout_, out_, c_.plan.vectors, delta_.data);
    lane_dot<Real>(dout_tangent_, out_, c_.plan.vectors, delta_tangent_.data);
    pack_rows(o_.out_tangent, place, out_);
    lane_dot<Real>(dout_, out_, c_.plan.vectors, lse_tangent_.data);
    for (int v = 0; v < c_.plan.vectors; ++v) delta_tangent_.add(0, v, lse_tangent_.load(0, v));
    pack_rows(o_.lse_tangent, place, lse_tangent_);
    panel_.load_states(states_, &s_.saved);

    queries_.clear(queries.source().width);
    q_.copy(queries.query_rows(), c_.plan.lanes, c_.row_factor());
    load_query_tangents();
    do_.copy(dout_, place.rows);
    do_tangent_.rows = {};
    if (o_.grad_out_tangent.given()) do_tangent_.copy(dout_tangent_, place.rows);
    finite_ = true;
    for (const PanelRows<Real>* of : {&q_, &q_tangent_, &do_, &do_tangent_})
      finite_ = finite_ && all_finite(of->rows);
    if (!finite_)
      for (PanelRows<Real>* of : {&q_, &q_tangent_, &do_, &do_tangent_}) of->clean_up();
  }

  // To q_tangent_; no rows where queries hold still.
  void load_query_tangents() {
    const TilePlace& place = panel_.place;
    const Source& source = panel_.query[0].source();
    q_tangent_.rows = {};
    if (!tangents_.queries_move()) return;
    Rows<Real> rows;
    if (traits_.has_transform) {
      q_tangent_.copy(tangents_.derived_tiles().x.tangent(), place.rows);
      rows = q_tangent_.rows;
    } else {
      rows = {d_.query.row(place.batch, source.query_head, place.query) + source.query_column,
              place.rows, source.width, d_.query.strides().row};
    }
    q_tangent_.copy(rows, c_.plan.lanes, c_.row_factor());
  }

  void run_tile(const PanelTile& tile) {
    const TilePlace& at = tile.at;
    const auto part = [&](const LaneTile<Real>& of) { return of.part(0, at.keys); };
    products_.begin(panel_, tile);
    score_tile(tile);
    pulls(tile);
    weigh(at);
    if (s_.grads.bias.given()) {
      passage_.wait();
      products_.add_bias(part(dscore_tangents_), s_.grads.bias);
    }
    if (!c_.plain())
      hvps_.scores_vjp(panel_.query[0].score_tile(at, part(dots_), {}),
                       tangents_.tangent_tile(at, {}, part(dot_tangents_)),
                       {{dscores_.data, dscore_tangents_.data, at.keys, dscores_.lanes},
                        products_.hidden_or_none(),
                        key_lanes_,
                        key_tangent_lanes_,
                        queries_.features,
                        queries_.scalars.tangent(),
                        traits_.table_by_distance ? queries_.by_lane : queries_.derived.table,
                        &positions_,
                        c_.scale / c_.row_factor()});
    add_to_queries(at);
    passage_.wait();
    if (!c_.plain()) {
      const Index count = traits_.key_features, row = c_.keys.row(at.batch, at.head, 0, at.key);
      for (const auto& [lanes, sums] :
           {std::pair{key_lanes_, &s_.dfeatures}, {key_tangent_lanes_, &s_.tangents.dfeatures}})
        add_sums_of_lanes(lanes, at.keys, count, sums->data() + row * count, count);
    }
    add_to_keys(at);
    // dV. = w.^T dO + w^T dO.
    if (s_.grads.value.given()) {
      Real* to = s_.grads.value.row(at.batch, c_.geometry.kv_head(at.head), at.key);
      const Index stride = s_.grads.value.strides().row;
      add_rows(weight_tangents_, do_, to, stride);
      if (do_tangent_.given()) add_rows(weights_, do_tangent_, to, stride);
    }
  }

  // dQ. = D. K + D K.
  void add_to_queries(const TilePlace& at) {
    if (c_.op.score.columns) return chain_columns(at);
    const Rows<Real> keys = panel_.query[0].key_rows(at.key, at.keys);
    const LaneTile<Real> dq_tangent = queries_.dq.tangent();
    products_.add_lanes(keys, dscore_tangents_, dq_tangent);
    if (tangents_.keys_move())
      products_.add_lanes(tangents_.key_tangents(at), dscores_, dq_tangent);
    if (traits_.has_transform) products_.add_lanes(keys, dscores_, queries_.dq.value());
  }
  // dK. = D.^T Q + D^T Q.
  void add_to_keys(const TilePlace& at) {
    const Source& source = panel_.query[0].source();
    const auto to = s_.key_rows(c_, at, 0, source, 1);
    const auto before = traits_.has_transform ? s_.key_rows(c_, at, 0, source) : decltype(to){};
    if (c_.op.score.columns) {
      const KeyRange all{0, at.keys};
      if (to.data) add_column_keys(column_keys_.tangent(), all, to.data, to.stride);
      if (before.data) add_column_keys(column_keys_.value(), all, before.data, before.stride);
      return;
    }
    if (to.data) {
      add_rows(dscore_tangents_, q_, to.data, to.stride);
      if (q_tangent_.given()) add_rows(dscores_, q_tangent_, to.data, to.stride);
    }
    if (before.data) add_rows(dscores_, q_, before.data, before.stride);
  }
  // The gradients of all that columns read, and how they move; those of keys to column_keys_.
  void chain_columns(const TilePlace& at) {
    columns_vjp(
        c_, at, [&](const Strip& strip) { return tangents_.column_pairs(at, strip); },
        DualLanes<Real>{dscores_.data, dscore_tangents_.data, at.keys, dscores_.lanes},
        products_.hidden_or_none(), queries_.dq, column_keys_, queries_.column_weights);
  }

  // Scores to weights_, their tangents to weight_tangents_; dot products and theirs stay.
  void score_tile(const PanelTile& tile) {
    const TilePlace& at = tile.at;
    const auto& queries = panel_.query[0];
    tangents_.dots(at, dot_tangents_, {});
    queries.dots(at, dots_);
    std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
    const LaneTile<Real> scores = weights_.part(0, at.keys),
                         own = weight_tangents_.part(0, at.keys);
    for (Index j = 0; j < at.keys; ++j)
      for (int v = 0; v < c_.plan.vectors; ++v) {
        if (c_.plain()) scores.store(j, v, dots_.load(j, v));
        own.store(j, v, dot_tangents_.load(j, v));
      }
    queries.scores(at, tile.kind, c_.plain() ? scores : dots_.part(0, at.keys), {}, scores, top_);
    tangents_.scores(at, dots_, {}, {}, own, transposed_);
  }

  // X to dscores_, X. to pull_tangents_
  void pulls(const PanelTile& tile) {
    const TilePlace& at = tile.at;
    const Rows<Real> values = panel_.values(at);
    tile_dots(at, c_.plan.vectors, values, dout_, dscores_);
    tile_dots(at, c_.plan.vectors, values, dout_tangent_, pull_tangents_);
    if (d_.value.given())
      tile_dots(at, c_.plan.vectors,
                {d_.value.row(at.batch, c_.geometry.kv_head(at.head), at.key), at.keys,
                 c_.geometry.dim_v, d_.value.strides().row},
                dout_, pull_tangents_, Store::add);
  }

  // Scores and their tangents become w and w., X and X. become g and g.
  void weigh(const TilePlace& at) const {
    const LaneTile<Real> weights = weights_.part(0, at.keys),
                         weight_tangents = weight_tangents_.part(0, at.keys);
    panel_.dropout.drop(dscores_.part(0, at.keys), at);
    panel_.dropout.drop(pull_tangents_.part(0, at.keys), at);
    for_cells(at, [&](Index j, int v) {
      const auto hidden = is_hidden(weights_.load(j, v));
      weight_tangents_.store(j, v, weight_tangents_.load(j, v) - lse_tangent_.load(0, v));
      dscores_.store(j, v, zero_where(hidden, dscores_.load(j, v) - delta_.load(0, v)));
      pull_tangents_.store(
          j, v, zero_where(hidden, pull_tangents_.load(j, v) - delta_tangent_.load(0, v)));
    });
    jvps_.normaliser.weigh(weights, weight_tangents, at, c_.plan.vectors, states_, false,
                           pulled_.row(0));
    for_cells(at, [&](Index j, int v) {
      const P w = weights_.load(j, v), w_tangent = weight_tangents_.load(j, v);
      const P pull = dscores_.load(j, v), pull_tangent = pull_tangents_.load(j, v);
      dscores_.store(j, v, w * pull);
      dscore_tangents_.store(j, v, w_tangent * pull + w * pull_tangent);
    });
    panel_.dropout.drop(weights, at);
    panel_.dropout.drop(weight_tangents, at);
  }
  // f(key, vector) for the keys that each vector reads.
  template <class F>
  void for_cells(const TilePlace& at, F&& f) const {
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const KeyRange keys = at.keys_of(v);
      for (Index j = keys.begin; j < keys.end; ++j) f(j, v);
    }
  }

  // to[key] += sum over lanes of weights[key][lane] of[lane]
  void add_rows(const LaneTile<Real>& weights, const PanelRows<Real>& of, Real* to, Index stride) {
    products_.add_rows(weights, {0, weights.rows}, of, finite_ || !products_.hides(), to, stride);
  }

  // dR. = dG. Q + dG Q. ; a query that sees nothing may hold anything, and 0 times a NaN in it must not reach the table.
  void multiply_table() {
    std::fill(dtable_, dtable_ + table_size(), Real(0));
    const DualLanes<Real>& table = queries_.derived.table;
    const auto add = [&](const LaneTile<Real>& dg, const PanelRows<Real>& of) {
      const Rows<Real>& rows = finite_ ? of.rows : of.clean;
      gemm_add(dg.rows, rows.count, rows.columns, Broadcast<Real>{dg.data, dg.lanes, 1}, rows.data,
               rows.stride, dtable_, c_.geometry.dim_qk);
    };
    add(table.tangent(), q_);
    if (q_tangent_.given()) add(table.value(), q_tangent_);
  }

  const Context& c_;
  const ScoreTraits& traits_;
  const OpJvps<Real>& jvps_;
  const ScoreHvps<Real>& hvps_;
  TangentOperands<Real> d_;
  HvpOperands<Real> o_;
  BackwardShared<Real>& s_;
  OpGradient<Real> own_;  // tangents of the parameters' gradients
  Panel<Real> panel_;
  QueryTangents<Real> tangents_;
  QuerySums<Real, DualLanes<Real>> queries_;
  LaneTile<Real> states_;
  PanelProducts<Real> products_;
  PositionSums<Real> positions_;
  Passage passage_;
  LaneTile<Real> dots_, dot_tangents_, weights_, weight_tangents_, dscores_, dscore_tangents_,
      pull_tangents_;                         // [tile][lanes]
  LaneTile<Real> dout_, dout_tangent_, out_;  // [dim_v][lanes]
  LaneTile<Real> delta_, delta_tangent_, lse_tangent_,
      pulled_;  // [1][lanes]; nobody reads what is pulled
  PanelRows<Real> q_, q_tangent_, do_, do_tangent_;
  DualLanes<Real> column_keys_;  // see ColumnBack
  Real *transposed_, *top_, *key_lanes_, *key_tangent_lanes_;
  Real* dtable_;        // [table_rows][dim_qk], tangents of the gradient of a table by distance
  bool finite_ = true;  // are all rows of the panel?
};

// A checked call.
template <class Real>
void run_hvp(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const OpJvps<Real>& jvps,
             const ScoreHvps<Real>& hvps, const Geometry& g, const Operands<Real>& in,
             const BoundMask<Real>& bound, const Saved<Real>& saved, HvpOperands<Real> operands,
             const TangentOperands<Real>& d, const GradientOperands<Real>& to,
             const InputGradients<Real>& input_gradients, OpGradient<Real>* grad_op,
             const Options& options) {
  using Worker = HvpWorker<Real>;
  std::vector<Real> out_tangent(std::size_t(g.query_rows() * g.dim_v)),
      lse_tangent(std::size_t(g.query_rows()));
  JvpOutputs<Real> moved;
  moved.saved = &saved;
  moved.known_out = operands.out;
  moved.tangent.out = {out_tangent.data(), {g.batch, g.heads, g.len_q, g.dim_v}};
  moved.tangent.lse = {lse_tangent.data(), {g.batch, g.heads, g.len_q, 1}};
  operands.out_tangent = moved.tangent.out;
  operands.lse_tangent = moved.tangent.lse;

  // Both passes read the same derived values of keys.
  DerivedKeys<Real> keys(op, g, in.key, nullptr, {}, in.key_inputs,
                         {&jvps.score, d.key, d.key_inputs});
  CallContext<Real> c = make_context(op, g, bound, in, keys, options,
                                     plan_call<Real>(op, g, bound, options, 0, true));
  walk_jvp(c, jvps, keys, d, moved, options);

  c.plan.group = 1;
  BackwardShared<Real> shared(c, vjps, saved, {operands.out, operands.grad_out}, to,
                              resolve_threads(options.threads), 2);
  const Index units = g.batch * g.heads * c.groups_of(1);
  const auto build = [&](Scratch<Real>& scratch) {
    return std::make_unique<Worker>(c, jvps, hvps, d, operands, shared, scratch);
  };
  const Index elements = scratch_elements<Real>(build);
  const int workers = worker_count(options, g, units, elements * Index(sizeof(Real)));
  OrderedSums sums(shared.order, shared.places(workers), OrderedSums::early_for(workers),
                   shared.numbers());
  set_zero<Real>({to.key, to.value, to.bias, shared.sums_queries ? to.query : TensorView<Real>()},
                 workers);
  run_visits<Real>(
      shared.order, workers, elements, sums,
      [&](Index, Scratch<Real>& scratch) { return build(scratch); },
      [&](Worker& worker, const VisitingOrder::Visit& visit) { worker.run(visit, sums); },
      [&] { shared.gates.abandon(); });
  if (grad_op) shared.add_parameter_gradients(c, sums.total(), *grad_op);
  if (units > 0)
    keys.template chain<DualLanes<Real>>({hvps,
                                          {&shared, &shared.tangents},
                                          to.key,
                                          grad_op ? grad_op->score.get() : nullptr,
                                          to.key_inputs.given()},
                                         workers);
  if (op.columns.any()) {
    sum_over_readers(shared.tangents.dquery_inputs, g.heads, 1, to.query_inputs, workers);
    sum_over_readers(shared.tangents.dkey_inputs, g.heads, 1, to.key_inputs, workers);
    sum_over_readers(shared.dquery_inputs, g.heads, 1, input_gradients.query, workers);
    sum_over_readers(shared.dkey_inputs, g.heads, 1, input_gradients.key, workers);
  }
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
