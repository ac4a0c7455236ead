// SPDX-License-Identifier: Apache-2.0
#pragma once

// Backward: one skeleton for every variant, groups of query panels over tiles of keys, as in forward.
//
//   X = V dO^T     P = weights     dS = normaliser's vjp     dx = score's vjp
//   with dropout, X and the P that is summed into dV are dropped, the P of the vjp is not
//   dV += P dO     dK += dx Q      dQ += dx^T K
//
// Groups run in parallel; what they add to shared rows (dK, dV, bias and derived-value gradients) they add
// strip by strip of a tile in a fixed order, each behind its gate: the first group of a family passes the first strip,
// the second follows one strip behind. No buffer is reduced afterwards, no bit depends on the threads.
//
// Memory  per worker as in forward, and twice the gradients of the parameters; O(len_kv) for derived values.

#include <heed/engine/group.hpp>
#include <heed/engine/learnt_keys.hpp>
#include <heed/engine/query_gradients.hpp>

#include <initializer_list>
#include <memory>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// A panel on its way back.
template <class Real>
struct BackwardPanel {
  Panel<Real> panel;
  PanelGradients<Real> gradients;
  LaneTile<Real> dmixed;    // [dim_v][lanes]: dL/dmixed
  LaneTile<Real> states;    // of streaming normalisers, [number][lanes], as forward left them
  bool any_spoilt = false;  // is a row of the panel NaN?
  BfloatPair* paired;       // dmixed in pairs of rows, where precision is mixed
  Real* delta;              // [lanes]: rowsum(dmixed o mixed) - dL/dlse
  LaneTile<Real> dlse;      // [map][lanes]: dL/dlse
  LaneTile<const Real> extra, query;  // what the normaliser reads of the panel's rows
  LaneTile<Real> weights, dscores;    // [tile][lanes], of streaming normalisers
  PanelTile tile;                     // the tile at hand

  BackwardPanel(const CallContext<Real>& c, BackwardShared<Real>& shared, TileScratch<Real>& work,
                Index index, Scratch<Real>& scratch)
      : panel(c, scratch, true),
        gradients(c, shared, panel, work, index, scratch),
        dmixed(take_lanes(scratch, c.geometry.dim_v, c.plan.lanes)),
        states(take_lanes(scratch, c.op.normaliser.traits.state_numbers, c.plan.lanes)),
        paired(take_pairs(scratch, c.pair_products, pairs_of(c.geometry.dim_v) * c.plan.lanes)),
        delta(scratch.take(c.plan.lanes)),
        dlse(take_lanes(scratch, c.op.maps(), c.plan.lanes)) {
    const Index lanes = c.plan.lanes, keys = c.plan.tile;
    weights = {piece_at(work.weights, index * keys * lanes), keys, lanes};
    dscores = {piece_at(work.dscores, index * keys * lanes), keys, lanes};
  }
  BackwardPanel(const BackwardPanel&) = delete;  // gradients refer to the panel
};

template <class Real>
class BackwardWorker {
 public:
  using Context = CallContext<Real>;

  BackwardWorker(const Context& c, BackwardShared<Real>& shared, Scratch<Real>& scratch)
      : traits_(c.op.normaliser.traits),
        readout_(c.op.readout.traits),
        maps_(c.op.maps()),
        bf16_(c.pair_products, c.geometry, c.plan.tile, c.plan.lanes, maps_, true, scratch),
        c_(c),
        s_(shared),
        work_(c_, shared.gates, scratch),
        own_(shared.vjps),
        group_(c_),
        learnt_(c_, true, scratch) {
    if (c.pair_products) c_.bf16 = &bf16_;
    const Geometry& g = c.geometry;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const Index span = c.plan.span_keys(traits_.streams, g.len_kv);
    const auto take = [&](Index n) { return take_lanes(scratch, n, lanes); };
    for (Index i = 0; i < c.plan.group; ++i) group_.emplace(c_, shared, work_, i, scratch);
    for (std::size_t m = 0; m < std::size_t(maps_); ++m) dots_[m] = take(span);
    saved_tile_ = take(g.dim_v);
    if (!traits_.streams) dweights_ = take(g.len_kv);
    projected_ = take(c.keys.needs().rank > 0 ? tile : 0);
    top_ = scratch.take(lanes);
    dtable_ = scratch.take(c.keys.needs().table_rows * g.dim_qk);
  }
  BackwardWorker(const BackwardWorker&) = delete;  // panels refer to work_ and c_

