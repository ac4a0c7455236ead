// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward: one skeleton for every variant. A panel of queries walks over tiles of keys:
//
//   streaming normaliser   per tile: scores -> weights -> out += V^T weights
//   row normaliser         all tiles: scores; once: scores -> weights; all tiles: out += V^T weights
//
// Parallel over (batch, head, panel). A panel is computed the same way by whichever thread takes it.
//
// Memory  per worker O(tile) for streaming ops, O(len_kv) for row normalisers (see plan.hpp).

#include <heed/engine/panel.hpp>

#include <atomic>

namespace heed::inline HEED_ABI {

namespace detail {

template <class Op, class T>
class ForwardWorker {
 public:
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;
  using Context = CallContext<Op, T>;
  static constexpr int kMaps = Normaliser::maps;

  ForwardWorker(const Context& c, const TensorView<T>& out, Saved<T>* saved, Scratch<T>& scratch)
      : c_(c), out_view_(out), saved_(saved), panel_(c, scratch, false) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    out_ = {scratch.take(c.geometry.dim_v * lanes), c.geometry.dim_v, lanes};
    scores_ = {scratch.take(tile * lanes), tile, lanes};
    projected_ = {scratch.take(tile * lanes), tile, lanes};
    transposed_ = scratch.take(tile * lanes);
    copy_ = scratch.take(tile * c.geometry.dim_v);
    state_ = SoftmaxState<T>::take(scratch, lanes);
    tile_max_ = scratch.take(lanes);
    rescale_ = scratch.take(lanes);
  }

  // Mixes values for the panel and leaves them, normalised, in lanes.
  void mix(Index b, Index h, Index panel) {
    panel_.move_to(b, h, panel);
    panel_.load_queries();
    out_.fill(T(0));
    if constexpr (Normaliser::streams)
      mix_streaming();
    else
      mix_rows();
    if (saved_ && !saved_->mixed.empty()) save_mixed();
  }

  // Takes mixed rows that an earlier pass left in `mixed` back into lanes.
  void reload(Index b, Index h, Index panel, const std::vector<T>& mixed) {
    panel_.move_to(b, h, panel);
    const Index dim = c_.geometry.dim_v;
    pack_lanes(mixed.data() + panel_.first_row() * dim, dim, panel_.place.rows, dim, out_.data,
               out_.lanes);
  }

  // The survey of readouts that look at all rows before they answer.
  [[nodiscard]] int survey() {
    if constexpr (requires { c_.op.readout.needs_survey(); })
      return c_.op.readout.survey(panel_.readout.load(panel_.place, out_));
    else
      return 0;
  }

  // Applies the readout and writes the rows to user memory.
  void read(int global) {
    const TilePlace& place = panel_.place;
    if constexpr (!Readout::identity) {
      ReadoutPanel<T> panel = panel_.readout.load(place, out_);
      panel.global = global;
      c_.op.readout.forward(panel);
      if (saved_) save_diagnostics(panel.diagnostics.data, Normaliser::diagnostics,
                                   Readout::diagnostics);
    }
    unpack_lanes(out_.data, out_.lanes, place.rows, c_.geometry.dim_v,
                 out_view_.row(place.batch, place.head, place.query), out_view_.strides().row);
  }

 private:
  void mix_streaming() {
    Normaliser::begin(state_, c_.plan.lanes);
    panel_.for_tiles(panel_.keys(), [&](Index, const TilePlace& at, TileKind kind) {
      if (kind == TileKind::empty) return;
      const LaneTile<T> tile = scores_.part(0, at.keys);
      std::fill(tile_max_, tile_max_ + c_.plan.lanes, -kInfinity<T>);
      panel_.query[0].tile_scores(at, kind, tile, projected_, tile_max_, transposed_);
      move_references();
      mix_tile(at, kind, tile, [&] {
        for (int v = 0; v < c_.plan.vectors; ++v) Normaliser::exponentiate(tile, v, state_);
      });
    });
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Pack<T> factor = Normaliser::factor(state_, v);
      for (Index col = 0; col < out_.rows; ++col) out_.store(col, v, out_.load(col, v) * factor);
    }
    if (saved_) save_state();
  }

