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

#include <heed/engine/backward_shared.hpp>
#include <heed/engine/panel_rows.hpp>
#include <heed/engine/score_chain.hpp>

namespace heed::inline HEED_ABI {

namespace detail {

template <class Op, class T>
class BackwardWorker {
 public:
  using Score = typename Op::ScoreType;
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;
  using Context = CallContext<Op, T>;
  static constexpr int kMaps = Normaliser::maps;

  [[nodiscard]] static Index elements(const Context& c) {
    const Geometry& g = c.geometry;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const Index span = c.plan.span_keys(Normaliser::streams, g.len_kv);
    const auto pad = [](Index n) { return Scratch<T>::padded(n); };
    const Index side = kMaps * (QuerySide<Op, T>::elements(c) + QueryGrad<Op, T>::elements(c) +
                                3 * pad(lanes * whole(g.dim_qk)) + pad(span * lanes));
    const Index readout = PanelReadout<Op, T>::elements(c, true) + 2 * pad(g.dim_v * lanes) +
                          2 * pad(lanes * whole(g.dim_v)) +
                          pad(c.op.extra_dim(g) * lanes) +
                          pad(PanelReadout<Op, T>::query_dim(g) * lanes) +
                          pad(PanelReadout<Op, T>::own_dim(g, g.dim_qk) * lanes) +
                          pad(PanelReadout<Op, T>::own_dim(g, g.dim_v) * lanes);
    const Index spans = Normaliser::streams ? 2 * pad(tile * lanes)
                                            : RowScratch<Op, T>::elements(c, true) +
                                                  pad(g.len_kv * lanes);
    return side + readout + spans + 5 * pad(tile * lanes) +
           pad(tile * std::max(g.dim_qk, g.dim_v)) +
           pad(Score::key_features * tile * kLanes<T>) + pad(6 * lanes) +
           pad(c.keys.needs().table_rows * g.dim_qk) + pad(lanes * whole(c.keys.needs().rank));
  }

  BackwardWorker(const Context& c, BackwardShared<Op, T>& shared)
      : c_(c),
        s_(shared),
        scratch_(elements(c)),
        query_{make_sides(std::make_integer_sequence<int, kMaps>{})},
        readout_(c, scratch_, true),
        rows_(c, scratch_, true),
        own_(zeros_like(c.op)) {
    const Geometry& g = c.geometry;
    const Index lanes = c.plan.lanes, tile = c.plan.tile;
    const Index span = c.plan.span_keys(Normaliser::streams, g.len_kv);
    const auto take = [&](Index n) { return LaneTile<T>{scratch_.take(n * lanes), n, lanes}; };
    for (int m = 0; m < kMaps; ++m) {
      Map& map = maps_[std::size_t(m)];
      map.grad = QueryGrad<Op, T>::take(c, scratch_);
      map.q_memory = scratch_.take(lanes * whole(g.dim_qk));
      map.q_clean = scratch_.take(lanes * whole(g.dim_qk));
      map.projected_natural = scratch_.take(lanes * whole(g.dim_qk));
      map.dots = take(span);
    }
    dmixed_ = take(g.dim_v);
    saved_tile_ = take(g.dim_v);
    dout_memory_ = scratch_.take(lanes * whole(g.dim_v));
    dout_clean_ = scratch_.take(lanes * whole(g.dim_v));
    dextra_ = take(c.op.extra_dim(g));
    dquery_ = take(PanelReadout<Op, T>::query_dim(g));
    down_key_ = take(PanelReadout<Op, T>::own_dim(g, g.dim_qk));
    down_value_ = take(PanelReadout<Op, T>::own_dim(g, g.dim_v));
    if constexpr (Normaliser::streams) {
      scores_ = take(tile);
      dweights_ = take(tile);
    } else {
      dweights_ = take(g.len_kv);
    }
    marks_ = take(tile);
    projected_ = take(tile);
    dprojected_ = take(tile);
    transposed_ = scratch_.take(tile * lanes);
    copy_ = scratch_.take(tile * std::max(g.dim_qk, g.dim_v));
    key_lanes_ = scratch_.take(Score::key_features * tile * kLanes<T>);
    T* state = scratch_.take(6 * lanes);
    state_ = SoftmaxState<T>::over(state, lanes);
    delta_ = state + 3 * lanes;
    top_ = state + 4 * lanes;
    dtable_ = scratch_.take(c.keys.needs().table_rows * g.dim_qk);
  }