  // All that one group of panels adds to the gradients; to those of parameters and tables by `sums`.
  void run(const VisitingOrder::Visit& visit, OrderedSums& sums) {
    own_.set_zero();
    work_.positions.begin();
    std::fill(dtable_, dtable_ + table_size(), Real(0));
    work_.products.forget();
    group_.move_to(visit.batch, visit.head, 1, visit.group);
    const KeyRange tiles = readout_.uses_own_rows ? KeyRange{0, c_.plan.tiles} : group_.tiles();
    work_.passage.begin(visit, tiles);
    for (My& my : group_.active()) {
      my.panel.load_queries();
      my.gradients.begin();
      load_output_gradient(my);
      if (traits_.streams) {
        load_state(my);
        if (learnt_.given()) add_learnt(my);
      } else
        weigh_rows(my);
    }
    // Invariant: behind tile t, the rows of dK and dV in tiles 0 ... t have all that this group and those before it
    // in the family add to them, and the lanes of dQ hold the sums over the keys of these tiles.
    for (Index t = tiles.begin; t < tiles.end; ++t) {
      work_.passage.enter(t);
      const bool once = group_.parts(t) == 1 && !readout_.uses_own_rows;
      group_.for_parts(t, [&](const KeyRange& keys) {
        for (My& my : group_.active()) my.tile = my.panel.tile(keys);
        const bool together = same_tile_for_all();
        work_.leaves = once && (together || group_.active().size() == 1);
        for (My& my : group_.active()) run_tile(my, together);
        if (together) add_together();
      });
      for (My& my : group_.active()) my.gradients.add_own_rows(t);
      work_.passage.leave();
    }
    for (My& my : group_.active()) {
      my.gradients.finish(own_, dtable_);
      if (!s_.sums_queries) my.gradients.write_query_gradients();
    }
    s_.vjps.score.add_positions(visit.head, work_.positions.finish().data(), *own_.score);
    commit(visit, sums);
  }

 private:
  using My = BackwardPanel<Real>;
  using WeighedTile = typename PanelGradients<Real>::WeighedTile;

  [[nodiscard]] Index table_size() const { return c_.keys.needs().table_rows * c_.geometry.dim_qk; }

  // dmixed and delta = rowsum(dmixed o mixed) - dL/dlse from dL/dout and dL/dlse, by the readout's vjp.
  void load_output_gradient(My& my) {
    const TilePlace& place = my.panel.place;
    const Index dim = c_.geometry.dim_v, lanes = c_.plan.lanes;
    pack_rows(s_.output.grad_out, place, my.dmixed);
    if (readout_.saves_mixed)
      pack_lanes(s_.saved.mixed.data() + my.panel.first_row() * dim, dim, place.rows, dim,
                 saved_tile_.data, lanes);
    else
      pack_rows(s_.output.out, place, saved_tile_);
    pack_rows(s_.output.grad_lse, place, my.dlse);
    ReadoutPanel<Real> readout = my.panel.readout.load(place, my.dmixed);
    readout.saved = saved_tile_.constant();
    readout.delta = my.delta;
    my.gradients.attach(readout);
    if (readout_.uses_lse) {
      restore_lse(my);
      readout.lse = my.panel.lse.constant();
      readout.dlse = my.dlse;
    }
    if (readout_.counts_steps) {
      pack_rows(s_.output.grad_steps, place, readout.steps);
      readout.dsteps = readout.steps.constant();
    }
    my.extra = readout.extra;
    my.query = readout.query;
    s_.vjps.readout.read_out_vjp(readout, *own_.readout, *own_.score);
    for (int v = 0; v < c_.plan.vectors && loss_reads_lse(); ++v)
      (Pack<Real>::load(my.delta + v * kLanes<Real>) - my.dlse.load(0, v))
          .store(my.delta + v * kLanes<Real>);
    my.gradients.take_output_gradient(my.dmixed);
    if constexpr (std::is_same_v<Real, float>)
      if (my.gradients.in_bf16())
        c_.pair_products->by_rows(my.dmixed.data, lanes, dim, lanes, my.paired, lanes);
  }

  [[nodiscard]] bool loss_reads_lse() const {
    return readout_.uses_lse || s_.output.grad_lse.given();
  }
  void restore_lse(My& my) const {
    const Real* from = s_.saved.lse.data() + my.panel.first_row();
    for (int m = 0; m < maps_; ++m, from += c_.geometry.query_rows())
      std::copy(from, from + my.panel.place.rows, my.panel.lse.row(m));
  }