  void move_references() {
    bool moved = false;
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Index at = v * kLanes<T>;
      Normaliser::move_reference(state_, v, Pack<T>::load(tile_max_ + at), moved)
          .store(rescale_ + at);
    }
    if (!moved) return;
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const Pack<T> rescale = Pack<T>::load(rescale_ + v * kLanes<T>);
      for (Index col = 0; col < out_.rows; ++col) out_.store(col, v, out_.load(col, v) * rescale);
    }
  }

  void mix_rows() {
    const KeyRange seen = panel_.keys();
    RowBlock<T> block = panel_.row_block(seen);
    const auto part = [&](int m, const TilePlace& at) {
      return block.scores[std::size_t(m)].part(at.key - seen.begin, at.keys);
    };
    panel_.for_tiles(seen, [&](Index, const TilePlace& at, TileKind kind) {
      for (int m = 0; m < kMaps; ++m) {
        if (kind == TileKind::empty)
          part(m, at).fill(-kInfinity<T>);
        else
          panel_.query[std::size_t(m)].tile_scores(at, kind, part(m, at), projected_,
                                                   panel_.rows.max[m], transposed_);
      }
    });
    if constexpr (Normaliser::uses_extra)
      block.extra = panel_.readout.load(panel_.place, out_).extra.data;
    c_.op.normaliser.forward(block);
    panel_.for_tiles(seen, [&](Index, const TilePlace& at, TileKind kind) {
      if (kind != TileKind::empty) mix_tile(at, kind, part(0, at), [] {});
    });
    if (saved_) save_rows(block);
  }

  // out += V^T weights over one tile; `weigh` turns its scores into weights.
  template <class Weigh>
  void mix_tile(const TilePlace& at, TileKind kind, const LaneTile<T>& tile, Weigh&& weigh) {
    const Rows<T> values = panel_.values(at);
    if (!panel_.hides(kind) || all_finite(values)) {
      weigh();
      add_lane_product(values, tile, c_.plan.vectors, out_);
      return;
    }
    const LaneTile<T> visible{transposed_, at.keys, tile.lanes};
    panel_.mark_hidden(at, kind, visible);
    weigh();
    add_lane_product_guarded(values, tile, visible, c_.plan.vectors, out_, copy_);
  }

  void save_state() {
    const Index rows = c_.geometry.query_rows(), first = panel_.first_row();
    for (Index i = 0; i < panel_.place.rows; ++i) {
      T* at = saved_->state.data() + first + i;
      at[0] = state_.shift[i];
      at[rows] = state_.reference[i];
      at[2 * rows] = state_.sum[i];
      saved_->lse[std::size_t(first + i)] = Normaliser::lse(state_, i);
    }
  }
  void save_rows(const RowBlock<T>& block) {
    for (int m = 0; m < kMaps; ++m)
      std::copy(block.lse[std::size_t(m)], block.lse[std::size_t(m)] + panel_.place.rows,
                saved_->lse.data() + m * c_.geometry.query_rows() + panel_.first_row());
    save_diagnostics(block.diagnostics, 0, Normaliser::diagnostics);
  }
  void save_diagnostics(const T* lanes, int first, int count) {
    for (int d = 0; d < count; ++d)
      std::copy(lanes + d * c_.plan.lanes, lanes + d * c_.plan.lanes + panel_.place.rows,
                saved_->diagnostics[std::size_t(first + d)].data() + panel_.first_row());
  }
  void save_mixed() {
    const Index dim = c_.geometry.dim_v;
    unpack_lanes(out_.data, out_.lanes, panel_.place.rows, dim,
                 saved_->mixed.data() + panel_.first_row() * dim, dim);
  }

  const Context& c_;
  TensorView<T> out_view_;
  Saved<T>* saved_;
  Panel<Op, T> panel_;
  LaneTile<T> out_, scores_, projected_;
  T *transposed_, *copy_;
  SoftmaxState<T> state_;
  T *tile_max_, *rescale_;
};

