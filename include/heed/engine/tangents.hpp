// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tangents of what a score reads of rows, once per call for keys (KeyTangents) and once per panel for queries (QueryTangents):
//
//   transform t(x)   t. = dt/dx x. + dt/dp p.       x. below is t. where there is one
//   feature f(x)     f. = sum_c df/dx_c x._c
//   projected row    (P^T x). = P^T x.              the projection is fixed
//   table entry      (W x). = W. x + W x.
//   sum over tokens  (sum term(x_s)). = sum term'(x_s) x._s
//
// and, of a tile of pairs, (q . k). = q. . k + q . k.
//
// Memory  as many numbers per key, map and head as KeySide keeps.

#include <heed/engine/jvps.hpp>
#include <heed/engine/tile/scores.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Tokens of head h of batch b.
struct TokenRange {
  Index batch, head, first, count;
};
// Numbers of tokens as a head reads them, or their tangents; zeros where none are given.
template <class Real>
void load_inputs(const TensorView<const Real>& from, const Geometry& g, const TokenRange& tokens,
                 const LaneTile<Real>& to) {
  if (to.rows == 0) return;
  if (!from.given()) return to.fill(Real(0));
  pack_lanes(input_row(from, g, tokens.batch, tokens.head, tokens.first), from.strides().row,
             tokens.count, to.rows, to.data, to.lanes);
}

// Tangents of what is derived of rows whose tangent is d.x.
template <class Real>
void derive_tangents(const Real* projection, const Real* table, const Real* table_tangent,
                     const SideTiles<Real>& rows, const SideTiles<Real>& d, int vectors) {
  d.derive(projection, table, vectors);
  if (d.table.rows > 0)
    panel_gemm<Store::add>(d.table.rows, d.x.rows, vectors,
                           Broadcast<Real>{table_tangent, d.x.rows, 1}, rows.x.data, rows.x.lanes,
                           d.table.data, d.table.lanes);
}

// Tangents of the side values of keys, of their tables, and of the table of positions.
template <class Real>
class KeyTangents {
 public:
  KeyTangents(const CallContext<Real>& c, const ScoreJvps<Real>& jvps,
              const TangentOperands<Real>& d)
      : c_(c), jvps_(jvps), d_(d), positions_(jvps.position_table(c.geometry)) {
    const SideNeeds<Real>& needs = c.keys.needs();
    if (!needs.any) return;
    const Index rows = c.keys.row_count();
    features_.resize(std::size_t(rows * c.op.score.traits.key_features));
    projected_.resize(std::size_t(rows * needs.rank));
    transformed_.resize(std::size_t(rows * needs.transformed));
    tables_.resize(std::size_t(c.geometry.heads * table_elements()));
    for (Index h = 0; h < c.geometry.heads && table_elements() > 0; ++h)
      jvps.prepare_table(h, c.geometry.dim_qk, tables_.data() + h * table_elements());
  }
  KeyTangents(const KeyTangents&) = delete;

  // Fills all of them. The keys' side values must be built.
  void build(int threads) {
    if (!c_.keys.needs().any) return;
    const Geometry& g = c_.geometry;
    const auto take = [&](Scratch<Real>& s) {
      const auto& needs = c_.keys.needs();
      return SideTiles<Real>::take(s, g.dim_qk, needs.rank, needs.key_table_rows(),
                                   c_.op.score.traits.key_inputs, kWidth);
    };
    const auto take_features = [&](Scratch<Real>& s) {
      const Index features = c_.op.score.traits.key_features;
      return LaneTile<Real>{s.take(features * kWidth), features, kWidth};
    };
    const Index elements =
        2 * (scratch_elements<Real>(take) + scratch_elements<Real>(take_features));
    parallel_for(g.batch * g.heads, threads, [&](Index unit) {
      const Index b = unit / g.heads, h = unit % g.heads;
      if (h > 0 && c_.keys.shares(h, h - 1)) return;
      Scratch<Real> scratch(elements);
      const SideTiles<Real> rows = take(scratch), d = take(scratch);
      const LaneTile<Real> features = take_features(scratch), moved = take_features(scratch);
      for (int map = 0; map < c_.op.maps(); ++map)
        for (Index j = 0; j < g.len_kv; j += kWidth)
          build_block(rows, d, features, moved, b, h, map, j, std::min(kWidth, g.len_kv - j));
    });
  }

