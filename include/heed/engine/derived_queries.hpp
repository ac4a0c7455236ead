// SPDX-License-Identifier: Apache-2.0
#pragma once

// The query derived of a panel: transposed rows, derived values, and the scores of a tile of keys.

#include <heed/engine/context.hpp>
#include <heed/engine/relative_rows.hpp>
#include <heed/engine/tile/hidden_pairs.hpp>
#include <heed/simd/few_products.hpp>

#include <span>

namespace heed {
inline namespace HEED_ABI {

// One score map of a panel: query rows of one head.
template <class Real>
class DerivedQueries {
 public:
  using Context = CallContext<Real>;

  DerivedQueries(const Context& c, Scratch<Real>& scratch, int map)
      : c_(c), traits_(c.op.score.traits), map_(map) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    scaled_ = {scratch.take(width * lanes), width, lanes};
    paired_ = take_pairs(scratch, c.pair_products, pairs_of(width) * lanes);
    few_ = scratch.take(kFewRows<Real> * width);
    few_projected_ = scratch.take(kFewRows<Real> * c.keys.needs().rank);
    dots_rows_ = scratch.take(kFewRows<Real> * whole_vectors<Real>(c.plan.tile));
    scalars_ = scratch.take(traits_.scalars);
    features_ = {scratch.take(traits_.query_features * lanes), traits_.query_features, lanes};
    const auto& needs = c.keys.needs();
    if (needs.any)
      derived_ = DerivedTiles<Real>::take(scratch, width, needs.rank, needs.table_rows,
                                          traits_.query_inputs, lanes);
    projected_ = {scratch.take(needs.rank * lanes), needs.rank, lanes};
    visible_ = scratch.take(traits_.counts_visible ? lanes : 0);
    if (traits_.table_by_distance) by_lane_ = take_relative(scratch, needs.table_rows, lanes);
    before_ = {scratch.take(needs.transformed * lanes), needs.transformed, lanes};
    transformed_ = scratch.take(needs.transformed * lanes);
  }

  // Reads the rows of a panel: queries [first, first + rows) of output head h.
  void load(Index b, Index h, Index first, Index rows) {
    batch_ = b;
    head_ = h;
    first_ = first;
    rows_ = rows;
    source_ = c_.op.normaliser.source(c_.geometry, h, map_);
    logits_ = c_.logits();
    c_.op.score.scalars(h, scalars_);
    scaled_.rows = source_.width;
    const Index lanes = c_.plan.lanes;
    if (traits_.has_transform) transform_rows();
    const Rows<Real> own = query_rows();
    const Real factor = c_.query_factor();
    if (rows <= kFewRows<Real>) copy_rows(own, factor, few_, source_.width);
    if (rows > kFewRows<Real> || c_.op.score.columns) {
      pack_lanes(own.data, own.stride, rows, source_.width, scaled_.data, lanes, factor);
      if constexpr (std::is_same_v<Real, float>)
        if (c_.in_bf16(rows))
          c_.pair_products->by_rows(scaled_.data, lanes, source_.width, lanes, paired_, lanes);
    }
    if (traits_.counts_visible)
      for (Index i = 0; i < lanes; ++i)
        visible_[i] = Real(i < rows ? c_.mask.count_visible(b, h, first + i) : 0);
    if (c_.keys.needs().any) derive(own);
  }

  [[nodiscard]] const Context& context() const { return c_; }
  [[nodiscard]] int map() const { return map_; }
  [[nodiscard]] const Source& source() const { return source_; }
  [[nodiscard]] const DerivedTiles<Real>& derived_tiles() const { return derived_; }
  // The table's products as pairs of lanes with a key read them.
  [[nodiscard]] const LaneTile<Real>& table_by_lane() const {
    return traits_.table_by_distance ? by_lane_ : derived_.table;
  }
  [[nodiscard]] const LaneTile<Real>& features() const { return features_; }
  // Keys that each query sees, [lanes]; null where the score does not count them.
  [[nodiscard]] const Real* visible() const { return traits_.counts_visible ? visible_ : nullptr; }
  // Projected rows times CallContext::projected_factor().
  [[nodiscard]] const LaneTile<Real>& projected() const { return projected_; }
  // Where the score has a transform, all rows are those behind it, but for before(), queries before it in lanes.
  [[nodiscard]] Rows<Real> query_rows() const {
    if (traits_.has_transform) return {transformed_, rows_, source_.width, source_.width};
    return stored_rows();
  }
  [[nodiscard]] const LaneTile<Real>& before() const { return before_; }
  [[nodiscard]] Rows<Real> key_rows(Index key, Index count) const {
    if (traits_.has_transform)
      return c_.keys.transformed(batch_, head_, map_, key, count, source_.width);
    return {c_.key.row(batch_, source_.kv_head, key) + source_.key_column, count, source_.width,
            c_.key.strides().row};
  }
  [[nodiscard]] Rows<Real> projected_keys(Index key, Index count) const {
    return c_.keys.projected(batch_, head_, map_, key, count);
  }

  // Scaled dot products of the keys of `place`, or sums over columns. `running_max` is raised to dot products if given, which it is
  // not for few queries and where pairs are skipped.
  void dots(const TilePlace& place, const LaneTile<Real>& out, Real* running_max = nullptr) const {
    if (const auto* columns = c_.op.score.columns)
      return for_strips(place, c_.plan.vectors, [&](const Strip& strip) {
        columns->sums(column_pairs(place, strip), strip.of(out));
      });
    const Rows<Real> k = key_rows(place.key, place.keys);
    if (rows_ <= kFewRows<Real>)
      return few_dots(k.data, k.stride, k.count, k.columns, few_, rows_, out.data, out.lanes,
                      dots_rows_);
    if constexpr (std::is_same_v<Real, float>)
      if (c_.in_bf16(rows_))
        return c_.bf16->dots(c_.bf16->key_columns[std::size_t(map_)], k, paired_, c_.plan.vectors,
                             out, running_max);
    if (running_max)
      panel_gemm(Store::overwrite_and_max, k.count, k.columns, c_.plan.vectors,
                 Broadcast<Real>{k.data, k.stride, 1}, scaled_.data, scaled_.lanes, out.data,
                 out.lanes, running_max);
    else
      tile_dots(place, c_.plan.vectors, k, scaled_, out);
  }
  // The pairs of a strip of a tile, for a score with columns.
  [[nodiscard]] ColumnPairs<Real> column_pairs(const TilePlace& place, const Strip& strip) const {
    return column_pairs(key_rows(place.key, place.keys))
        .part(strip.keys.begin, strip.keys.size(), strip.first_vector, strip.vectors);
  }
  // Projected dot products; nothing without a projection.
  void projected_dots(const TilePlace& place, const LaneTile<Real>& out) const {
    if (projected_.rows > 0)
      tile_dots(place, c_.plan.vectors, projected_keys(place.key, place.keys), projected_, out);
  }

  // p[0], p[1], ... of the head.
  [[nodiscard]] const Real* scalars() const { return scalars_; }
  // The pairs with the keys of `place`, which must outlive it, as the score sees them.
  [[nodiscard]] ScoreTile<Real> score_tile(const TilePlace& place, const LaneTile<Real>& dots,
                                           const LaneTile<Real>& projected,
                                           const LaneTile<Real>& scores = {},
                                           Real* running_max = nullptr) const {
    return {&place,
            c_.plan.vectors,
            c_.geometry.query_position(place.query),
            logits_,
            scalars_,
            features_,
            c_.keys.features(place.batch, place.head, map_, place.key),
            c_.keys.feature_stride(),
            dots,
            projected_.rows > 0 ? projected : LaneTile<Real>{},
            table_by_lane(),
            &c_.keys.positions(),
            scores,
            running_max};
  }

  // From dot products to masked scores, maximum included. `dots` may be `scores`.
  void scores(const TilePlace& place, TileKind kind, const LaneTile<Real>& dots,
              const LaneTile<Real>& projected, const LaneTile<Real>& scores,
              Real* running_max) const {
    const bool final_scores = masks_nothing(kind);
    if (!c_.plain() || dots.data != scores.data || final_scores)
      c_.op.score.scores(
          score_tile(place, dots, projected, scores, final_scores ? running_max : nullptr));
    if (final_scores) return;
    const TileMask<Real> tile_mask(c_.mask, place, c_.plan.vectors);
    if (c_.mask.has_slopes()) tile_mask.add_slopes(scores);
    if (c_.mask.has_bias()) tile_mask.add_bias(scores);
    if (kind == TileKind::partial) tile_mask.hide(scores);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      const KeyRange keys = place.keys_of(v);
      Pack<Real> top = Pack<Real>::load(running_max + v * kLanes<Real>);
      for (Index j = keys.begin; j < keys.end; ++j) top = max(scores.load(j, v), top);
      top.store(running_max + v * kLanes<Real>);
    }
    // Rows are read as a whole.
    if (!c_.op.streams()) fill_skipped(place, c_.plan.vectors, scores, -kInfinity<Real>);
  }