template <class Op, class T>
void prepare_saved(const CallContext<Op, T>& c, Saved<T>& saved) {
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;
  const std::size_t rows = std::size_t(c.geometry.query_rows());
  saved.lse.assign(Normaliser::maps * rows, -kInfinity<T>);
  saved.state.assign(Normaliser::streams ? SoftmaxState<T>::rows * rows : 0, T(0));
  saved.mixed.assign(Readout::saves_mixed ? rows * std::size_t(c.geometry.dim_v) : 0, T(0));
  saved.diagnostics.assign(Normaliser::diagnostics + Readout::diagnostics,
                           std::vector<T>(rows, T(0)));
  saved.diagnostic_names.clear();
  for (int d = 0; d < Normaliser::diagnostics; ++d)
    saved.diagnostic_names.push_back(Normaliser::diagnostic_name(d));
  for (int d = 0; d < Readout::diagnostics; ++d)
    saved.diagnostic_names.push_back(Readout::diagnostic_name(d));
  saved.global = 0;
}

// Longest panels first: under a causal mask the last one.
template <class Op, class T, class Body>
void for_panels(const CallContext<Op, T>& c, Dispenser& units, Body&& body) {
  const Index heads = c.geometry.heads;
  for (Index unit = units.next(); unit >= 0; unit = units.next()) {
    const Index group = unit / c.plan.panels;
    body(group / heads, group % heads, c.plan.panels - 1 - unit % c.plan.panels);
  }
}

}  // namespace detail

// out = op(query, key, value), shape (batch, heads, len_q, dim_v). `out` must not overlap an input. A row
// that sees no key mixes to 0, with lse -infinity. `saved` receives what backward() needs.
// Throws std::invalid_argument on arguments that do not fit, std::bad_alloc; inputs are never changed.
template <AttentionOp Op>
void forward(const Op& op, const Inputs<typename Op::Scalar>& in,
             const Mask<typename Op::Scalar>& mask,
             const TensorView<typename Op::Scalar>& out,
             Saved<typename Op::Scalar>* saved = nullptr, const Options& options = {}) {
  using T = typename Op::Scalar;
  using Worker = detail::ForwardWorker<Op, T>;
  static_assert(check_attention_op<Op>());
  const std::string where = detail::door_name("heed::forward", options.name);
  const Geometry g = geometry_of(op, in, where);
  detail::require_shape(out, {g.batch, g.heads, g.len_q, g.dim_v}, "out", where);
  detail::require_apart(out, in.query, "out", "query", where);
  detail::require_apart(out, in.key, "out", "key", where);
  detail::require_apart(out, in.value, "out", "value", where);
  detail::require_apart(out, in.extra, "out", "extra", where);
  const BoundMask<T> bound(mask, g, where.c_str());
  const Index row_tiles = detail::RowScratch<Op, T>::tiles(op, false);
  KeySide<Op, T> keys(op, g, in.key);
  const CallContext<Op, T> c{op,  g, bound, in, make_plan<T>(g, options, row_tiles, false),
                             T(scale_of(op, g, options)), keys};
  if (saved) detail::prepare_saved(c, *saved);
  const Index units = g.batch * g.heads * c.plan.panels;
  if (units == 0) return;
  Saved<T>* target = saved;
  const auto build = [&](Scratch<T>& scratch) { return Worker(c, out, target, scratch); };
  const Index elements = scratch_elements<T>(build);
  const int workers = worker_count(options, g, units, elements * Index(sizeof(T)));
  keys.build(workers);

  bool survey = false;
  if constexpr (requires { op.readout.needs_survey(); }) survey = op.readout.needs_survey();
  Saved<T> own;
  if (survey && !target) {
    detail::prepare_saved(c, own);
    target = &own;
  }
  std::atomic<int> global{0};
  Dispenser first(units), second(survey ? units : 0);
  run_workers(workers, [&](int) {
    Scratch<T> scratch(elements);
    Worker worker = build(scratch);
    detail::for_panels(c, first, [&](Index b, Index h, Index panel) {
      worker.mix(b, h, panel);
      if (!survey) return worker.read(0);
      int seen = global.load(), found = worker.survey();
      while (seen < found && !global.compare_exchange_weak(seen, found)) {
      }
    });
  });
  if (!survey) return;
  target->global = global.load();
  run_workers(workers, [&](int) {
    Scratch<T> scratch(elements);
    Worker worker = build(scratch);
    detail::for_panels(c, second, [&](Index b, Index h, Index panel) {
      worker.reload(b, h, panel, target->mixed);
      worker.read(target->global);
    });
  });
}

}  // namespace heed::inline HEED_ABI