  void run(Index unit) {
    visit_ = s_.order.visit(unit);
    place_ = {visit_.batch, visit_.head, visit_.panel * c_.plan.lanes, 0, 0, 0};
    place_.rows = std::min(c_.plan.lanes, c_.geometry.len_q - place_.query);
    own_.visit([](const char*, auto& param) { param.set_zero(); });
    load_queries();
    load_output_gradient();
    if constexpr (Normaliser::streams)
      run_streaming();
    else
      run_rows();
    finish_queries();
    commit(unit);
  }

 private:
  struct Map {
    QueryGrad<Op, T> grad;
    T *q_memory, *q_clean, *projected_natural;
    Rows<T> q, clean;    // the panel's rows, times the row factor; without non-finite numbers
    LaneTile<T> dots;    // of the span
    LaneTile<T> dscores; // of the span
  };

  [[nodiscard]] static Index whole(Index n) {
    return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
  }
  template <int... M>
  std::array<QuerySide<Op, T>, sizeof...(M)> make_sides(std::integer_sequence<int, M...>) {
    return {QuerySide<Op, T>(c_, scratch_, M)...};
  }
  // In the plain case dscores stand for dL/d(scale q.k), and rows and dQ carry the scale.
  [[nodiscard]] T row_factor() const { return c_.plain() ? c_.scale : T(1); }

  // Padded row-major copy, times a factor.
  [[nodiscard]] static Rows<T> padded_copy(const T* source, Index stride, Index rows, Index columns,
                                           T factor, T* memory) {
    const Index padded = whole(columns);
    for (Index r = 0; r < rows; ++r)
      for (Index col = 0; col < padded; ++col)
        memory[r * padded + col] = col < columns ? source[r * stride + col] * factor : T(0);
    return {memory, rows, columns, padded};
  }

  void load_queries() {
    finite_ = true;
    for (int m = 0; m < kMaps; ++m) {
      Map& map = maps_[std::size_t(m)];
      auto& side = query_[std::size_t(m)];
      side.load(place_.batch, place_.head, place_.query, place_.rows);
      const Index width = side.source().width;
      map.grad.clear(width);
      map.q = padded_copy(side.query_rows(), c_.in.query.strides().row, place_.rows, width,
                          row_factor(), map.q_memory);
      finite_ = finite_ && all_finite(map.q);
      if constexpr (Score::has_projection) {
        const Index rank = c_.keys.needs().rank;
        if (rank > 0) {
          std::fill(map.projected_natural, map.projected_natural + place_.rows * whole(rank), T(0));
          unpack_lanes(side.side().projected.data, c_.plan.lanes, place_.rows, rank,
                       map.projected_natural, whole(rank));
        }
      }
    }
  }

  // dL/dmixed in lanes and in rows, and delta = rowsum(dmixed o mixed).
  void load_output_gradient() {
    const Index dim = c_.geometry.dim_v, lanes = c_.plan.lanes;
    const auto& dout = s_.grad_out;
    pack_lanes(dout.row(place_.batch, place_.head, place_.query), dout.strides().row, place_.rows,
               dim, dmixed_.data, lanes);
    const Index first = c_.geometry.row_index(place_.batch, place_.head, place_.query);
    if constexpr (Readout::saves_mixed)
      pack_lanes(s_.saved.mixed.data() + first * dim, dim, place_.rows, dim, saved_tile_.data, lanes);
    else
      pack_lanes(s_.out.row(place_.batch, place_.head, place_.query), s_.out.strides().row,
                 place_.rows, dim, saved_tile_.data, lanes);
    ReadoutPanel<T> panel = readout_.load(place_, dmixed_);
    panel.global = s_.saved.global;
    panel.saved = saved_tile_.constant();
    panel.delta = delta_;
    panel.dquery = dquery_;
    panel.down_key = down_key_;
    panel.down_value = down_value_;
    panel.dextra = dextra_;
    for (const auto& tile : {dquery_, down_key_, down_value_, dextra_}) tile.fill(T(0));
    extra_ = panel.extra.data;
    c_.op.readout.vjp(panel, own_.readout);
    dout_ = {dout_memory_, place_.rows, dim, whole(dim)};
    std::fill(dout_memory_, dout_memory_ + place_.rows * whole(dim), T(0));
    unpack_lanes(dmixed_.data, lanes, place_.rows, dim, dout_memory_, whole(dim));
    finite_ = finite_ && all_finite(dout_);
    if (finite_) return;
    dout_clean_rows_ = finite_copy(dout_, dout_clean_, whole(dim));
    for (Map& map : maps_) map.clean = finite_copy(map.q, map.q_clean, map.q.stride);
  }

