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
// Q and K are rows behind the score's transform. What is derived of rows is chained once per row: that of a panel's queries in
// hvp_queries.hpp, that of keys at the end in hvp_keys.hpp. Rows that are transformed need dQ and dK, too.
//
// With dropout, X and X. are dropped, and so are the w and w. that are summed into dV. What panels add to shared rows they
// add tile by tile in the order of backward, behind the same turnstiles.
//
// Memory  per worker as in backward; O(len) for out., lse. and the gradients of key features with their tangents.

#include <heed/engine/backward_walk.hpp>
#include <heed/engine/hvp_inputs.hpp>
#include <heed/engine/hvp_keys.hpp>
#include <heed/engine/hvp_queries.hpp>
#include <heed/engine/jvp_walk.hpp>

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
            const TangentOperands<Real>& d, const KeyTangents<Real>& keys,
            const HvpOperands<Real>& operands, HvpShared<Real>& shared, Scratch<Real>& scratch)
      : c_(c),
        traits_(c.op.score.traits),
        jvps_(jvps),
        hvps_(hvps),
        d_(d),
        o_(operands),
        s_(shared),
        own_(shared.vjps),
        panel_(c, scratch, false),
        tangents_(c, d, keys, panel_.query[0], scratch),
        queries_(c, hvps, d, keys, panel_, tangents_, shared, scratch),
        positions_(c.keys.positions(), scratch) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const Index dim_qk = c.geometry.dim_qk, dim_v = c.geometry.dim_v;
    const auto take = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    for (LaneTile<Real>* one : {&dots_, &dot_tangents_, &weights_, &weight_tangents_, &dscores_,
                                &dscore_tangents_, &pull_tangents_, &marks_})
      *one = take(tile);
    for (LaneTile<Real>* one : {&dout_, &dout_tangent_, &out_}) *one = take(dim_v);
    for (LaneTile<Real>* one : {&delta_, &delta_tangent_, &lse_tangent_, &pulled_}) *one = take(1);
    states_ = take(c.op.normaliser.traits.state_numbers);
    transposed_ = scratch.take(d.bias.given() ? tile * lanes : 0);
    top_ = scratch.take(lanes);
    copy_ = scratch.take(tile * std::max(dim_qk, dim_v));
    for (RowPair* pair : {&q_, &q_tangent_, &do_, &do_tangent_}) {
      const Index columns = pair == &q_ || pair == &q_tangent_ ? dim_qk : dim_v;
      pair->memory = scratch.take(lanes * whole_vectors<Real>(columns));
      pair->clean_memory = scratch.take(lanes * whole_vectors<Real>(columns));
    }
    key_lanes_ = scratch.take(traits_.key_features * tile * kLanes<Real>);
    key_tangent_lanes_ = scratch.take(traits_.key_features * tile * kLanes<Real>);
    dtable_ = scratch.take(table_size());
  }
  HvpWorker(const HvpWorker&) = delete;

  // All that one panel adds.
  void run(const VisitingOrder::Visit& visit, OrderedSums& ordered) {
    own_.set_zero();
    positions_.begin();
    panel_.move_to(visit.batch, visit.head, visit.group);
    panel_.load_queries();
    tangents_.load(panel_.place);
    load();
    // Invariant: behind tile t, the rows of dK. and dV. in tiles 0 ... t have all that this panel and those before it in
    // the family add to them, and queries_ holds the sums over the keys of these tiles.
    for (Index t = 0; t < c_.plan.tiles; ++t) {
      for_parts(c_.plan, t, c_.geometry.len_kv, panel_.seen_by_all, [&](const KeyRange& keys) {
        const PanelTile tile = panel_.tile(keys);
        if (tile.kind != TileKind::empty) run_tile(visit, t, tile);
      });
      wait(visit, t);
      s_.tiles.pass(visit.gate(t, c_.plan.tiles));
    }
    queries_.finish(*own_.score);
    if (traits_.has_table) multiply_table();
    if (!s_.sums_queries) queries_.write();
    if (traits_.has_positions)
      s_.vjps.score.add_positions(visit.head, positions_.finish().data(), *own_.score);
    ordered.add(visit, [&](double* sums) {
      if (s_.sums_queries) queries_.write();
      own_.add_to(sums);
      double* to = sums + s_.first_table() + visit.head * table_size();
      for (Index i = 0; i < table_size(); ++i) to[i] += double(dtable_[i]);
    });
  }

 private:
  // Rows of the panel, padded to whole vectors, and a copy of them without numbers that are not finite.
  struct RowPair {
    Real *memory = nullptr, *clean_memory = nullptr;
    Rows<Real> rows, clean;
    bool given = false;
  };

  [[nodiscard]] Index table_size() const { return c_.keys.needs().table_rows * c_.geometry.dim_qk; }
  void wait(const VisitingOrder::Visit& visit, Index t) const {
    s_.tiles.wait(visit.gate(t, c_.plan.tiles), visit.rank);
  }

  void load() {
    const TilePlace& place = panel_.place;
    const Source& source = panel_.query[0].source();
    const auto lanes_of = [&](const TensorView<const Real>& view, const LaneTile<Real>& to) {
      if (!view.given()) return to.fill(Real(0));
      pack_lanes(view.row(place.batch, place.head, place.query), view.strides().row, place.rows,
                 to.rows, to.data, to.lanes);
    };
    lanes_of(o_.grad_out, dout_);
    lanes_of(o_.grad_out_tangent, dout_tangent_);
    // delta = rowsum(dO o out),  delta. = rowsum(dO. o out + dO o out.)
    lanes_of(o_.out, out_);
    lane_dot<Real>(dout_, out_, c_.plan.vectors, delta_.data);
    lane_dot<Real>(dout_tangent_, out_, c_.plan.vectors, delta_tangent_.data);
    lanes_of(o_.out_tangent, out_);
    lane_dot<Real>(dout_, out_, c_.plan.vectors, lse_tangent_.data);
    for (int v = 0; v < c_.plan.vectors; ++v) delta_tangent_.add(0, v, lse_tangent_.load(0, v));
    lanes_of(o_.lse_tangent, lse_tangent_);
    for (int v = 0; v < c_.plan.vectors; ++v) c_.op.normaliser.begin(panel_.queries(v), v, states_);
    for (Index n = 0; n < states_.rows; ++n)
      std::copy_n(s_.saved.state.data() + panel_.first_row() + n * c_.geometry.query_rows(),
                  place.rows, states_.row(n));

    queries_.begin();
    finite_ = true;
    const auto clear = [&](RowPair& rows, Index columns, bool given) {
      const Index padded = whole_vectors<Real>(columns);
      std::fill(rows.memory, rows.memory + c_.plan.lanes * padded, Real(0));
      rows.rows = {rows.memory, place.rows, columns, padded};
      rows.given = given;
    };
    const auto copy = [&](const Real* from, Index stride, Real factor, RowPair& to) {
      for (Index r = 0; r < place.rows; ++r)
        for (Index col = 0; col < to.rows.columns; ++col)
          to.memory[r * to.rows.stride + col] = from[r * stride + col] * factor;
    };
    const Rows<Real> queries = panel_.query[0].query_rows();
    clear(q_, queries.columns, true);
    copy(queries.data, queries.stride, c_.row_factor(), q_);
    clear(q_tangent_, queries.columns, tangents_.queries_move());
    if (traits_.has_transform) {
      const LaneTile<Real>& moved = tangents_.side().x;
      unpack_lanes(moved.data, moved.lanes, place.rows, moved.rows, q_tangent_.memory,
                   q_tangent_.rows.stride);
      copy(q_tangent_.memory, q_tangent_.rows.stride, c_.row_factor(), q_tangent_);
    } else if (d_.query.given()) {
      copy(d_.query.row(place.batch, source.query_head, place.query) + source.query_column,
           d_.query.strides().row, c_.row_factor(), q_tangent_);
    }
    for (const auto& [view, rows] :
         {std::pair{&o_.grad_out, &do_}, {&o_.grad_out_tangent, &do_tangent_}}) {
      clear(*rows, c_.geometry.dim_v, view->given());
      if (view->given())
        copy(view->row(place.batch, place.head, place.query), view->strides().row, Real(1), *rows);
    }
    for (const RowPair* pair : {&q_, &q_tangent_, &do_, &do_tangent_})
      finite_ = finite_ && all_finite(pair->rows);
    if (!finite_)
      for (RowPair* pair : {&q_, &q_tangent_, &do_, &do_tangent_})
        pair->clean = finite_copy(pair->rows, pair->clean_memory, pair->rows.stride);
  }

  void run_tile(const VisitingOrder::Visit& visit, Index t, const PanelTile& tile) {
    const TilePlace& at = tile.at;
    const auto part = [&](const LaneTile<Real>& of) { return of.part(0, at.keys); };
    marked_ = false;
    score_tile(tile);
    pulls(tile);
    weigh(at);
    if (s_.grads.bias.given()) {
      wait(visit, t);
      add_bias(at);
    }
    if (!c_.plain())
      hvps_.scores_vjp(panel_.query[0].score_tile(at, part(dots_), {}),
                       tangents_.tangent_tile(at, {}, part(dot_tangents_)),
                       queries_.back({part(dscores_), part(dscore_tangents_)},
                                     hides(tile) ? marks(tile) : LaneTile<Real>{}, key_lanes_,
                                     key_tangent_lanes_, positions_));
    // dQ. = D. K + D K.
    const Rows<Real> keys = panel_.query[0].key_rows(at.key, at.keys);
    const MovingLanes<Real>& dq = queries_.dq();
    add_lanes(keys, tile, dscore_tangents_, dq.tangent);
    if (tangents_.keys_move()) add_lanes(tangents_.key_tangents(at), tile, dscores_, dq.tangent);
    if (traits_.has_transform) add_lanes(keys, tile, dscores_, dq.value);
    wait(visit, t);
    if (!c_.plain()) {
      add_key_features(at, key_lanes_, s_.dfeatures);
      add_key_features(at, key_tangent_lanes_, s_.dfeature_tangents);
    }
    // dK. = D.^T Q + D^T Q.
    const Source& source = panel_.query[0].source();
    if (const auto to = s_.key_tangent_rows(c_, at, source); to.data) {
      add_rows(dscore_tangents_, tile, q_, to.data, to.stride);
      if (q_tangent_.given) add_rows(dscores_, tile, q_tangent_, to.data, to.stride);
    }
    if (traits_.has_transform) {
      const auto to = s_.key_rows(c_, at, 0, source);
      add_rows(dscores_, tile, q_, to.data, to.stride);
    }
    // dV. = w.^T dO + w^T dO.
    if (s_.grads.value.given()) {
      Real* to = s_.grads.value.row(at.batch, c_.geometry.kv_head(at.head), at.key);
      const Index stride = s_.grads.value.strides().row;
      add_rows(weight_tangents_, tile, do_, to, stride);
      if (do_tangent_.given) add_rows(weights_, tile, do_tangent_, to, stride);
    }
  }

  // Scores to weights_, their tangents to weight_tangents_; dot products and theirs stay.
  void score_tile(const PanelTile& tile) {
    const TilePlace& at = tile.at;
    const auto& side = panel_.query[0];
    tangents_.dots(at, dot_tangents_, {});
    side.dots(at, dots_);
    std::fill(top_, top_ + c_.plan.lanes, -kInfinity<Real>);
    const LaneTile<Real> scores = weights_.part(0, at.keys),
                         own = weight_tangents_.part(0, at.keys);
    for (Index j = 0; j < at.keys; ++j)
      for (int v = 0; v < c_.plan.vectors; ++v) {
        if (c_.plain()) scores.store(j, v, dots_.load(j, v));
        own.store(j, v, dot_tangents_.load(j, v));
      }
    side.scores(at, tile.kind, c_.plain() ? scores : dots_.part(0, at.keys), {}, scores, top_);
    tangents_.scores(at, dots_, {}, {}, own, transposed_);
  }

  // X to dscores_, X. to pull_tangents_
  void pulls(const PanelTile& tile) {
    const TilePlace& at = tile.at;
    const Rows<Real> values = panel_.values(at);
    product<Store::overwrite>(at, values, dout_, dscores_);
    product<Store::overwrite>(at, values, dout_tangent_, pull_tangents_);
    if (d_.value.given())
      product<Store::add>(at,
                          {d_.value.row(at.batch, c_.geometry.kv_head(at.head), at.key), at.keys,
                           c_.geometry.dim_v, d_.value.strides().row},
                          dout_, pull_tangents_);
  }
  template <Store store>
  void product(const TilePlace& at, const Rows<Real>& rows, const LaneTile<Real>& lanes,
               const LaneTile<Real>& out) const {
    for_strips(at, c_.plan.vectors, [&](const Strip& strip) {
      const Rows<Real> own = rows.part(strip.keys.begin, strip.keys.size());
      const LaneTile<Real> of = strip.lanes_of(lanes), to = strip.of(out);
      panel_gemm<store>(own.count, own.columns, strip.vectors,
                        Broadcast<Real>{own.data, own.stride, 1}, of.data, of.lanes, to.data,
                        to.lanes);
    });
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

  // Lanes beyond the last query count as hidden.
  [[nodiscard]] bool hides(const PanelTile& tile) const {
    return tile.kind == TileKind::partial || c_.mask.has_bias();
  }
  [[nodiscard]] LaneTile<Real> marks(const PanelTile& tile) {
    const LaneTile<Real> own = marks_.part(0, tile.at.keys);
    if (!marked_) panel_.mark_hidden(tile.at, tile.kind, own);
    marked_ = true;
    return own;
  }

  // out[column][lane] += sum over keys of rows[key][column] * weights[key][lane]
  void add_lanes(const Rows<Real>& rows, const PanelTile& tile, const LaneTile<Real>& weights,
                 const LaneTile<Real>& out) {
    const bool plainly = !hides(tile) || all_finite(rows);
    const LaneTile<Real> hidden = plainly ? LaneTile<Real>{} : marks(tile);
    for_strips(tile.at, c_.plan.vectors, [&](const Strip& strip) {
      const Rows<Real> own = rows.part(strip.keys.begin, strip.keys.size());
      const LaneTile<Real> of = strip.of(weights), to = strip.lanes_of(out);
      if (plainly)
        add_lane_product(own, of, strip.vectors, tile.at.rows, to);
      else
        add_lane_product_guarded(own, of, strip.of(hidden), strip.vectors, tile.at.rows, to, copy_);
    });
  }
  // to[key] += sum over lanes of weights[key][lane] * rows[lane]
  void add_rows(const LaneTile<Real>& weights, const PanelTile& tile, const RowPair& pair, Real* to,
                Index stride) {
    const bool plainly = finite_ || !hides(tile);
    const LaneTile<Real> hidden = plainly ? LaneTile<Real>{} : marks(tile);
    for_strips(tile.at, c_.plan.vectors, [&](const Strip& strip) {
      const Index first = strip.first_vector * kLanes<Real>;
      const Index count = std::min<Index>(strip.vectors * kLanes<Real>, pair.rows.count - first);
      const LaneTile<Real> own = strip.of(weights);
      Real* out = to + strip.keys.begin * stride;
      if (plainly)
        add_row_product(own, pair.rows.part(first, count), out, stride);
      else
        add_row_product_guarded(own, strip.of(hidden), pair.rows.part(first, count),
                                pair.clean.part(first, count), out, stride);
    });
  }

  void add_bias(const TilePlace& at) const {
    const TensorView<Real>& bias = s_.grads.bias;
    Real* to = BoundMask<Real>::broadcast_row(bias, at.batch, at.head, at.query) + at.key;
    const Index step = bias.shape().len > 1 ? bias.strides().row : 0;
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const KeyRange keys = at.keys_of(v);
      const Index first = v * kLanes<Real>, end = std::min<Index>(at.rows, first + kLanes<Real>);
      for (Index i = first; i < end; ++i)
        for (Index j = keys.begin; j < keys.end; ++j)
          to[i * step + j] += dscore_tangents_.row(j)[i];
    }
  }
  // Adds the lanes' sums, [key_features][keys][W], to the gradients of key features or to their tangents.
  void add_key_features(const TilePlace& at, const Real* lanes, std::vector<Real>& to) const {
    const Index features = traits_.key_features;
    Real* const first = to.data() + c_.keys.row(at.batch, at.head, 0, at.key) * features;
    for (Index i = 0; i < features; ++i)
      for (Index j = 0; j < at.keys; ++j)
        first[j * features + i] += sum_lanes(P::load(lanes + (i * at.keys + j) * kLanes<Real>));
  }

  // dR. = dG. Q + dG Q. ; a query that sees nothing may hold anything, and 0 times a NaN in it must not reach the table.
  void multiply_table() {
    std::fill(dtable_, dtable_ + table_size(), Real(0));
    const MovingLanes<Real> table = queries_.table();
    const auto add = [&](const LaneTile<Real>& dg, const RowPair& of) {
      const Rows<Real>& rows = finite_ ? of.rows : of.clean;
      gemm_add(dg.rows, rows.count, rows.columns, Broadcast<Real>{dg.data, dg.lanes, 1}, rows.data,
               rows.stride, dtable_, c_.geometry.dim_qk);
    };
    add(table.tangent, q_);
    if (q_tangent_.given) add(table.value, q_tangent_);
  }

  const Context& c_;
  const ScoreTraits& traits_;
  const OpJvps<Real>& jvps_;
  const ScoreHvps<Real>& hvps_;
  TangentOperands<Real> d_;
  HvpOperands<Real> o_;
  HvpShared<Real>& s_;
  OpGradient<Real> own_;  // tangents of the parameters' gradients
  Panel<Real> panel_;
  QueryTangents<Real> tangents_;
  MovingQueryGradients<Real> queries_;
  LaneTile<Real> states_;
  PositionSums<Real> positions_;
  LaneTile<Real> dots_, dot_tangents_, weights_, weight_tangents_, dscores_, dscore_tangents_,
      pull_tangents_, marks_;                 // [tile][lanes]
  LaneTile<Real> dout_, dout_tangent_, out_;  // [dim_v][lanes]
  LaneTile<Real> delta_, delta_tangent_, lse_tangent_,
      pulled_;  // [1][lanes]; nobody reads what is pulled
  RowPair q_, q_tangent_, do_, do_tangent_;
  Real *transposed_, *top_, *copy_, *key_lanes_, *key_tangent_lanes_;
  Real* dtable_;         // [table_rows][dim_qk], tangents of the gradient of a table by distance
  bool finite_ = true;   // are all rows of the panel?
  bool marked_ = false;  // are the marks those of the tile at hand?
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

  // Both passes read the same side values of keys.
  KeySide<Real> keys(op, g, in.key, nullptr, {}, in.key_inputs);
  CallContext<Real> c = make_context(op, g, bound, in, keys, options,
                                     plan_call<Real>(op, g, bound, options, 0, true));
  KeyTangents<Real> key_tangents(c, jvps.score, d);
  walk_jvp(c, jvps, keys, key_tangents, d, moved, options);

  c.plan.group = 1;
  HvpShared<Real> shared(c, vjps, saved, {operands.out, operands.grad_out}, to);
  const Index units = g.batch * g.heads * c.groups_of(1);
  const auto build = [&](Scratch<Real>& scratch) {
    return std::make_unique<Worker>(c, jvps, hvps, d, key_tangents, operands, shared, scratch);
  };
  const Index elements = scratch_elements<Real>(build);
  const int workers = worker_count(options, g, units, elements * Index(sizeof(Real)));
  OrderedSums sums(shared.order, shared.places(workers), shared.numbers());
  set_zero<Real>({to.key, to.value, to.bias, shared.sums_queries ? to.query : TensorView<Real>()},
                 workers);
  run_visits<Real>(
      shared.order, workers, elements, sums,
      [&](Index, Scratch<Real>& scratch) { return build(scratch); },
      [&](Worker& worker, const VisitingOrder::Visit& visit) { worker.run(visit, sums); },
      [&] { shared.tiles.abandon(); });
  if (grad_op) shared.add_parameter_gradients(c, sums.total(), *grad_op);
  if (units > 0)
    MovingKeyChain<Real>(c, hvps, d, key_tangents, shared)
        .run(grad_op ? grad_op->score.get() : nullptr, workers);
  if (op.columns.any()) {
    sum_over_readers(shared.dquery_input_tangents, g.heads, 1, to.query_inputs, workers);
    sum_over_readers(shared.dkey_input_tangents, g.heads, 1, to.key_inputs, workers);
    sum_over_readers(shared.dquery_inputs, g.heads, 1, input_gradients.query, workers);
    sum_over_readers(shared.dkey_inputs, g.heads, 1, input_gradients.key, workers);
  }
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
