// SPDX-License-Identifier: Apache-2.0
#pragma once

// What one panel adds to the gradients, tile by tile: its own rows' gradients stay in lanes until the
// panel is done; what it shares with other panels (dK, dV, bias, derived values) is added behind
// gates, in a fixed order.

#include <heed/engine/backward_shared.hpp>
#include <heed/engine/column_gradients.hpp>
#include <heed/engine/panel_products.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// What a panel gathers for one score map over all tiles, and the way on; on DualLanes how it moves, too:
//
//   dG -> R^T dG of a table by distance,  df -> df . df/dq of features,  then  dQ -> dQ . dt/dq of the score's transform t
template <class Real, class Lanes = LaneTile<Real>>
struct QuerySums {
  Lanes dq;              // [width][lanes]: of the rows, over CallContext::row_factor()
  Lanes features;        // [query_features][lanes]
  Lanes scalars;         // [scalars][lanes]
  Lanes by_lane;         // of a table by distance, as pairs of lanes read it
  Lanes column_weights;  // [weights * columns][lanes], of a score with columns
  DerivedTiles<Real, Lanes>
      derived;  // of the rows (through derived values), projected rows and table

  QuerySums(const CallContext<Real>& c, Scratch<Real>& scratch) : c_(c) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    const ScoreTraits& score = c.op.score.traits;
    const auto rows = [&](Index n) { return Lanes::take(scratch, n, lanes); };
    dq = rows(width);
    features = rows(score.query_features);
    scalars = rows(score.scalars);
    if (score.table_by_distance) by_lane = rows(relative_places<Real>(needs.table_rows));
    if (const auto* columns = c.op.score.columns)
      column_weights = rows(columns->weights_per_column * (width / columns->numbers));
    derived = DerivedTiles<Real, Lanes>::take(scratch, needs.any ? width : 0, needs.rank,
                                              needs.table_rows, score.query_inputs, lanes);
  }
  void clear(Index width) {
    dq.rows = width;
    if (c_.keys.needs().any) derived.x.rows = width;
    for (const Lanes& tile : {dq, features, scalars, by_lane, column_weights}) tile.fill(Real(0));
    derived.fill(Real(0));
  }

  // After the last tile: the gradient of the rows as they are stored, in dq. Adds to `parameters` what the panel gives to the
  // score's, and to the sums of `shared` what it gives to numbers of tokens. rows: DerivedQueries, or QueryTangents.
  template <class Rows>
  void finish(const TilePlace& place, const Rows& rows, const RowVjps<Real, Lanes>& vjps,
              BackwardShared<Real>& shared, PartGradient<Real>& parameters) {
    const ScoreTraits& score = c_.op.score.traits;
    const Index position = c_.geometry.query_position(place.query);
    const bool derives = c_.keys.needs().any;
    if (derives) chain_derived(place, rows, vjps, shared);
    const Pack<Real> factor = c_.row_factor();
    for (int n = 0; n < Lanes::planes; ++n) {
      const LaneTile<Real> own = dq.plane(n), of_side = derived.x.plane(n);
      for (int v = 0; v < c_.plan.vectors; ++v)
        for (Index col = 0; col < own.rows; ++col) {
          const Pack<Real> g = own.load(col, v);
          own.store(col, v, derives ? mul_add(g, factor, of_side.load(col, v)) : g * factor);
        }
    }
    if (score.has_transform) {
      // Parameters that move have gradients of their own type. Gradients of derived values, which dq has, make room.
      const auto own = Lanes::planes > 1 ? vjps.gradient() : nullptr;
      vjps.transform_vjp(RowSide::query, place.head, position, place.rows, rows.before(), derived.x,
                         dq, own ? *own : parameters);
      if (own) DerivedKeys<Real>::add_in_order({&own, 1}, parameters);
    }
    if (column_weights.rows > 0) {
      Real* const to = vjps.column_weights(parameters, place.head);
      for (Index n = 0; n < column_weights.rows; ++n)
        to[n] += Real(sum_valid_lanes(last_plane(column_weights).row(n), place.rows));
    }
    if (score.scalars == 0) return;
    scalar_sums_.resize(std::size_t(score.scalars));
    for (int i = 0; i < score.scalars; ++i)
      scalar_sums_[std::size_t(i)] = sum_valid_lanes(last_plane(scalars).row(i), place.rows);
    vjps.add_scalars(place.head, scalar_sums_.data(), parameters);
  }
  // After finish(): dq, or its tangent, to the result, whose rows others add to, too, where `sums_queries`.
  void write(const TilePlace& place, const Source& source,
             const BackwardShared<Real>& shared) const {
    const TensorView<Real>& query = shared.grads.query;
    const LaneTile<Real> from = last_plane(dq);
    Real* to = query.row(place.batch, source.query_head, place.query) + source.query_column;
    if (shared.sums_queries)
      add_unpacked_lanes(from.data, from.lanes, place.rows, from.rows, to, query.strides().row);
    else
      unpack_lanes(from.data, from.lanes, place.rows, from.rows, to, query.strides().row);
  }

 private:
  // From gradients of query features, projected rows and table entries to those of the rows, in x, and of what features
  // read of the parameters.
  template <class Rows>
  void chain_derived(const TilePlace& place, const Rows& rows, const RowVjps<Real, Lanes>& vjps,
                     BackwardShared<Real>& shared) const {
    const ScoreTraits& score = c_.op.score.traits;
    const int vectors = c_.plan.vectors;
    for (int n = 0; n < Lanes::planes; ++n) {
      if (score.table_by_distance)
        add_from_lanes(by_lane.plane(n), vectors, derived.table.plane(n));
      const LaneTile<Real> projected = derived.projected.plane(n);
      for (int v = 0; v < vectors; ++v)
        for (Index r = 0; r < projected.rows; ++r)
          projected.store(r, v, projected.load(r, v) * c_.projected_factor());
    }
    if (score.query_features > 0)
      vjps.features_vjp(RowSide::query, rows.derived_tiles(), place.head,
                        c_.geometry.query_position(place.query), rows.visible(), vectors,
                        rows.features(), features, derived, scalars);
    derived.chain(c_.op.score.projection, c_.keys.template tables<Lanes>(place.head), vectors);
    const Index inputs = score.query_inputs;
    const Index first = c_.geometry.row_index(place.batch, place.head, place.query);
    for (int n = 0; inputs > 0 && n < Lanes::planes; ++n)
      add_unpacked_lanes(derived.input.plane(n).data, derived.input.lanes, place.rows, inputs,
                         shared.sums(n).dquery_inputs.data() + first * inputs, inputs);
  }

  const CallContext<Real>& c_;
  std::vector<double> scalar_sums_;
};