  [[nodiscard]] TilePlace tile_place(Index tile, const KeyRange& range) const {
    TilePlace at = place_;
    at.key = std::max(tile * c_.plan.tile, range.begin);
    at.keys = std::max<Index>(0, std::min((tile + 1) * c_.plan.tile, range.end) - at.key);
    return at;
  }
  [[nodiscard]] TileKind kind_of(const TilePlace& at) const {
    if (at.keys == 0) return TileKind::empty;
    const TileKind kind =
        c_.mask.classify(at.batch, at.head, at.query, at.rows, at.key, at.keys);
    return kind == TileKind::full && at.rows < c_.plan.lanes ? TileKind::partial : kind;
  }
  [[nodiscard]] KeyRange range() const {
    return c_.mask.keys_of_rows(place_.batch, place_.query, place_.rows);
  }

  void run_streaming() {
    load_state();
    const KeyRange seen = range();
    for (Index t = 0; t < c_.plan.tiles; ++t) {
      const TilePlace at = tile_place(t, seen);
      const TileKind kind = kind_of(at);
      if (kind == TileKind::empty) {
        pass_tile(t);
        continue;
      }
      Map& map = maps_[0];
      const LaneTile<T> scores = scores_.part(0, at.keys), x = dweights_.part(0, at.keys);
      score_tile(0, at, kind, map.dots.part(0, at.keys), scores, top_);
      weight_gradients(at, x);
      softmax_vjp(scores, x);
      if (hides(kind)) mark_hidden(at, kind);
      map.dscores = x;
      accumulate_tile(t, at, kind, 0, scores);
    }
  }

  void load_state() {
    const Index rows = c_.geometry.query_rows(), lanes = c_.plan.lanes;
    const T* from =
        s_.saved.state.data() + c_.geometry.row_index(place_.batch, place_.head, place_.query);
    Normaliser::begin(state_, lanes);
    std::copy(from, from + place_.rows, state_.shift);
    std::copy(from + rows, from + rows + place_.rows, state_.reference);
    std::copy(from + 2 * rows, from + 2 * rows + place_.rows, state_.sum);
  }

