// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tangents of what a score reads of a panel of queries (those of keys: engine/derived_keys.hpp), and of a tile of pairs:
//
//   (q . k). = q. . k + q . k.
//
// The same formulas as for keys hold for what is derived of queries.

#include <heed/engine/derived_queries.hpp>
#include <heed/engine/jvps.hpp>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// One score map of a panel on its way forward: its rows and their tangents, and the tangents of the scores of a tile of keys.
template <class Real>
class QueryTangents {
 public:
  // queries: loaded before load() here.
  QueryTangents(const CallContext<Real>& c, const ScoreJvps<Real>& score,
                const TangentOperands<Real>& d, const DerivedQueries<Real>& queries,
                Scratch<Real>& scratch)
      : c_(c), traits_(c.op.score.traits), score_(score), d_(d), queries_(queries) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    scalars_ = scratch.take(traits_.scalars);
    scaled_ = DualLanes<Real>::take(scratch, width, lanes);
    features_ = DualLanes<Real>::take(scratch, traits_.query_features, lanes);
    const auto beside = [&](const LaneTile<Real>& rows) {
      return DualLanes<Real>{rows.data, scratch.take(rows.rows * lanes), rows.rows, lanes};
    };
    before_ = beside(queries.before());
    const DerivedTiles<Real>& own = queries.derived_tiles();
    derived_ = {beside(own.x), beside(own.projected), beside(own.table), beside(own.input)};
    if (traits_.table_by_distance) by_lane_ = take_relative(scratch, needs.table_rows, lanes);
  }

  // Reads the panel at `place`.
  void load(const TilePlace& place) {
    const Source& source = queries_.source();
    const bool transforms = traits_.has_transform;
    const Real factor = c_.query_factor();
    score_.scalars(place.head, scalars_);
    scaled_.rows = source.width;
    if (c_.keys.needs().any) derived_.x.rows = source.width;
    if (transforms) before_.rows = source.width;
    const LaneTile<Real> rows = scaled_.value(), tangents = scaled_.tangent();
    pack_stored(d_.query, {place.batch, source.query_head, place.query, place.rows},
                source.query_column, tangents);
    if (transforms) {
      std::copy_n(before_.data, rows.rows * rows.lanes, rows.data);
      std::copy_n(tangents.data, rows.rows * rows.lanes, before_.tangent_data);
      score_.transform(RowSide::query, place.head, c_.geometry.query_position(place.query),
                       c_.plan.vectors, scaled_);
    }
    if (c_.keys.needs().any)
      std::copy_n(tangents.data, rows.rows * rows.lanes, derived_.x.tangent_data);
    for (Index col = 0; col < source.width; ++col)
      for (int v = 0; v < c_.plan.vectors; ++v)
        tangents.store(col, v, tangents.load(col, v) * factor);
    const Rows<Real> own = queries_.query_rows();
    pack_lanes(own.data, own.stride, own.count, own.columns, rows.data, rows.lanes, factor);
    if (c_.keys.needs().any) derive(place);
  }

  // Tangents of scaled dot products, and of projected ones.
  void dots(const TilePlace& place, const LaneTile<Real>& out,
            const LaneTile<Real>& projected) const {
    if (const auto* columns = c_.op.score.columns)
      return for_strips(place, c_.plan.vectors, [&](const Strip& strip) {
        columns->tangents(column_pairs(place, strip), strip.of(out));
      });
    product(place, queries_.key_rows(place.key, place.keys), key_tangents(place), scaled_.tangent(),
            scaled_.value(), out);
    if (derived_.projected.rows > 0)
      product(place, queries_.projected_keys(place.key, place.keys),
              c_.keys.projected(place.batch, place.head, queries_.map(), place.key, place.keys, 1),
              derived_.projected.tangent(), queries_.projected(), projected);
  }
  // `tangents`: in, those of the scaled dot products; out, those of the scores. `dots` and `projected` are the products
  // themselves, which a plain score does not read. Cells of hidden pairs mean nothing. `scratch` has room for a tile
  // where the bias moves.
  void scores(const TilePlace& place, const LaneTile<Real>& dots, const LaneTile<Real>& projected,
              const LaneTile<Real>& projected_tangents, const LaneTile<Real>& tangents,
              Real* scratch) const {
    if (!c_.plain())
      score_.scores(queries_.score_tile(place, dots, projected),
                    tangent_tile(place, projected_tangents, tangents));
    if (d_.bias.given()) add_bias(place, tangents, scratch);
  }
  // The tangents of the pairs with the keys of `place`, beside DerivedQueries::score_tile().
  [[nodiscard]] ScoreTangentTile<Real> tangent_tile(const TilePlace& place,
                                                    const LaneTile<Real>& projected,
                                                    const LaneTile<Real>& tangents) const {
    return {tangents,
            scalars_,
            features_.tangent(),
            c_.keys.features(place.batch, place.head, queries_.map(), place.key, 1),
            c_.keys.feature_stride(),
            derived_.projected.rows > 0 ? projected : LaneTile<Real>{},
            traits_.table_by_distance ? by_lane_ : derived_.table.tangent(),
            &c_.keys.positions(1)};
  }

  // The pairs of a strip of a tile and how they move, for a score with columns.
  [[nodiscard]] ColumnPairs<Real> column_pairs(const TilePlace& place, const Strip& strip) const {
    ColumnPairs<Real> pairs = queries_.column_pairs(place, {{0, place.keys}, 0, c_.plan.vectors});
    const Rows<Real> moved = key_tangents(place);
    pairs.queries[0] = scaled_.value();
    pairs.queries[1] = scaled_.tangent();
    pairs.keys[1] = moved.data;
    pairs.strides[1] = moved.stride;
    pairs.weights[1] = score_.columns->weights(place.head);
    return pairs.part(strip.keys.begin, strip.keys.size(), strip.first_vector, strip.vectors);
  }

  // Tangents of p[0], p[1], ... of the head.
  [[nodiscard]] const Real* scalars() const { return scalars_; }
  // As those of DerivedQueries, with tangents: the rows, unscaled, and what is derived of them; tangents of projected rows carry
  // CallContext::projected_factor().
  [[nodiscard]] const Source& source() const { return queries_.source(); }
  [[nodiscard]] const DerivedDuals<Real>& derived_tiles() const { return derived_; }
  [[nodiscard]] const DualLanes<Real>& before() const { return before_; }
  [[nodiscard]] LaneTile<Real> features() const { return features_.value(); }
  [[nodiscard]] const Real* visible() const { return queries_.visible(); }
  // Do the rows that products are made of move?
  [[nodiscard]] bool queries_move() const { return d_.query.given() || score_.transform_moves(); }
  [[nodiscard]] bool keys_move() const { return d_.key.given() || score_.transform_moves(); }
  // The tangents of keys as products read them; no rows where they hold still.
  [[nodiscard]] Rows<Real> key_tangents(const TilePlace& place) const {
    const Source& source = queries_.source();
    if (!keys_move()) return {};
    if (traits_.has_transform)
      return c_.keys.transformed(place.batch, place.head, queries_.map(), place.key, place.keys,
                                 source.width, 1);
    return {d_.key.row(place.batch, source.kv_head, place.key) + source.key_column, place.keys,
            source.width, d_.key.strides().row};
  }

 private:
  void derive(const TilePlace& place) {
    const int vectors = c_.plan.vectors;
    load_inputs(d_.query_inputs, c_.geometry, tokens_of(place), derived_.input.tangent());
    derived_.derive(c_.op.score.projection, c_.keys.template tables<DualLanes<Real>>(place.head),
                    vectors, 1);
    if (traits_.table_by_distance) lay_out_by_lane(derived_.table.tangent(), vectors, by_lane_);
    if (traits_.query_features > 0)
      score_.features(RowSide::query, derived_, place.head, c_.geometry.query_position(place.query),
                      queries_.visible(), vectors, features_);
    const LaneTile<Real> projected = derived_.projected.tangent();
    for (int v = 0; v < vectors; ++v)
      for (Index r = 0; r < projected.rows; ++r)
        projected.store(r, v, projected.load(r, v) * c_.projected_factor());
  }
  // out[key][lane] = keys . q. + keys. . q
  void product(const TilePlace& place, const Rows<Real>& keys, const Rows<Real>& key_tangents,
               const LaneTile<Real>& tangent, const LaneTile<Real>& query,
               const LaneTile<Real>& out) const {
    if (!queries_move() && !keys_move()) return out.fill(Real(0));
    if (!queries_move()) return tile_dots(place, c_.plan.vectors, key_tangents, query, out);
    tile_dots(place, c_.plan.vectors, keys, tangent, out);
    if (keys_move()) tile_dots(place, c_.plan.vectors, key_tangents, query, out, Store::add);
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
  const ScoreJvps<Real>& score_;
  TangentOperands<Real> d_;
  const DerivedQueries<Real>& queries_;
  Real* scalars_;
  DualLanes<Real> scaled_;      // the rows times query_factor()
  DualLanes<Real> before_;      // of a score with a transform: the rows before it
  DerivedDuals<Real> derived_;  // numbers in the memory of the DerivedQueries
  DualLanes<Real> features_;
  LaneTile<Real> by_lane_;  // of a table by distance, as pairs of lanes read it
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