  // Is lane i of a streaming panel a row that is NaN? So are then the gradients of all that it sees, whatever weight
  // a pair has.
  [[nodiscard]] static bool spoilt(const My& my, Index i) {
    return std::isnan(my.states.row(0)[i]);
  }

  // The states that forward has left, and the gradients of the normaliser's own parameters.
  void load_state(My& my) {
    my.panel.load_states(my.states, &s_.saved);
    for (int v = 0; v < c_.plan.vectors; ++v)
      s_.vjps.normaliser.vjp(my.panel.queries(v, my.gradients.normaliser_inputs()), v, my.states,
                             my.delta, *own_.normaliser);
    my.any_spoilt = false;
    for (Index i = 0; i < my.panel.place.rows; ++i) my.any_spoilt = my.any_spoilt || spoilt(my, i);
  }

  // What the panel adds to the gradients of learnt keys, and these to those of its queries.
  void add_learnt(My& my) {
    learnt_.load(my.panel.place, top_);
    learnt_.other.fill(Real(0));
    learnt_.dots(Store::overwrite, learnt_.of_head.values, my.dmixed, learnt_.other);
    s_.vjps.normaliser.weigh_vjp(learnt_.scores, learnt_.other, learnt_.place, c_.plan.vectors,
                                 my.states, my.delta, my.panel.dropout);
    learnt_.chain(my.dmixed, my.gradients.query(),
                  s_.vjps.normaliser.learnt(*own_.normaliser, my.panel.place.head));
  }

  // Do all panels see the tile at hand alike? One product over all their queries can then add to dK, and one to dV.
  [[nodiscard]] bool same_tile_for_all() {
    bool same = traits_.streams && group_.active().size() > 1 && !c_.op.score.columns;
    const My& first = group_.first();
    for (const My& my : group_.active())
      same = same && my.tile.kind != TileKind::empty && my.tile.at.key == first.tile.at.key &&
             my.tile.at.keys == first.tile.at.keys && my.gradients.sums_plainly(my.tile) &&
             my.gradients.in_bf16() == first.gradients.in_bf16();
    return same;
  }

  void run_tile(My& my, bool together) {
    if (my.tile.kind == TileKind::empty) return;
    if (traits_.streams)
      my.gradients.add(my.tile, weigh_tile(my, my.tile, together), together);
    else
      my.gradients.add(my.tile, weighed_part(my, my.tile.at), together);
  }

  // dK += dscores^T Q, dV += weights^T dO over the queries of the group.
  void add_together() {
    const TilePlace& at = group_.first().tile.at;
    const Source& source = group_.first().panel.query[0].source();
    const Index lanes = c_.plan.lanes, active = Index(group_.active().size());
    const auto add = [&](TileGates::Sum sum, const auto& weights, const auto* rows, Index depth,
                         Index columns, Real* sums, Index stride) {
      if (!sums) return;
      const Index padded = whole_vectors<Real>(columns);
      work_.passage.add(sum, at.key_range(), work_.leaves, [&](const KeyRange& part) {
        const auto own = weights.skip_rows(part.begin);
        Real* to = sums + part.begin * stride;
        if constexpr (std::is_same_v<decltype(rows), const BfloatPair*>)
          c_.pair_products->add(part.size(), depth, columns, own, rows, padded, to, stride);
        else
          gemm_add(part.size(), depth, columns, own, rows, padded, to, stride);
      });
    };
    const auto add_both = [&](const auto& dscores, const auto* q, const auto& weights,
                              const auto* dout, Index depth) {
      const auto dk = s_.key_rows(c_, at, 0, source);
      add(TileGates::Sum::keys, dscores, q, depth, source.width, dk.data, dk.stride);
      const TensorView<Real>& dv = s_.grads.value;
      if (dv.given())
        add(TileGates::Sum::values, weights, dout, depth, c_.geometry.dim_v,
            dv.row(at.batch, c_.geometry.kv_head(at.head), at.key), dv.strides().row);
    };
    if constexpr (std::is_same_v<Real, float>)
      if (group_.first().gradients.in_bf16()) {
        const auto in_pairs = [&](const BfloatPair* pairs) {
          return Broadcast<BfloatPair>{pairs, c_.plan.group * lanes / 2, 1};
        };
        return add_both(in_pairs(work_.paired_dscores), work_.paired_q,
                        in_pairs(work_.paired_weights), work_.paired_dout, active * lanes / 2);
      }
    const auto in_segments = [&](const Real* weights) {
      return SegmentedBroadcast<Real>{weights, lanes, 1, lanes, c_.plan.tile * lanes};
    };
    add_both(in_segments(work_.dscores), work_.q, in_segments(work_.weights), work_.dout,
             active * lanes);
  }