  // Query `lane` of a panel of few, times query_factor().
  [[nodiscard]] const Real* few_row(Index lane) const { return few_ + lane * source_.width; }
  // Dot products of the keys of `place`, as they are stored, with queries.
  void dot_keys(const TilePlace& place, std::span<const DotQuery<Real>> queries) const {
    if (const auto* columns = c_.op.score.columns) {
      const ColumnPairs<Real> pairs = column_pairs(key_rows(place.key, place.keys));
      for (const DotQuery<Real>& query : queries) columns->row_sums(query.query, pairs, query.dots);
      return;
    }
    if (traits_.has_transform) {
      const Rows<Real> k = key_rows(place.key, place.keys);
      return row_dots(StoredRows<Real>{k.data, k.stride}, k.count, k.columns, queries.data(),
                      Index(queries.size()));
    }
    const StoredView<const Real>& key = c_.in.key;
    const Index column = source_.key_column, width = source_.width, count = Index(queries.size());
    if (key.page_rows() == 1)
      return row_dots(ScatteredRows<Real>{key.plain().page_table() + place.key, column}, place.keys,
                      width, queries.data(), count);
    if (key.narrow())
      key.storage()->dots(key.rows(batch_, source_.kv_head, place.key), column, place.keys, width,
                          queries.data(), count);
    else
      row_dots(rows_of(key.plain(), batch_, source_.kv_head, place.key).from(0, column), place.keys,
               width, queries.data(), count);
  }