// Scratch for one tile, which all panels of a worker use in turn; and what the panels of a group leave side by
// side for sums over all their queries.
template <class Real>
struct TileScratch {
  Real *weights, *dscores;  // [group][tile][lanes], of streaming normalisers
  Real *q, *dout;  // [group * lanes][whole vectors]: rows of the queries, zeros behind the last one
  LaneTile<Real> projected, dprojected;
  Real* key_lanes;             // see ScoreBack
  LaneTile<Real> column_keys;  // see ColumnBack
  PanelProducts<Real> products;
  // Where precision is mixed: the tile's weights and dscores by columns, [tile][group * lanes / 2], and q and dout by
  // rows, [group * lanes / 2][whole vectors].
  BfloatPair *paired_weights, *paired_dscores, *paired_q, *paired_dout;
  // What the panels of a group, which are of one head, add to the table of positions.
  PositionSums<Real> positions;
  Passage passage;
  bool leaves =
      false;  // does the panel at hand, or the group together, add to the tile for the last time?

  TileScratch(const CallContext<Real>& c, TileGates& gates, Scratch<Real>& scratch)
      : products(c, scratch), positions(c.keys.positions(), scratch), passage(gates) {
    const Index lanes = c.plan.lanes, tile = c.plan.tile, rank = c.keys.needs().rank;
    const auto take = [&](Index n) { return take_lanes(scratch, n, lanes); };
    const Index queries = c.plan.group * lanes;
    const Index sums = c.op.streams() ? queries * tile : 0;
    weights = scratch.take(sums);
    dscores = scratch.take(sums);
    q = scratch.take(queries * whole_vectors<Real>(c.geometry.dim_qk));
    dout = scratch.take(queries * whole_vectors<Real>(c.geometry.dim_v));
    projected = take(rank > 0 ? tile : 0);
    dprojected = take(rank > 0 ? tile : 0);
    key_lanes = scratch.take(c.op.score.traits.key_features * tile * kLanes<Real>);
    if (c.op.score.columns)
      column_keys = take_lanes(scratch, c.geometry.dim_qk, column_key_lanes<Real>(tile));
    const auto take_pairs_of_queries = [&](Index columns) {
      return take_pairs(scratch, c.pair_products, queries / 2 * columns);
    };
    paired_weights = take_pairs_of_queries(tile);
    paired_dscores = take_pairs_of_queries(tile);
    paired_q = take_pairs_of_queries(whole_vectors<Real>(c.geometry.dim_qk));
    paired_dout = take_pairs_of_queries(whole_vectors<Real>(c.geometry.dim_v));
  }
};

