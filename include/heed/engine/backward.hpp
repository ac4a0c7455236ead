// SPDX-License-Identifier: Apache-2.0
#pragma once

// Backward: one skeleton for every variant, query panels over tiles of keys, as in forward.
//
//   X = V dO^T     P = weights     dS = normaliser's vjp     dx = score's vjp
//   dV += P dO     dK += dx Q      dQ += dx^T K
//
// Panels run in parallel; what they add to shared rows (dK, dV, bias and side-value gradients) they add
// tile by tile in a fixed order, each behind its turnstile: the first panel of a group passes tile 0,
// the second follows one tile behind. No buffer is reduced afterwards, no bit depends on the threads.
//
// Memory  per worker as in forward; O(len_kv) for side values; nothing else.

#include <heed/engine/panel_gradients.hpp>

namespace heed::inline HEED_ABI::detail {

template <class Op, class T>
class BackwardWorker {
 public:
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;
  using Context = CallContext<Op, T>;
  static constexpr int kMaps = Normaliser::maps;

  BackwardWorker(const Context& c, BackwardShared<Op, T>& shared, Scratch<T>& scratch)
      : c_(c),
        s_(shared),
        panel_(c, scratch, true),
        gradients_(c, shared, panel_, scratch) {
    const Geometry& g = c.geometry;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const Index span = c.plan.span_keys(Normaliser::streams, g.len_kv);
    const auto take = [&](Index n) { return LaneTile<T>{scratch.take(n * lanes), n, lanes}; };
    for (auto& dots : dots_) dots = take(span);
    dmixed_ = take(g.dim_v);
    saved_tile_ = take(g.dim_v);
    if constexpr (Normaliser::streams) scores_ = take(tile);
    dweights_ = take(Normaliser::streams ? tile : g.len_kv);
    projected_ = take(c.keys.needs().rank > 0 ? tile : 0);
    transposed_ = scratch.take(c.mask.has_bias() ? tile * lanes : 0);
    state_ = SoftmaxState<T>::take(scratch, lanes);
    delta_ = scratch.take(lanes);
    top_ = scratch.take(lanes);
  }
  BackwardWorker(const BackwardWorker&) = delete;  // gradients_ refers to panel_

  void run(Index unit) {
    const PanelOrder::Visit visit = s_.order.visit(unit);
    panel_.move_to(visit.batch, visit.head, visit.panel);
    panel_.load_queries();
    gradients_.begin(visit);
    load_output_gradient();
    if constexpr (Normaliser::streams)
      run_streaming();
    else
      run_rows();
    gradients_.finish(unit);
  }

 private:
  using WeighedTile = typename PanelGradients<Op, T>::WeighedTile;

  // dL/dmixed in lanes, and delta = rowsum(dmixed o mixed).
  void load_output_gradient() {
    const TilePlace& place = panel_.place;
    const Index dim = c_.geometry.dim_v, lanes = c_.plan.lanes;
    const auto pack = [&](const T* rows, Index stride, const LaneTile<T>& to) {
      pack_lanes(rows, stride, place.rows, dim, to.data, lanes);
    };
    const auto pack_view = [&](const TensorView<const T>& view, const LaneTile<T>& to) {
      pack(view.row(place.batch, place.head, place.query), view.strides().row, to);
    };
    pack_view(s_.grad_out, dmixed_);
    if constexpr (Readout::saves_mixed)
      pack(s_.saved.mixed.data() + panel_.first_row() * dim, dim, saved_tile_);
    else
      pack_view(s_.out, saved_tile_);
    ReadoutPanel<T> readout = panel_.readout.load(place, dmixed_);
    readout.global = s_.saved.global;
    readout.saved = saved_tile_.constant();
    readout.delta = delta_;
    gradients_.attach(readout);
    extra_ = readout.extra.data;
    c_.op.readout.vjp(readout, gradients_.parameters().readout);
    gradients_.take_output_gradient(dmixed_);
  }

  void run_streaming() {
    load_state();
    panel_.for_tiles(panel_.keys(), [&](Index t, const TilePlace& at, TileKind kind) {
      if (kind == TileKind::empty) return gradients_.pass(t);
      WeighedTile tile{scores_.part(0, at.keys), {}, {}};
      tile.dots[0] = dots_[0].part(0, at.keys);
      tile.dscores[0] = dweights_.part(0, at.keys);
      score_tile(0, at, kind, tile.dots[0], tile.weights, top_);
      weight_gradients(at, tile.dscores[0]);
      softmax_vjp(tile.weights, tile.dscores[0]);
      gradients_.add(t, at, kind, tile);
    });
  }