  // As KeySide::features(), with strides of len_kv.
  [[nodiscard]] const Real* features(Index b, Index h, int map, Index j) const {
    const Index count = c_.op.score.traits.key_features;
    return count > 0 ? features_.data() + c_.keys.row(b, h, map, 0) * count + j : nullptr;
  }
  [[nodiscard]] Rows<Real> projected(Index b, Index h, int map, Index j, Index count) const {
    const Index rank = c_.keys.needs().rank;
    return {projected_.data() + c_.keys.row(b, h, map, j) * rank, count, rank, rank};
  }
  // The first `width` columns of keys j, j + 1, ... as they move behind the score's transform.
  [[nodiscard]] Rows<Real> transformed(Index b, Index h, int map, Index j, Index count,
                                       Index width) const {
    const Index row = c_.keys.needs().transformed;
    return {transformed_.data() + c_.keys.row(b, h, map, j) * row, count, width, row};
  }
  // Lane tiles of keys [j, j + count) as head h reads them, behind the transform, and of their tangents.
  void load(const SideTiles<Real>& rows, const SideTiles<Real>& d, Index b, Index h,
            const Source& source, Index j, Index count) const {
    load_rows(c_.key, b, source, j, count, rows.x);
    load_rows(d_.key, b, source, j, count, d.x);
    if (c_.op.score.traits.has_transform)
      jvps_.transform(RowSide::key, h, j, kPanelVectors, rows.x, d.x);
    load_inputs(c_.in.key_inputs, c_.geometry, {b, h, j, count}, rows.input);
    load_inputs(d_.key_inputs, c_.geometry, {b, h, j, count}, d.input);
  }
  // Keys, or their tangents, as they are stored; zeros where none are given.
  static void load_rows(const TensorView<const Real>& from, Index b, const Source& source, Index j,
                        Index count, const LaneTile<Real>& to) {
    if (!from.given()) return to.fill(Real(0));
    pack_lanes(from.row(b, source.kv_head, j) + source.key_column, from.strides().row, count,
               source.width, to.data, to.lanes);
  }
  [[nodiscard]] const ScoreJvps<Real>& score() const { return jvps_; }
  [[nodiscard]] const Real* table(Index h) const { return tables_.data() + h * table_elements(); }
  [[nodiscard]] const PositionTable<Real>& positions() const { return positions_; }

 private:
  static constexpr Index kWidth = kPanelLanes<Real>;

  [[nodiscard]] Index table_elements() const {
    return c_.keys.needs().table_rows * c_.geometry.dim_qk;
  }
  void build_block(SideTiles<Real> rows, SideTiles<Real> d, const LaneTile<Real>& features,
                   const LaneTile<Real>& moved, Index b, Index h, int map, Index j, Index count) {
    const Source source = c_.op.normaliser.source(c_.geometry, h, map);
    rows.x.rows = d.x.rows = source.width;
    load(rows, d, b, h, source, j, count);
    const Real* projection = c_.op.score.projection;
    rows.derive(projection, c_.keys.table(h), kPanelVectors);
    derive_tangents(projection, c_.keys.table(h), table(h), rows, d, kPanelVectors);
    if (features.rows > 0) {
      const int vectors = int((count + kLanes<Real> - 1) / kLanes<Real>);
      c_.op.score.features(RowSide::key, rows, h, j, nullptr, vectors, features);
      jvps_.features(RowSide::key, rows, d, h, j, nullptr, vectors, features, moved);
      Real* to = features_.data() + c_.keys.row(b, h, map, 0) * features.rows + j;
      for (Index i = 0; i < features.rows; ++i)
        std::copy_n(moved.row(i), count, to + i * c_.geometry.len_kv);
    }
    const Index rank = c_.keys.needs().rank, row = c_.keys.needs().transformed;
    if (rank > 0)
      unpack_lanes(d.projected.data, d.projected.lanes, count, rank,
                   projected_.data() + c_.keys.row(b, h, map, j) * rank, rank);
    if (row > 0)
      unpack_lanes(d.x.data, d.x.lanes, count, source.width,
                   transformed_.data() + c_.keys.row(b, h, map, j) * row, row);
  }

  const CallContext<Real>& c_;
  const ScoreJvps<Real>& jvps_;
  TangentOperands<Real> d_;
  std::vector<Real> features_, projected_, transformed_, tables_;
  PositionTable<Real> positions_;
};