template <class Real>
class PanelGradients {
 public:
  using Context = CallContext<Real>;

  // A tile after the normaliser's vjp, [keys][lanes] each.
  struct WeighedTile {
    LaneTile<Real> weights;
    std::array<LaneTile<Real>, kMostMaps> dots, dscores;  // [map]
  };

  // index: of the panel in its group.
  PanelGradients(const Context& c, BackwardShared<Real>& shared, const Panel<Real>& panel,
                 TileScratch<Real>& work, Index index, Scratch<Real>& scratch)
      : c_(c),
        score_(c.op.score.traits),
        s_(shared),
        panel_(panel),
        work_(work),
        index_(index),
        maps_(c.op.maps()) {
    const Geometry& g = c.geometry;
    const TokenColumns& columns = c.op.columns;
    const Index lanes = c.plan.lanes;
    const auto take = [&](Index n) { return take_lanes(scratch, n, lanes); };
    const auto take_rows = [&](Index width) {
      return scratch.take(lanes * whole_vectors<Real>(width));
    };
    for (int m = 0; m < c.op.maps(); ++m) {
      Map& map = maps_.emplace(c, scratch);
      map.q.memory = m == 0 ? nullptr : take_rows(g.dim_qk);
      map.q.clean_memory = take_rows(g.dim_qk);
      map.projected.memory = take_rows(c.keys.needs().rank);
      map.projected.clean_memory = take_rows(c.keys.needs().rank);
      map.pairs =
          m == 0 ? nullptr
                 : take_pairs(scratch, c.pair_products, lanes / 2 * whole_vectors<Real>(g.dim_qk));
    }
    dout_.memory = piece_at(work.dout, index * lanes * whole_vectors<Real>(g.dim_v));
    dout_.clean_memory = take_rows(g.dim_v);
    dextra_ = take(c.op.extra_dim(g));
    dreadout_inputs_ = take(columns.readout_query.count);
    dnormaliser_inputs_ = take(columns.normaliser_query.count);
    const Index key_inputs = columns.normaliser_key.count;
    dkey_inputs_ = {scratch.take(g.len_kv * key_inputs), key_inputs};
    dquery_ = take(c.op.own_query_dim(g));
    down_key_ = take(c.op.own_row_dim(g.dim_qk));
    down_value_ = take(c.op.own_row_dim(g.dim_v));
  }

  // Gradient of the panel's extra rows, [extra_dim][lanes].
  [[nodiscard]] const LaneTile<Real>& extra() const { return dextra_; }

  // What is added to the gradient of the panel's rows beside that of the scores, [dim_qk][lanes].
  [[nodiscard]] const LaneTile<Real>& query() const { return dquery_; }

  // Gradients of the numbers of tokens that the normaliser reads: of queries, [inputs][lanes], and of the keys that the
  // panel sees.
  [[nodiscard]] const LaneTile<Real>& normaliser_inputs() const { return dnormaliser_inputs_; }
  [[nodiscard]] const TokenRows<Real>& key_inputs() const { return dkey_inputs_; }