  [[nodiscard]] WeighedTile weigh_tile(My& my, const PanelTile& tile, bool together) {
    WeighedTile weighed{my.weights.part(0, tile.at.keys), {}, {}};
    weighed.dots[0] = dots_[0].part(0, tile.at.keys);
    weighed.dscores[0] = my.dscores.part(0, tile.at.keys);
    my.panel.query[0].tile_scores(tile.at, tile.kind, weighed.dots[0], projected_, weighed.weights,
                                  top_);
    weight_gradients(my, tile.at, weighed.dscores[0]);
    s_.vjps.normaliser.weigh_vjp(weighed.weights, weighed.dscores[0], tile.at, c_.plan.vectors,
                                 my.states, my.delta, my.panel.dropout);
    // Sums over the queries of the whole group read skipped pairs, too.
    if (together)
      for (const auto& rows : {weighed.weights, weighed.dscores[0]})
        fill_skipped(tile.at, c_.plan.vectors, rows, Real(0));
    for (Index i = 0; my.any_spoilt && i < tile.at.rows; ++i)
      if (spoilt(my, i))
        for (const auto& rows : {weighed.weights, weighed.dscores[0]})
          my.panel.spoil(rows, i, tile.at.key);
    return weighed;
  }

  // X = V dmixed^T
  void weight_gradients(const My& my, const TilePlace& at, const LaneTile<Real>& x) {
    const Rows<Real> values = my.panel.values(at);
    if constexpr (std::is_same_v<Real, float>)
      if (my.gradients.in_bf16())
        return bf16_.dots(bf16_.value_columns, values, my.paired, c_.plan.vectors, x);
    tile_dots(at, c_.plan.vectors, values, my.dmixed, x);
  }

  // Row normalisers: scores and X = V dmixed^T of the whole row, then (weights, dscores) by the normaliser's vjp.
  void weigh_rows(My& my) {
    Panel<Real>& panel = my.panel;
    RowBlock<Real> block = panel.row_block();
    block.dweights = block.weights = {dweights_.data, panel.seen_by_any.size(), c_.plan.lanes};
    block.dscores = block.scores;
    block.extra = my.extra.data;
    block.dextra = my.gradients.extra().data;
    block.query = my.query;
    block.dquery = my.gradients.query();
    block.dquery_inputs = my.gradients.normaliser_inputs();
    block.dkey_inputs = my.gradients.key_inputs();
    if (loss_reads_lse())
      for (int m = 0; m < maps_; ++m) block.dlse[std::size_t(m)] = my.dlse.row(m);
    const auto weigh = [&](const KeyRange& keys) {
      const PanelTile tile = panel.tile(keys);
      const WeighedTile weighed = weighed_part(my, tile.at);
      if (tile.kind == TileKind::empty) {
        for (int m = 0; m < maps_; ++m) weighed.dscores[std::size_t(m)].fill(-kInfinity<Real>);
        return weighed.weights.fill(Real(0));
      }
      for (std::size_t m = 0; m < std::size_t(maps_); ++m)
        panel.query[m].tile_scores(tile.at, tile.kind, weighed.dots[m], projected_,
                                   weighed.dscores[m], panel.rows.max[m]);
      weight_gradients(my, tile.at, weighed.weights);
      panel.dropout.drop(weighed.weights, tile.at);
      fill_skipped(tile.at, c_.plan.vectors, weighed.weights, Real(0));
    };
    for (Index t = 0; t < c_.plan.tiles; ++t)
      for_parts(c_.plan, t, c_.geometry.len_kv, panel.seen_by_all, weigh);
    s_.vjps.normaliser.weights_vjp(block, *own_.normaliser);
    panel.dropout.drop(block.weights, panel.whole_rows());
    for (Index i = 0; i < panel.place.rows; ++i)
      if (panel.is_nan_row(i)) make_row_nan(my, block, i);
  }
  // Gradients of a row that forward has found to be NaN, and of what it has read.
  void make_row_nan(const My& my, const RowBlock<Real>& block, Index i) {
    const Real nan = std::numeric_limits<Real>::quiet_NaN();
    for (const auto& rows : block.dscores)
      if (rows.data) my.panel.spoil(rows, i, my.panel.seen_by_any.begin);
    my.panel.spoil(block.weights, i, my.panel.seen_by_any.begin);
    if (traits_.uses_extra) block.dextra[i] = nan;
    for (Index c = 0; c < block.dquery_inputs.rows; ++c) block.dquery_inputs.row(c)[i] = nan;
    for (Index j = 0; j < block.keys() && traits_.key_inputs > 0; ++j)
      if (my.panel.sees(i, my.panel.seen_by_any.begin + j))
        for (Index c = 0; c < traits_.key_inputs; ++c) block.dkey_inputs(j, c) = nan;
    own_.normaliser->make_nan(block.head, c_.geometry.heads);
  }
  // A tile of whole rows: before the vjp, scores stand where dscores do, and X where weights do.
  [[nodiscard]] WeighedTile weighed_part(const My& my, const TilePlace& at) const {
    const auto part = [&](const LaneTile<Real>& row) { return my.panel.part_of(row, at); };
    WeighedTile tile{part(dweights_), {}, {}};
    for (std::size_t m = 0; m < std::size_t(maps_); ++m) {
      tile.dots[m] = part(dots_[m]);
      tile.dscores[m] = part(my.panel.rows.scores[m]);
    }
    return tile;
  }