// One score map of a panel on its way forward: the tangents of its rows, and those of the scores of a tile of keys.
template <class Real>
class QueryTangents {
 public:
  // `side`: the queries themselves, loaded before load() here.
  QueryTangents(const CallContext<Real>& c, const TangentOperands<Real>& d,
                const KeyTangents<Real>& keys, const QuerySide<Real>& side, Scratch<Real>& scratch)
      : c_(c), traits_(c.op.score.traits), d_(d), keys_(keys), side_(side) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto take = [&](Index rows) {
      return LaneTile<Real>{scratch.take(rows * lanes), rows, lanes};
    };
    scalars_ = scratch.take(traits_.scalars);
    query_ = take(width);
    tangent_ = take(width);
    features_ = take(traits_.query_features);
    const auto& needs = c.keys.needs();
    if (!needs.any) return;
    side_tangents_ = SideTiles<Real>::take(scratch, width, needs.rank, needs.table_rows,
                                           traits_.query_inputs, lanes);
    if (traits_.table_by_distance) by_lane_ = take_relative(scratch, needs.table_rows, lanes);
  }

  // Reads the panel at `place`.
  void load(const TilePlace& place) {
    const Source& source = side_.source();
    keys_.score().scalars(place.head, scalars_);
    query_.rows = tangent_.rows = source.width;
    pack_tangents(place, tangent_, c_.query_factor());
    const bool derives = c_.keys.needs().any;
    if (derives) {
      side_tangents_.x.rows = source.width;
      pack_tangents(place, side_tangents_.x, Real(1));
    }
    if (traits_.has_transform) {
      std::copy_n(side_.before().data, source.width * query_.lanes, query_.data);
      keys_.score().transform(RowSide::query, place.head, c_.geometry.query_position(place.query),
                              c_.plan.vectors, query_, side_tangents_.x);
      for (Index col = 0; col < source.width; ++col)
        for (int v = 0; v < c_.plan.vectors; ++v)
          tangent_.store(col, v, side_tangents_.x.load(col, v) * c_.query_factor());
    }
    const Rows<Real> own = side_.query_rows();
    pack_lanes(own.data, own.stride, own.count, own.columns, query_.data, query_.lanes,
               c_.query_factor());
    if (derives) derive(place);
  }

  // Tangents of scaled dot products, and of projected ones.
  void dots(const TilePlace& place, const LaneTile<Real>& out,
            const LaneTile<Real>& projected) const {
    product(place, side_.key_rows(place.key, place.keys), key_tangents(place), tangent_, query_,
            out);
    if (side_tangents_.projected.rows > 0)
      product(place, side_.projected_keys(place.key, place.keys),
              keys_.projected(place.batch, place.head, side_.map(), place.key, place.keys),
              side_tangents_.projected, side_.projected(), projected);
  }
  // `tangents`: in, those of the scaled dot products; out, those of the scores. `dots` and `projected` are the products
  // themselves, which a plain score does not read. Cells of hidden pairs mean nothing. `scratch` has room for a tile
  // where the bias moves.
  void scores(const TilePlace& place, const LaneTile<Real>& dots, const LaneTile<Real>& projected,
              const LaneTile<Real>& projected_tangents, const LaneTile<Real>& tangents,
              Real* scratch) const {
    if (!c_.plain())
      keys_.score().scores(side_.score_tile(place, dots, projected),
                           tangent_tile(place, projected_tangents, tangents));
    if (d_.bias.given()) add_bias(place, tangents, scratch);
  }
  // The tangents of the pairs with the keys of `place`, beside QuerySide::score_tile().
  [[nodiscard]] ScoreTangentTile<Real> tangent_tile(const TilePlace& place,
                                                    const LaneTile<Real>& projected,
                                                    const LaneTile<Real>& tangents) const {
    return {tangents,
            scalars_,
            features_,
            keys_.features(place.batch, place.head, side_.map(), place.key),
            c_.geometry.len_kv,
            side_tangents_.projected.rows > 0 ? projected : LaneTile<Real>{},
            traits_.table_by_distance ? by_lane_ : side_tangents_.table,
            &keys_.positions()};
  }

  // Tangents of p[0], p[1], ... of the head.
  [[nodiscard]] const Real* scalars() const { return scalars_; }
  // Tangents of the rows, unscaled, and of what is derived of them.
  [[nodiscard]] const SideTiles<Real>& side() const { return side_tangents_; }
  // Do the rows that products are made of move?
  [[nodiscard]] bool queries_move() const {
    return d_.query.given() || keys_.score().transform_moves();
  }
  [[nodiscard]] bool keys_move() const { return d_.key.given() || keys_.score().transform_moves(); }
  // The tangents of keys as products read them; no rows where they hold still.
  [[nodiscard]] Rows<Real> key_tangents(const TilePlace& place) const {
    const Source& source = side_.source();
    if (!keys_move()) return {};
    if (traits_.has_transform)
      return keys_.transformed(place.batch, place.head, side_.map(), place.key, place.keys,
                               source.width);
    return {d_.key.row(place.batch, source.kv_head, place.key) + source.key_column, place.keys,
            source.width, d_.key.strides().row};
  }

 private:
  void pack_tangents(const TilePlace& place, const LaneTile<Real>& to, Real factor) const {
    const Source& source = side_.source();
    if (!d_.query.given()) return to.fill(Real(0));
    pack_lanes(d_.query.row(place.batch, source.query_head, place.query) + source.query_column,
               d_.query.strides().row, place.rows, source.width, to.data, to.lanes, factor);
  }
  void derive(const TilePlace& place) {
    const int vectors = c_.plan.vectors;
    load_inputs(d_.query_inputs, c_.geometry, {place.batch, place.head, place.query, place.rows},
                side_tangents_.input);
    derive_tangents(c_.op.score.projection, c_.keys.table(place.head), keys_.table(place.head),
                    side_.side_tiles(), side_tangents_, vectors);
    if (traits_.table_by_distance) lay_out_by_lane(side_tangents_.table, vectors, by_lane_);
    if (traits_.query_features > 0)
      keys_.score().features(RowSide::query, side_.side_tiles(), side_tangents_, place.head,
                             c_.geometry.query_position(place.query), side_.visible(), vectors,
                             side_.features(), features_);
    for (int v = 0; v < vectors; ++v)
      for (Index r = 0; r < side_tangents_.projected.rows; ++r)
        side_tangents_.projected.store(r, v,
                                       side_tangents_.projected.load(r, v) * c_.projected_factor());
  }
  // out[key][lane] = keys . q. + keys. . q
  void product(const TilePlace& place, const Rows<Real>& keys, const Rows<Real>& key_tangents,
               const LaneTile<Real>& tangent, const LaneTile<Real>& query,
               const LaneTile<Real>& out) const {
    if (!queries_move() && !keys_move()) return out.fill(Real(0));
    for_strips(place, c_.plan.vectors, [&](const Strip& strip) {
      const LaneTile<Real> to = strip.of(out);
      const auto multiply = [&]<Store store>(const Rows<Real>& rows, const LaneTile<Real>& lanes) {
        const Rows<Real> own = rows.part(strip.keys.begin, strip.keys.size());
        const LaneTile<Real> of = strip.lanes_of(lanes);
        panel_gemm<store>(own.count, own.columns, strip.vectors,
                          Broadcast<Real>{own.data, own.stride, 1}, of.data, of.lanes, to.data,
                          to.lanes);
      };
      if (!queries_move())
        multiply.template operator()<Store::overwrite>(key_tangents, query);
      else
        multiply.template operator()<Store::overwrite>(keys, tangent);
      if (queries_move() && keys_move())
        multiply.template operator()<Store::add>(key_tangents, query);
    });
  }
  void add_bias(const TilePlace& at, const LaneTile<Real>& tangents, Real* scratch) const {
    const Real* source =
        BoundMask<Real>::broadcast_row(d_.bias, at.batch, at.head, at.query) + at.key;
    const bool shared = d_.bias.shape().len == 1;
    const LaneTile<Real> bias{scratch, at.keys, tangents.lanes};
    if (!shared)
      pack_lanes(source, d_.bias.strides().row, at.rows, at.keys, scratch, tangents.lanes);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const KeyRange keys = at.keys_of(v);
      for (Index j = keys.begin; j < keys.end; ++j)
        tangents.add(j, v, shared ? Pack<Real>(source[j]) : bias.load(j, v));
    }
  }

  const CallContext<Real>& c_;
  const ScoreTraits& traits_;
  TangentOperands<Real> d_;
  const KeyTangents<Real>& keys_;
  const QuerySide<Real>& side_;
  Real* scalars_;
  LaneTile<Real> query_, tangent_;  // the rows and their tangents, times query_factor()
  LaneTile<Real> features_;
  LaneTile<Real> by_lane_;         // of a table by distance, as pairs of lanes read it
  SideTiles<Real> side_tangents_;  // projected rows times projected_factor()
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