  // Starts the panel, whose queries must be loaded.
  void begin() {
    for (const auto& tile :
         {dquery_, down_key_, down_value_, dextra_, dreadout_inputs_, dnormaliser_inputs_})
      tile.fill(Real(0));
    std::fill_n(dkey_inputs_.data, panel_.seen_by_any.size() * dkey_inputs_.stride, Real(0));
    finite_ = true;
    for (int m = 0; m < maps(); ++m) copy_queries(m);
  }

  // Where the readout's vjp writes.
  void attach(ReadoutPanel<Real>& readout) const {
    readout.dquery = dquery_;
    readout.down_key = down_key_;
    readout.down_value = down_value_;
    readout.dextra = dextra_;
    readout.dquery_inputs = dreadout_inputs_;
  }

  // dL/dmixed, [dim_v][lanes]: the rows that are summed into dV.
  void take_output_gradient(const LaneTile<Real>& dmixed) {
    dout_.copy(dmixed, panel_.place.rows);
    if (in_bf16()) return pair_output_gradient();
    finite_ = finite_ && all_finite(dout_.rows);
    if (finite_) return;
    dout_.clean_up();
    for (Map& map : maps_) map.q.clean_up();
  }

  // Are the panel's products those of pairs of bfloat16?
  [[nodiscard]] bool in_bf16() const { return c_.in_bf16(panel_.place.rows); }
  // Do the sums over queries need no guard against what hidden pairs hold? Pairs that are not finite are left out of
  // the products of all tiles alike.
  [[nodiscard]] bool sums_plainly(const PanelTile& tile) const {
    return finite_ || !(tile.kind == TileKind::partial || c_.mask.has_bias() || in_bf16());
  }

  // What is added to shared rows waits for the panel's turn at the tile's gates.
  // together: the worker adds to dK and dV for all panels of the group.
  void add(const PanelTile& tile, const WeighedTile& weighed, bool together) {
    using Sum = TileGates::Sum;
    const TilePlace& at = tile.at;
    Passage& passage = work_.passage;
    work_.products.begin(panel_, tile);
    if (s_.grads.bias.given()) {
      passage.wait(Sum::keys);
      for (int m = 0; m < maps(); ++m)
        work_.products.add_bias(weighed.dscores[std::size_t(m)], s_.grads.bias);
    }
    if (dkey_inputs_.stride > 0) {
      passage.wait(Sum::keys);
      add_key_inputs(at);
    }
    for (int m = 0; m < maps(); ++m) {
      const std::size_t i = std::size_t(m);
      const LaneTile<Real>& dscores = weighed.dscores[i];
      const int key_gradients = c_.plain() ? 0 : chain_scores(m, at, weighed.dots[i], dscores);
      if (c_.op.score.columns)
        add_columns(m, tile, dscores);
      else
        add_to_queries(m, at, dscores);
      if (key_gradients > 0 || c_.keys.needs().rank > 0) {
        passage.wait(Sum::keys);
        add_derived(m, at, key_gradients);
      }
      // Pairs of the next map take the place of this one's.
      if (in_bf16()) pair_columns_of(dscores, work_.paired_dscores);
      if (in_bf16() && !together) add_to_keys(m, m + 1, tile, weighed);
    }
    if (in_bf16()) pair_columns_of(weighed.weights, work_.paired_weights);
    if (together) return;
    if (!in_bf16() && !c_.op.score.columns) add_to_keys(0, maps(), tile, weighed);
    if (!s_.grads.value.given()) return;
    Real* dv = s_.grads.value.row(at.batch, c_.geometry.kv_head(at.head), at.key);
    passage.add(Sum::values, at.key_range(), work_.leaves, [&](const KeyRange& part) {
      add_rows_or_pairs(weighed.weights, part, tile, dout_,
                        piece_at(work_.paired_weights, first_pair()), paired_dout(), dv,
                        s_.grads.value.strides().row);
    });
  }