  // Adds what the group gives to the parameters, and to rows of query that others add to.
  void commit(const VisitingOrder::Visit& visit, OrderedSums& ordered) {
    ordered.add(visit, s_.sums_queries, [&](double* sums) {
      for (My& my : group_.active())
        if (s_.sums_queries) my.gradients.write_query_gradients();
      own_.add_to(sums);
      double* to = sums + s_.first_table() + visit.head * table_size();
      for (Index i = 0; i < table_size(); ++i) to[i] += double(dtable_[i]);
    });
  }

  const NormaliserTraits& traits_;
  const ReadoutTraits& readout_;
  const int maps_;
  Bf16Tile bf16_;
  Context c_;  // the call's, but for bf16_
  BackwardShared<Real>& s_;
  TileScratch<Real> work_;
  OpGradient<Real> own_;  // parameter gradients of the group
  PanelGroup<Real, My> group_;
  LearntTile<Real> learnt_;
  std::array<LaneTile<Real>, kMostMaps> dots_;  // [map]
  LaneTile<Real> saved_tile_, projected_;
  LaneTile<Real> dweights_;  // of row normalisers
  Real *top_, *dtable_;
};

// Zeros in all of the views that are given.
template <class Real>
void set_zero(std::initializer_list<TensorView<Real>> views, int threads) {
  const auto heads = [](const TensorView<Real>& view) {
    return view.given() ? view.shape().batch * view.shape().heads : 0;
  };
  Index units = 0;
  for (const TensorView<Real>& view : views) units += heads(view);
  parallel_for(units, threads, [&](Index unit) {
    const TensorView<Real>* view = views.begin();
    for (; unit >= heads(*view); ++view) unit -= heads(*view);
    const Shape& s = view->shape();
    const bool dense = view->strides().row == s.dim;  // all rows of a head are one run
    const Index runs = dense ? std::min<Index>(s.len, 1) : s.len,
                run = dense ? s.len * s.dim : s.dim;
    for (Index t = 0; t < runs; ++t)
      std::fill_n(view->row(unit / s.heads, unit % s.heads, t), run, Real(0));
  });
}

// All visits to the families of one or several calls. engage(call, scratch) makes a worker for a call, a pointer, on
// `elements` numbers of scratch; run(worker, visit) adds to `sums` in its turn; abandon() wakes the workers that wait
// elsewhere when one has failed.
template <class Real, class Engage, class Run, class Abandon>
void run_visits(const Families& families, int workers, Index elements, OrderedSums& sums,
                Engage&& engage, Run&& run, Abandon&& abandon) {
  if (families.visits() == 0) return;
  struct Desk {
    Scratch<Real> scratch;
    std::invoke_result_t<Engage&, Index, Scratch<Real>&> worker = {};
    Index call = 0;  // that the worker is made for
  };
  FixedList<Desk> desks(workers);
  for (int w = 0; w < workers; ++w) {
    Desk& desk = desks.emplace(Scratch<Real>(elements));
    desk.worker = engage(0, desk.scratch);
  }
  Visits visits(families);
  const auto work = [&](int w) {
    Desk& desk = desks[std::size_t(w)];
    Index number = Visits::kNone;
    while (const auto visit = visits.next(number)) {
      if (visit->call != desk.call) {
        desk.worker.reset();
        desk.scratch.clear();
        desk.worker = engage(visit->call, desk.scratch);
        desk.call = visit->call;
      }
      run(*desk.worker, *visit);
    }
  };
  run_workers(workers, work, [&] {
    abandon();
    sums.abandon();
  });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