  // From scaled dot products of query `lane` of a panel of few with the keys of `place` to scores before any mask, in
  // place; `out` and `projected` have room for the keys in whole vectors. What stands behind the last key means nothing.
  void row_scores(const TilePlace& place, Index lane, Real* out, Real* projected) const {
    if (c_.plain()) return;
    const bool projects = projected_.rows > 0;
    if (projects) {
      const Rows<Real> p = projected_keys(place.key, place.keys);
      const DotQuery<Real> query{few_projected_ + lane * p.columns, projected};
      row_dots(StoredRows<Real>{p.data, p.stride}, p.count, p.columns, &query, 1);
    }
    c_.op.score.row_scores(
        {&place, lane, c_.geometry.query_position(place.query + lane), logits_, scalars_, features_,
         c_.keys.features(place.batch, place.head, map_, place.key), c_.keys.feature_stride(),
         projects ? projected : nullptr, derived_.table, &c_.keys.positions(), out});
  }

  // Dot products to scores in one go, in place, for forward.
  void tile_scores(const TilePlace& place, TileKind kind, const LaneTile<Real>& out,
                   const LaneTile<Real>& projected, Real* running_max) const {
    const bool untouched = c_.plain() && masks_nothing(kind) && rows_ > kFewRows<Real>;
    dots(place, out, untouched ? running_max : nullptr);
    if (untouched) return;
    projected_dots(place, projected);
    scores(place, kind, out, projected, out, running_max);
  }
  // The same where the score's derivatives are asked for afterwards: its dot products stay, but for a plain score.
  void tile_scores(const TilePlace& place, TileKind kind, const LaneTile<Real>& dots,
                   const LaneTile<Real>& projected, const LaneTile<Real>& scores,
                   Real* running_max) const {
    if (c_.plain()) return tile_scores(place, kind, scores, projected, running_max);
    this->dots(place, dots);
    projected_dots(place, projected);
    this->scores(place, kind, dots, projected, scores, running_max);
  }