  // Adds to the key and value rows of the queries' own tokens, as far as they lie in tile `t`.
  void add_own_rows(Index t) const {
    if (!c_.op.readout.traits.uses_own_rows) return;
    const TilePlace& place = panel_.place;
    const Index first = c_.geometry.query_position(place.query), end = first + place.rows;
    const KeyRange here{std::max(first, t * c_.plan.tile), std::min(end, (t + 1) * c_.plan.tile)};
    if (here.begin >= here.end) return;
    work_.passage.wait();
    const auto add = [&](const LaneTile<Real>& from, const TensorView<Real>& to) {
      if (!to.given() || from.rows == 0) return;
      const auto row = [&](Index j) {
        return to.row(place.batch, c_.geometry.kv_head(place.head), j);
      };
      if (here.begin == first)
        return add_unpacked_lanes(from.data, from.lanes, here.size(), from.rows, row(first),
                                  to.strides().row);
      for (Index j = here.begin; j < here.end; ++j)
        for (Index c = 0; c < from.rows; ++c) row(j)[c] += from.row(c)[j - first];
    };
    add(down_key_, s_.grads.key);
    add(down_value_, s_.grads.value);
  }

  // After the last tile: gradients of the panel's rows but for query; adds those of the score's parameters to
  // `parameters` and those of its table to `table`.
  void finish(OpGradient<Real>& parameters, Real* table) {
    for (int m = 0; m < maps(); ++m)
      maps_[std::size_t(m)].grad.finish(panel_.place, panel_.query[std::size_t(m)], s_.vjps.score,
                                        s_, *parameters.score);
    if (score_.has_table) add_table(table);
    const TilePlace& place = panel_.place;
    unpack_rows(dextra_, place, s_.grads.extra);
    const auto keep = [&](const LaneTile<Real>& from, std::vector<Real>& to) {
      if (from.rows == 0) return;
      unpack_lanes(from.data, from.lanes, place.rows, from.rows,
                   to.data() + panel_.first_row() * from.rows, from.rows);
    };
    keep(dreadout_inputs_, s_.dreadout_query);
    keep(dnormaliser_inputs_, s_.dnormaliser_query);
  }

  // After finish(): the gradient of query, which is added to rows that others add to where `sums_queries`.
  void write_query_gradients() const {
    if (!s_.grads.query.given()) return;
    const TilePlace& place = panel_.place;
    for (int m = 0; m < maps(); ++m)
      maps_[std::size_t(m)].grad.write(place, panel_.query[std::size_t(m)].source(), s_);
    add_unpacked_rows(dquery_, place, s_.grads.query);
  }

 private:
  // One score map.
  struct Map {
    QuerySums<Real> grad;
    PanelRows<Real> q;            // the panel's rows, times the row factor
    PanelRows<Real> projected;    // the rows times the score's projection, times projected_factor()
    BfloatPair* pairs = nullptr;  // q by rows, where precision is mixed

    Map(const CallContext<Real>& c, Scratch<Real>& scratch) : grad(c, scratch) {}
  };

  // Where dscores stand for dL/d(factor q.k), rows and dQ carry the factor.
  [[nodiscard]] Real row_factor() const { return c_.row_factor(); }

  void copy_queries(int m) {
    Map& map = maps_[std::size_t(m)];
    const auto& queries = panel_.query[std::size_t(m)];
    const Index padded = whole_vectors<Real>(queries.source().width);
    map.grad.clear(queries.source().width);
    // The rows of map 0 stand beside the rows of the other panels of the group.
    if (m == 0) {
      map.q.memory = work_.q + index_ * c_.plan.lanes * padded;
      map.pairs = piece_at(work_.paired_q, index_ * c_.plan.lanes / 2 * padded);
    }
    map.q.copy(queries.query_rows(), c_.plan.lanes, row_factor());
    const bool finite = in_bf16() ? pair_rows_of(map.q.rows, map.pairs) : all_finite(map.q.rows);
    finite_ = finite_ && finite;
    if (c_.keys.needs().rank > 0) map.projected.copy(queries.projected(), panel_.place.rows);
  }