  // Recomputes dot products and scores as forward did.
  void score_tile(int m, const TilePlace& at, TileKind kind, const LaneTile<T>& dots,
                  const LaneTile<T>& scores, T* top) {
    const auto& side = query_[std::size_t(m)];
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
    const auto& value = c_.in.value;
    const T* v = value.row(at.batch, c_.geometry.kv_head(at.head), at.key);
    panel_gemm<Store::overwrite>(at.keys, c_.geometry.dim_v, c_.plan.vectors,
                                 Broadcast<T>{v, value.strides().row, 1}, dmixed_.data,
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
    const KeyRange seen = range();
    RowBlock<T> block;
    block.head = place_.head;
    block.vectors = c_.plan.vectors;
    block.valid_lanes = place_.rows;
    block.work = rows_.work;
    block.diagnostics = rows_.diagnostics;
    block.dweights = block.weights = {dweights_.data, seen.size(), c_.plan.lanes};
    for (int m = 0; m < kMaps; ++m) {
      std::fill(rows_.max[m], rows_.max[m] + c_.plan.lanes, -kInfinity<T>);
      const std::size_t i = std::size_t(m);
      block.scores[i] = block.dscores[i] = {rows_.scores[m].data, seen.size(), c_.plan.lanes};
      block.score_max[i] = rows_.max[m];
      block.lse[i] = rows_.lse[m];
    }
    if constexpr (Normaliser::uses_extra) {
      block.extra = extra_;
      block.dextra = dextra_.data;
    }
    const auto part = [&](const LaneTile<T>& tile, const TilePlace& at) {
      return tile.part(at.key - seen.begin, at.keys);
    };
    for (Index t = 0; t < c_.plan.tiles; ++t) {
      const TilePlace at = tile_place(t, seen);
      const TileKind kind = kind_of(at);
      if (at.keys == 0) continue;
      for (int m = 0; m < kMaps; ++m) {
        const auto scores = part(block.scores[std::size_t(m)], at);
        if (kind == TileKind::empty)
          scores.fill(-kInfinity<T>);
        else
          score_tile(m, at, kind, part(maps_[std::size_t(m)].dots, at), scores, rows_.max[m]);
      }
      if (kind == TileKind::empty)
        part(block.dweights, at).fill(T(0));
      else
        weight_gradients(at, part(block.dweights, at));
    }
    c_.op.normaliser.vjp(block, own_.normaliser);
    for (Index t = 0; t < c_.plan.tiles; ++t) {
      const TilePlace at = tile_place(t, seen);
      const TileKind kind = kind_of(at);
      if (kind == TileKind::empty) {
        pass_tile(t);
        continue;
      }
      if (hides(kind)) mark_hidden(at, kind);
      for (int m = 0; m < kMaps; ++m)
        maps_[std::size_t(m)].dscores = part(block.dscores[std::size_t(m)], at);
      accumulate_tile(t, at, kind, at.key - seen.begin, part(block.weights, at));
    }
  }

  [[nodiscard]] bool hides(TileKind kind) const {
    return kind == TileKind::partial || c_.mask.has_bias();
  }
  // marks_: -infinity where a pair of the tile is hidden, else 0.
  void mark_hidden(const TilePlace& at, TileKind kind) {
    const LaneTile<T> marks = marks_.part(0, at.keys);
    marks.fill(T(0));
    const TileMask<T> tile_mask(c_.mask, at, c_.plan.vectors);
    if (kind == TileKind::partial) tile_mask.hide(marks);
    if (c_.mask.has_bias()) tile_mask.hide_biased(marks);
  }

  [[nodiscard]] Index gate(Index tile) const { return visit_.group * c_.plan.tiles + tile; }

  // A tile that this panel does not see: its turn passes, with the gradients of the panel's own rows.
  void pass_tile(Index tile) {
    s_.tiles.wait(gate(tile), visit_.rank);
    add_own_rows(tile);
    s_.tiles.pass(gate(tile));
  }

  void accumulate_tile(Index tile, const TilePlace& at, TileKind kind, Index span_offset,
                       const LaneTile<T>& weights) {
    const bool shares_bias = s_.grads.bias.given();
    if (shares_bias) {
      s_.tiles.wait(gate(tile), visit_.rank);
      for (Map& map : maps_) add_bias_gradient(at, map.dscores);
    }
    for (int m = 0; m < kMaps; ++m) {
      Map& map = maps_[std::size_t(m)];
      const ScoreChain<Op, T> chain{c_, query_[std::size_t(m)], map.grad, key_lanes_};
      if (!c_.plain()) {
        query_[std::size_t(m)].projected_dots(at, projected_);
        chain.run(at, map.dots.part(span_offset, at.keys), projected_, map.dscores, dprojected_,
                  hides(kind) ? marks_ : LaneTile<T>{});
      }
      add_to_queries(m, at, kind);
      if (m == 0 && !shares_bias) s_.tiles.wait(gate(tile), visit_.rank);
      if (!c_.plain()) add_side_values(m, at, kind, chain);
      add_to_keys(m, at, kind);
    }
    if (s_.grads.value.given())
      add_rows(weights, kind, dout_, dout_clean_rows_,
               s_.grads.value.row(at.batch, c_.geometry.kv_head(at.head), at.key),
               s_.grads.value.strides().row);
    add_own_rows(tile);
    s_.tiles.pass(gate(tile));
  }

  // out[key] += sum over lanes weights[key][lane] * rows[lane]
  void add_rows(const LaneTile<T>& weights, TileKind kind, const Rows<T>& rows, const Rows<T>& clean,
                T* out, Index stride) const {
    if (finite_ || !hides(kind))
      add_row_product(weights, rows, out, stride);
    else
      add_row_product_guarded(weights, marks_, rows, clean, out, stride);
  }
  // out[column][lane] += sum over keys values[key][column] * weights[key][lane]
  void add_lanes(const Rows<T>& values, TileKind kind, const LaneTile<T>& weights,
                 const LaneTile<T>& out) const {
    if (!hides(kind) || all_finite(values))
      add_lane_product(values, weights, c_.plan.vectors, out);
    else
      add_lane_product_guarded(values, weights, marks_, c_.plan.vectors, out, copy_);
  }

  void add_to_queries(int m, const TilePlace& at, TileKind kind) {
    Map& map = maps_[std::size_t(m)];
    const auto& side = query_[std::size_t(m)];
    add_lanes(side.key_rows(at.key, at.keys), kind, map.dscores, map.grad.dq);
    if constexpr (Score::has_projection)
      if (map.grad.side.projected.rows > 0)
        add_lanes(side.projected_keys(at.key, at.keys), kind, dprojected_.part(0, at.keys),
                  map.grad.side.projected);
  }

  void add_to_keys(int m, const TilePlace& at, TileKind kind) {
    if (!s_.grads.key.given()) return;
    const Map& map = maps_[std::size_t(m)];
    const Source& source = query_[std::size_t(m)].source();
    add_rows(map.dscores, kind, map.q, map.clean,
             s_.grads.key.row(at.batch, source.kv_head, at.key) + source.key_column,
             s_.grads.key.strides().row);
  }

  void add_side_values(int m, const TilePlace& at, TileKind kind, const ScoreChain<Op, T>& chain) {
    const Index row = c_.keys.row(at.batch, at.head, m, at.key);
    chain.add_key_features(at, s_.dfeatures.data() + row * Score::key_features);
    if constexpr (Score::has_projection) {
      const Index rank = c_.keys.needs().rank;
      if (rank == 0) return;
      const Rows<T> natural{maps_[std::size_t(m)].projected_natural, place_.rows, rank, whole(rank)};
      T* to = s_.dprojected.data() + row * rank;
      const LaneTile<T> d = dprojected_.part(0, at.keys);
      if (!hides(kind) || all_finite(natural)) return add_row_product(d, natural, to, rank);
      T* memory = projected_.data;  // free by now, [tile][lanes]
      add_row_product_guarded(d, marks_, natural, finite_copy(natural, memory, natural.stride), to,
                              rank);
    }
  }

  void add_bias_gradient(const TilePlace& at, const LaneTile<T>& dscores) const {
    for (Index i = 0; i < at.rows; ++i) {
      T* row = BoundMask<T>::broadcast_row(s_.grads.bias, at.batch, at.head, at.query + i) + at.key;
      for (Index j = 0; j < at.keys; ++j) row[j] += dscores.row(j)[i];
    }
  }

  // Gradients of the key and value rows at the queries' own positions.
  void add_own_rows(Index tile) {
    if constexpr (Readout::uses_own_rows) {
      if (place_.query / c_.plan.tile != tile) return;
      const Index kv = c_.geometry.kv_head(place_.head);
      const auto add = [&](const LaneTile<T>& from, const TensorView<T>& to) {
        if (to.given())
          add_unpacked_lanes(from.data, from.lanes, place_.rows, from.rows,
                             to.row(place_.batch, kv, place_.query), to.strides().row);
      };
      add(down_key_, s_.grads.key);
      add(down_value_, s_.grads.value);
    }
  }

  void finish_queries() {
    for (int m = 0; m < kMaps; ++m) finish_map(m);
    if (s_.grads.query.given() && dquery_.rows > 0)
      add_unpacked_lanes(dquery_.data, dquery_.lanes, place_.rows, dquery_.rows,
                         s_.grads.query.row(place_.batch, place_.head, place_.query),
                         s_.grads.query.strides().row);
    if (s_.grads.extra.given() && dextra_.rows > 0)
      unpack_lanes(dextra_.data, dextra_.lanes, place_.rows, dextra_.rows,
                   s_.grads.extra.row(place_.batch, place_.head, place_.query),
                   s_.grads.extra.strides().row);
  }

  void finish_map(int m) {
    Map& map = maps_[std::size_t(m)];
    auto& side = query_[std::size_t(m)];
    auto& grad = map.grad;
    if constexpr (SideNeeds<Op>::any) {
      for (int v = 0; v < c_.plan.vectors; ++v) {
        Pack<T> f[Score::query_features + 1], df[Score::query_features + 1];
        for (int i = 0; i < Score::query_features; ++i) {
          f[i] = side.features().load(i, v);
          df[i] = grad.features.load(i, v);
        }
        const auto idle = grad.side.idle_lanes(df, Score::query_features, v);
        c_.op.score.query_features_vjp(side.side().row(v), f, df, grad.side.grad(v));
        grad.side.clear_lanes(idle, v);
      }
      SideTiles<T>::chain(c_.op.score, c_.keys.table(place_.head), c_.plan.vectors, grad.side);
    }
    for (int v = 0; v < c_.plan.vectors; ++v)
      for (Index col = 0; col < grad.dq.rows; ++col) {
        Pack<T> g = grad.dq.load(col, v) * row_factor();
        if constexpr (SideNeeds<Op>::any) g += grad.side.x.load(col, v);
        grad.dq.store(col, v, g);
      }
    const Source& source = side.source();
    if (s_.grads.query.given())
      unpack_lanes(grad.dq.data, grad.dq.lanes, place_.rows, grad.dq.rows,
                   s_.grads.query.row(place_.batch, source.query_head, place_.query) +
                       source.query_column,
                   s_.grads.query.strides().row);
    double scalars[Score::scalars + 1];
    for (int i = 0; i < Score::scalars; ++i)
      scalars[i] = sum_valid_lanes(grad.scalars.row(i), place_.rows);
    c_.op.score.chain_scalars(place_.head, scalars, own_.score);
  }

  // Adds the panel's parameter gradients to the call's, in the order of the units.
  void commit(Index unit) {
    const Index table = c_.keys.needs().table_rows * c_.geometry.dim_qk;
    if constexpr (Score::has_table) gather_table();
    s_.commits.wait(0, unit);
    std::size_t at = 0;
    own_.visit([&](const char*, auto& param) {
      for (Index i = 0; i < param.size(); ++i) s_.dparams[at++] += double(param[i]);
    });
    for (Index i = 0; i < table; ++i)
      s_.dtables[std::size_t(place_.head * table + i)] += double(dtable_[i]);
    s_.commits.pass(0);
  }
  void gather_table() {
    const auto& grad = maps_[0].grad.side.table;
    const Index width = c_.geometry.dim_qk;
    std::fill(dtable_, dtable_ + grad.rows * width, T(0));
    gemm_add(grad.rows, place_.rows, width, Broadcast<T>{grad.data, grad.lanes, 1},
             maps_[0].q.data, maps_[0].q.stride, dtable_, width);
  }

  const Context& c_;
  BackwardShared<Op, T>& s_;
  Scratch<T> scratch_;
  std::array<QuerySide<Op, T>, kMaps> query_;
  PanelReadout<Op, T> readout_;
  RowScratch<Op, T> rows_;
  Op own_;
  std::array<Map, kMaps> maps_;
  LaneTile<T> dmixed_, saved_tile_, dextra_, dquery_, down_key_, down_value_;
  LaneTile<T> scores_, dweights_, marks_, projected_, dprojected_;
  Rows<T> dout_, dout_clean_rows_;
  T *dout_memory_, *dout_clean_, *transposed_, *copy_, *key_lanes_, *delta_, *top_, *dtable_;
  const T* extra_ = nullptr;
  SoftmaxState<T> state_;
  PanelOrder::Visit visit_;
  TilePlace place_;
  bool finite_ = true;
};

}  // namespace detail

}  // namespace heed::inline HEED_ABI