 private:
  [[nodiscard]] ColumnPairs<Real> column_pairs(const Rows<Real>& keys) const {
    return {{scaled_, {}},
            c_.plan.vectors,
            {keys.data, nullptr},
            {keys.stride, 0},
            keys.count,
            keys.columns,
            {c_.op.score.columns->weights(head_), nullptr}};
  }
  [[nodiscard]] Rows<Real> stored_rows() const {
    return {c_.in.query.row(batch_, source_.query_head, first_) + source_.query_column, rows_,
            source_.width, c_.in.query.strides().row};
  }
  void transform_rows() {
    const Rows<Real> rows = stored_rows();
    before_.rows = derived_.x.rows = rows.columns;
    pack_lanes(rows.data, rows.stride, rows.count, rows.columns, before_.data, before_.lanes);
    std::copy_n(before_.data, rows.columns * before_.lanes, derived_.x.data);
    c_.op.score.transform(RowSide::query, head_, c_.geometry.query_position(first_),
                          c_.plan.vectors, derived_.x);
    unpack_lanes(derived_.x.data, derived_.x.lanes, rows.count, rows.columns, transformed_,
                 rows.columns);
  }

  // What the score derives of the rows.
  void derive(const Rows<Real>& rows) {
    const Index lanes = c_.plan.lanes;
    derived_.x.rows = source_.width;
    pack_lanes(rows.data, rows.stride, rows.count, source_.width, derived_.x.data, lanes);
    detail::load_inputs(c_.in.query_inputs, c_.geometry, {batch_, head_, first_, rows.count},
                        derived_.input);
    derived_.derive(c_.op.score.projection, c_.keys.tables(head_), c_.plan.vectors);
    if (traits_.table_by_distance) lay_out_by_lane(derived_.table, c_.plan.vectors, by_lane_);
    for (int v = 0; v < c_.plan.vectors; ++v)
      for (Index r = 0; r < projected_.rows; ++r)
        projected_.store(r, v, derived_.projected.load(r, v) * c_.projected_factor());
    if (rows.count <= kFewRows<Real>)
      unpack_lanes(projected_.data, lanes, rows.count, projected_.rows, few_projected_,
                   projected_.rows);
    if (traits_.query_features > 0)
      c_.op.score.features(RowSide::query, derived_, head_, c_.geometry.query_position(first_),
                           visible(), c_.plan.vectors, features_);
  }

  // Are the scores of such a tile final once the op has given them?
  [[nodiscard]] bool masks_nothing(TileKind kind) const {
    return kind == TileKind::full && !c_.mask.has_bias() && !c_.mask.has_slopes();
  }

  const Context& c_;
  const ScoreTraits& traits_;
  int map_;
  Index batch_ = 0, head_ = 0, first_ = 0, rows_ = 0;
  Source source_;
  LogitFactors<Real> logits_;
  Real* scalars_;          // p[0], p[1], ... of the head
  LaneTile<Real> scaled_;  // transposed rows times query_factor(), unless queries are few
  BfloatPair* paired_;     // the same in pairs of rows, where precision is mixed
  LaneTile<Real> features_, projected_;
  // For few queries: scaled rows [rows][width], projected rows [rows][rank], dots [rows][keys].
  Real *few_, *few_projected_, *dots_rows_;
  Real* visible_;           // [lanes]: keys that each query sees, where the score counts them
  LaneTile<Real> by_lane_;  // of a table by distance (engine/relative_rows.hpp)
  LaneTile<Real> before_;   // of a score with a transform: rows before it,
  Real* transformed_;       // and behind it, [rows][width]
  DerivedTiles<Real> derived_;
};

}  // namespace HEED_ABI
}  // namespace heed