  // Pairs of padded rows. Returns whether their numbers are finite.
  [[nodiscard]] bool pair_rows_of(const Rows<Real>& rows, BfloatPair* pairs) const {
    if constexpr (std::is_same_v<Real, float>) {
      c_.pair_products->by_rows(rows.data, rows.stride, c_.plan.lanes, rows.stride, pairs,
                                rows.stride);
      return c_.pair_products->finite(pairs, rows.stride, c_.plan.lanes / 2, rows.stride);
    }
    return true;
  }
  // Makes pairs of the output's gradient. Where a number of the panel is not finite, all of its pairs are cleared of such
  // numbers, which are added to what sees them afterwards.
  void pair_output_gradient() {
    const bool finite = pair_rows_of(dout_.rows, paired_dout());
    finite_ = finite_ && finite;
    if (finite_) return;
    const Index rows = c_.plan.lanes / 2;
    const auto clear = [&](BfloatPair* pairs, Index stride) {
      c_.pair_products->clear(pairs, stride, rows, stride);
    };
    clear(paired_dout(), dout_.rows.stride);
    for (Map& map : maps_) clear(map.pairs, map.q.rows.stride);
  }
  [[nodiscard]] BfloatPair* paired_dout() const {
    return piece_at(work_.paired_dout, index_ * c_.plan.lanes / 2 * dout_.rows.stride);
  }
  // Pairs of a tile's lanes, beside those of the other panels of the group.
  [[nodiscard]] Index first_pair() const { return index_ * c_.plan.lanes / 2; }
  [[nodiscard]] Index pair_stride() const { return c_.plan.group * c_.plan.lanes / 2; }
  void pair_columns_of(const LaneTile<Real>& tile, BfloatPair* pairs) const {
    if constexpr (std::is_same_v<Real, float>)
      c_.pair_products->by_columns(tile.data, tile.lanes, tile.rows, tile.lanes,
                                   pairs + first_pair(), pair_stride());
  }

  // out[key] += sum over lanes of weights[key][lane] rows[lane] for some keys of the tile, as a product of pairs where the panel's
  // are: `paired` and `paired_rows` hold both in pairs of lanes.
  void add_rows_or_pairs(const LaneTile<Real>& weights, const KeyRange& part, const PanelTile& tile,
                         const PanelRows<Real>& of, const BfloatPair* paired,
                         const BfloatPair* paired_rows, Real* out, Index stride) {
    if constexpr (std::is_same_v<Real, float>)
      if (in_bf16()) {
        out += part.begin * stride;
        const Broadcast<BfloatPair> pairs{paired, pair_stride(), 1};
        c_.pair_products->add(part.size(), pairs_of(of.rows.count), of.rows.columns,
                              pairs.skip_rows(part.begin), paired_rows, of.rows.stride, out,
                              stride);
        if (!finite_)
          add_visible_rows(weights.part(part.begin, part.size()),
                           work_.products.hidden().part(part.begin, part.size()), of.rows, out,
                           stride, [](auto x) { return rounded_to_bfloat(x); });
        return;
      }
    work_.products.add_rows(weights, part, of, sums_plainly(tile), out, stride);
  }

  void add_to_queries(int m, const TilePlace& at, const LaneTile<Real>& dscores) {
    const QuerySums<Real>& grad = maps_[std::size_t(m)].grad;
    const auto& queries = panel_.query[std::size_t(m)];
    work_.products.add_lanes(queries.key_rows(at.key, at.keys), dscores, grad.dq,
                             c_.bf16 ? &c_.bf16->key_rows[std::size_t(m)] : nullptr);
    if (grad.derived.projected.rows > 0)
      work_.products.add_lanes(queries.projected_keys(at.key, at.keys),
                               work_.dprojected.part(0, at.keys), grad.derived.projected);
  }

  // What the columns of map m add to dQ, to the weights of columns and to dK.
  void add_columns(int m, const PanelTile& tile, const LaneTile<Real>& dsums) {
    const TilePlace& at = tile.at;
    const QuerySums<Real>& grad = maps_[std::size_t(m)].grad;
    const auto& queries = panel_.query[std::size_t(m)];
    const LaneTile<Real> keys = work_.column_keys.part(0, grad.dq.rows);
    columns_vjp(
        c_, at, [&](const Strip& strip) { return queries.column_pairs(at, strip); }, dsums,
        work_.products.hidden_or_none(), grad.dq, keys, grad.column_weights);
    const auto to = s_.key_rows(c_, at, m, queries.source());
    if (!to.data) return;
    work_.passage.add(
        TileGates::Sum::keys, at.key_range(), work_.leaves && m + 1 == maps(),
        [&](const KeyRange& part) { add_column_keys(keys, part, to.data, to.stride); });
  }