  void load_state() {
    const Index rows = c_.geometry.query_rows(), count = panel_.place.rows;
    const T* from = s_.saved.state.data() + panel_.first_row();
    Normaliser::begin(state_, c_.plan.lanes);
    std::copy(from, from + count, state_.shift);
    std::copy(from + rows, from + rows + count, state_.reference);
    std::copy(from + 2 * rows, from + 2 * rows + count, state_.sum);
  }

  // Recomputes dot products and scores as forward did.
  void score_tile(int m, const TilePlace& at, TileKind kind, const LaneTile<T>& dots,
                  const LaneTile<T>& scores, T* top) {
    const auto& side = panel_.query[std::size_t(m)];
    if (c_.plain()) {
      side.tile_scores(at, kind, scores, projected_, top, transposed_);
      return;
    }
    side.dots(at, dots);
    side.projected_dots(at, projected_);
    side.scores(at, kind, dots, projected_, scores, top, transposed_);
  }

  // X = V dmixed^T
  void weight_gradients(const TilePlace& at, const LaneTile<T>& x) const {
    const Rows<T> values = panel_.values(at);
    panel_gemm<Store::overwrite>(at.keys, values.columns, c_.plan.vectors,
                                 Broadcast<T>{values.data, values.stride, 1}, dmixed_.data,
                                 dmixed_.lanes, x.data, x.lanes);
  }

  // scores -> weights, X -> dscores = weight (X - delta), 0 where hidden.
  void softmax_vjp(const LaneTile<T>& scores, const LaneTile<T>& x) const {
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Index lane = v * kLanes<T>;
      const Pack<T> shift = Pack<T>::load(state_.shift + lane);
      const Pack<T> base = Normaliser::exponent_base(state_, v);
      const Pack<T> factor = Normaliser::factor(state_, v), delta = Pack<T>::load(delta_ + lane);
      const Pack<T> hidden = -kInfinity<T>;
      for (Index j = 0; j < scores.rows; ++j) {
        const Pack<T> score = scores.load(j, v);
        const Pack<T> weight = Normaliser::weight_of(score, shift, base) * factor;
        const Pack<T> seen = weight * (x.load(j, v) - delta);
        // Both by select: in a row that holds a NaN, the weight of a hidden pair is 0 times NaN.
        scores.store(j, v, select(score == hidden, Pack<T>(T(0)), weight));
        x.store(j, v, select(score == hidden, Pack<T>(T(0)), seen));
      }
    }
  }

  void run_rows() {
    const KeyRange seen = panel_.keys();
    RowBlock<T> block = panel_.row_block(seen);
    block.dweights = block.weights = {dweights_.data, seen.size(), c_.plan.lanes};
    block.dscores = block.scores;
    if constexpr (Normaliser::uses_extra) {
      block.extra = extra_;
      block.dextra = gradients_.extra().data;
    }
    const auto part = [&](const LaneTile<T>& tile, const TilePlace& at) {
      return tile.part(at.key - seen.begin, at.keys);
    };
    panel_.for_tiles(seen, [&](Index, const TilePlace& at, TileKind kind) {
      const bool empty = kind == TileKind::empty;
      for (int m = 0; m < kMaps; ++m) {
        const auto scores = part(block.scores[std::size_t(m)], at);
        if (empty)
          scores.fill(-kInfinity<T>);
        else
          score_tile(m, at, kind, part(dots_[std::size_t(m)], at), scores, panel_.rows.max[m]);
      }
      const auto dweights = part(block.dweights, at);
      if (empty)
        dweights.fill(T(0));
      else
        weight_gradients(at, dweights);
    });
    c_.op.normaliser.vjp(block, gradients_.parameters().normaliser);
    panel_.for_tiles(seen, [&](Index t, const TilePlace& at, TileKind kind) {
      if (kind == TileKind::empty) return gradients_.pass(t);
      WeighedTile tile{part(block.weights, at), {}, {}};
      for (std::size_t m = 0; m < kMaps; ++m) {
        tile.dots[m] = part(dots_[m], at);
        tile.dscores[m] = part(block.dscores[m], at);
      }
      gradients_.add(t, at, kind, tile);
    });
  }

  const Context& c_;
  BackwardShared<Op, T>& s_;
  Panel<Op, T> panel_;
  PanelGradients<Op, T> gradients_;
  std::array<LaneTile<T>, kMaps> dots_;
  LaneTile<T> dmixed_, saved_tile_, scores_, dweights_, projected_;
  T *transposed_, *delta_, *top_;
  const T* extra_ = nullptr;
  SoftmaxState<T> state_;
};

}  // namespace heed::inline HEED_ABI::detail