  // dK += dscores^T Q of maps [first, end), strip by strip.
  void add_to_keys(int first, int end, const PanelTile& tile, const WeighedTile& weighed) {
    const bool leaves = work_.leaves && end == maps();
    work_.passage.add(TileGates::Sum::keys, tile.at.key_range(), leaves, [&](const KeyRange& part) {
      for (int m = first; m < end; ++m) {
        const Map& map = maps_[std::size_t(m)];
        const auto to = s_.key_rows(c_, tile.at, m, panel_.query[std::size_t(m)].source());
        if (to.data)
          add_rows_or_pairs(weighed.dscores[std::size_t(m)], part, tile, map.q,
                            piece_at(work_.paired_dscores, first_pair()), map.pairs, to.data,
                            to.stride);
      }
    });
  }

  // dscores become those of the dot products, by the score's vjp. Returns how many key features have gradients.
  [[nodiscard]] int chain_scores(int m, const TilePlace& at, const LaneTile<Real>& dots,
                                 const LaneTile<Real>& dscores) {
    const auto& queries = panel_.query[std::size_t(m)];
    QuerySums<Real>& grad = maps_[std::size_t(m)].grad;
    queries.projected_dots(at, work_.projected);
    return s_.vjps.score.scores_vjp(
        queries.score_tile(at, dots, work_.projected),
        {dscores, c_.keys.needs().rank > 0 ? work_.dprojected : LaneTile<Real>{},
         work_.products.hidden_or_none(), work_.key_lanes, grad.features, grad.scalars,
         score_.table_by_distance ? grad.by_lane : grad.derived.table, &work_.positions,
         c_.scale / c_.row_factor()});
  }
  void add_derived(int m, const TilePlace& at, int key_gradients) {
    const Index row = c_.keys.row(at.batch, at.head, m, at.key);
    if (key_gradients > 0)
      add_sums_of_lanes(work_.key_lanes, at.keys, key_gradients,
                        s_.dfeatures.data() + row * score_.key_features, score_.key_features);
    if (c_.keys.needs().rank == 0) return;
    const Index numbers = c_.keys.needs().row_numbers();
    PanelRows<Real>& of = maps_[std::size_t(m)].projected;
    const bool plainly = !work_.products.hides() || all_finite(of.rows);
    if (!plainly) of.clean_up();
    work_.products.add_rows(work_.dprojected.part(0, at.keys), {0, at.keys}, of, plainly,
                            s_.drows.data() + row * numbers + c_.keys.needs().transformed, numbers);
  }
  // Adds the gradients of the tile's key inputs to those that all panels of the head add to.
  void add_key_inputs(const TilePlace& at) const {
    const Geometry& g = c_.geometry;
    Real* to = s_.dnormaliser_key.data() +
               ((at.batch * g.heads + at.head) * g.len_kv + at.key) * dkey_inputs_.stride;
    const Real* from = &dkey_inputs_(at.key - panel_.seen_by_any.begin, 0);
    for (Index n = 0; n < at.keys * dkey_inputs_.stride; ++n) to[n] += from[n];
  }

  void add_table(Real* table) {
    const auto& grad = maps_[0].grad.derived.table;
    const Index width = c_.geometry.dim_qk;
    // A query that sees nothing may hold anything, and 0 times a NaN in it must not reach the table.
    Rows<Real> q = maps_[0].q.rows;
    if (!all_finite(q)) q = finite_copy(q, maps_[0].q.clean_memory, q.stride);
    gemm_add(grad.rows, panel_.place.rows, width, Broadcast<Real>{grad.data, grad.lanes, 1}, q.data,
             q.stride, table, width);
  }

  [[nodiscard]] int maps() const { return c_.op.maps(); }

  const Context& c_;
  const ScoreTraits& score_;
  BackwardShared<Real>& s_;
  const Panel<Real>& panel_;
  TileScratch<Real>& work_;
  Index index_;
  FixedList<Map> maps_;
  LaneTile<Real> dextra_, dquery_, down_key_, down_value_;
  LaneTile<Real> dreadout_inputs_, dnormaliser_inputs_;
  TokenRows<Real> dkey_inputs_;  // of the keys that the panel sees
  PanelRows<Real> dout_;
  bool finite_ = true;  // are the panel's rows?
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
