// SPDX-License-Identifier: Apache-2.0
#pragma once

// The query side of a panel: transposed rows, side values, and the scores of a tile of keys.

#include <heed/engine/tile/hidden_pairs.hpp>
#include <heed/engine/tile/pairs.hpp>
#include <heed/plug/derivative.hpp>
#include <heed/plug/feature_calls.hpp>

#include <span>

namespace heed {
inline namespace HEED_ABI {

// One score map of a panel: query rows of one head.
template <class Op, class Real>
class QuerySide {
 public:
  using Score = typename Op::ScoreType;
  using Needs = SideNeeds<Op>;
  using Context = CallContext<Op, Real>;
  static constexpr int kQueryFeatures = Score::query_features;

  QuerySide(const Context& c, Scratch<Real>& scratch, int map) : c_(c), map_(map) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    scaled_ = {scratch.take(width * lanes), width, lanes};
    paired_ = take_pairs(scratch, c.pair_products, pairs_of(width) * lanes);
    narrow_ = scratch.take(kNarrowRows<Real> * width);
    narrow_projected_ = scratch.take(kNarrowRows<Real> * c.keys.needs().rank);
    dots_rows_ = scratch.take(kNarrowRows<Real> * whole_vectors<Real>(c.plan.tile));
    features_ = {scratch.take(kQueryFeatures * lanes), kQueryFeatures, lanes};
    const auto& needs = c.keys.needs();
    if constexpr (Needs::any)
      side_ = SideTiles<Real>::take(scratch, width, needs.rank, needs.table_rows,
                                    query_row_inputs<Score>, lanes);
    projected_ = {scratch.take(needs.rank * lanes), needs.rank, lanes};
    visible_ = scratch.take(Score::counts_visible ? lanes : 0);
    if constexpr (table_by_distance<Score>)
      by_lane_ = take_relative(scratch, needs.table_rows, lanes);
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
    for (int i = 0; i < scalars_of<Score>; ++i)
      scalars_[std::size_t(i)] = scalar_of<Real>(c_.op.score, i, h);
    scaled_.rows = source_.width;
    const Index lanes = c_.plan.lanes;
    if constexpr (Score::has_transform) transform_rows();
    const Rows<Real> own = query_rows();
    const Real* row = own.data;
    const Index stride = own.stride;
    if (rows <= kNarrowRows<Real>) {
      for (Index i = 0; i < rows; ++i)
        for (Index col = 0; col < source_.width; ++col)
          narrow_[i * source_.width + col] = c_.query_factor() * row[i * stride + col];
    } else {
      pack_lanes(row, stride, rows, source_.width, scaled_.data, lanes, c_.query_factor());
      if constexpr (std::is_same_v<Real, float>)
        if (c_.mixes(rows))
          c_.pair_products->by_rows(scaled_.data, lanes, source_.width, lanes, paired_, lanes);
    }
    if constexpr (Score::counts_visible)
      for (Index i = 0; i < lanes; ++i)
        visible_[i] = Real(i < rows ? c_.mask.count_visible(b, h, first + i) : 0);
    if constexpr (Needs::any) {
      side_.x.rows = source_.width;
      pack_lanes(row, stride, rows, source_.width, side_.x.data, lanes);
      if constexpr (query_row_inputs < Score >> 0) {
        const TensorView<const Real>& inputs = c_.in.query_inputs;
        pack_lanes(detail::input_row(inputs, c_.geometry, b, h, first), inputs.strides().row, rows,
                   query_row_inputs<Score>, side_.input.data, lanes);
      }
      side_.derive(c_.op.score, c_.keys.table(h), c_.plan.vectors);
      if constexpr (table_by_distance<Score>)
        lay_out_by_lane(side_.table, c_.plan.vectors, by_lane_);
      for (int v = 0; v < c_.plan.vectors; ++v)
        for (Index r = 0; r < projected_.rows; ++r)
          projected_.store(r, v, side_.projected.load(r, v) * c_.projected_factor());
      if (rows <= kNarrowRows<Real>)
        unpack_lanes(projected_.data, lanes, rows, projected_.rows, narrow_projected_,
                     projected_.rows);
      for (int v = 0; v < c_.plan.vectors; ++v) {
        Pack<Real> f[std::size_t(kQueryFeatures + 1)];
        detail::features_of<detail::OfQueries>(c_.op.score, lane_row(v), scalars(), f);
        for (int i = 0; i < kQueryFeatures; ++i) features_.store(i, v, f[i]);
      }
    }
  }

  [[nodiscard]] const Context& context() const { return c_; }
  [[nodiscard]] int map() const { return map_; }
  [[nodiscard]] const Source& source() const { return source_; }
  [[nodiscard]] const SideTiles<Real>& side_tiles() const { return side_; }
  // The table's products as pairs of lanes with a key read them.
  [[nodiscard]] const LaneTile<Real>& table_by_lane() const {
    if constexpr (table_by_distance<Score>) return by_lane_;
    return side_.table;
  }
  [[nodiscard]] const LaneTile<Real>& features() const { return features_; }
  // Vector v of the queries, as the score's feature functions see them.
  [[nodiscard]] LaneRow<Real> lane_row(int v) const {
    const Index first = c_.geometry.query_position(first_);
    if constexpr (Score::counts_visible)
      return side_.row(v, first, Pack<Real>::load(visible_ + v * kLanes<Real>));
    return side_.row(v, first);
  }
  // Projected rows times CallContext::projected_factor().
  [[nodiscard]] const LaneTile<Real>& projected() const { return projected_; }
  // Where the score has a transform, all rows are those behind it, but for before(), queries before it in lanes.
  [[nodiscard]] Rows<Real> query_rows() const {
    if constexpr (Score::has_transform) return {transformed_, rows_, source_.width, source_.width};
    return stored_rows();
  }
  [[nodiscard]] const LaneTile<Real>& before() const { return before_; }
  [[nodiscard]] Rows<Real> key_rows(Index key, Index count) const {
    if constexpr (Score::has_transform)
      return c_.keys.transformed(batch_, head_, map_, key, count, source_.width);
    return {c_.key.row(batch_, source_.kv_head, key) + source_.key_column, count, source_.width,
            c_.key.strides().row};
  }
  [[nodiscard]] Rows<Real> projected_keys(Index key, Index count) const {
    return c_.keys.projected(batch_, head_, map_, key, count);
  }

  // scaled dot products of the keys of `place`; `running_max` is raised to them if given, which it is not for narrow
  // panels and where pairs are skipped.
  void dots(const TilePlace& place, const LaneTile<Real>& out, Real* running_max = nullptr) const {
    const Rows<Real> k = key_rows(place.key, place.keys);
    if (rows_ <= kNarrowRows<Real>)
      return narrow_dots(k.data, k.stride, k.count, k.columns, narrow_, rows_, out.data, out.lanes,
                         dots_rows_);
    if constexpr (std::is_same_v<Real, float>)
      if (c_.mixes(rows_))
        return c_.mixed->dots(c_.mixed->key_columns[std::size_t(map_)], k, paired_, c_.plan.vectors,
                              out, running_max);
    if (running_max)
      panel_gemm<Store::overwrite_and_max>(k.count, k.columns, c_.plan.vectors,
                                           Broadcast<Real>{k.data, k.stride, 1}, scaled_.data,
                                           scaled_.lanes, out.data, out.lanes, running_max);
    else
      strip_dots(place, k, scaled_, out);
  }
  // Projected dot products; nothing without a projection.
  void projected_dots(const TilePlace& place, const LaneTile<Real>& out) const {
    if constexpr (Score::has_projection) {
      if (projected_.rows == 0) return;
      strip_dots(place, projected_keys(place.key, place.keys), projected_, out);
    }
  }

  // The numbers of the head that score() reads, in every lane.
  [[nodiscard]] ScalarsOf<Score, Pack<Real>> scalars() const {
    ScalarsOf<Score, Pack<Real>> p;
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = Pack<Real>(scalars_[i]);
    return p;
  }

  // From dot products to masked scores, maximum included. `dots` may be `scores`.
  void scores(const TilePlace& place, TileKind kind, const LaneTile<Real>& dots,
              const LaneTile<Real>& projected, const LaneTile<Real>& scores,
              Real* running_max) const {
    score_pass(place, dots, projected, scores, running_max, masks_nothing(kind));
    if (masks_nothing(kind)) return;
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
    if constexpr (!Op::NormaliserType::streams)
      fill_skipped(place, c_.plan.vectors, scores, -kInfinity<Real>);
  }

  // Query `lane` of a narrow panel, times query_factor().
  [[nodiscard]] const Real* narrow_row(Index lane) const { return narrow_ + lane * source_.width; }
  // Dot products of the keys of `place`, as they are stored, with queries.
  void dot_keys(const TilePlace& place, std::span<const DotQuery<Real>> queries) const {
    if constexpr (Score::has_transform) {
      const Rows<Real> k = key_rows(place.key, place.keys);
      return row_dots(StoredRows<Real>{k.data, k.stride}, k.count, k.columns, queries.data(),
                      Index(queries.size()));
    }
    const StoredView<const Real>& key = c_.in.key;
    const Index column = source_.key_column, width = source_.width, count = Index(queries.size());
    if (key.narrow())
      key.storage()->dots(key.rows(batch_, source_.kv_head, place.key), column, place.keys, width,
                          queries.data(), count);
    else
      row_dots(rows_of(key.plain(), batch_, source_.kv_head, place.key).from(0, column), place.keys,
               width, queries.data(), count);
  }

  // From scaled dot products of query `lane` of a narrow panel with the keys of `place` to scores before any mask, in
  // place; `out` and `projected` have room for the keys in whole vectors. What stands behind the last key means nothing.
  void row_scores(const TilePlace& place, Index lane, Real* out, Real* projected) const {
    if (c_.plain()) return;
    if constexpr (Score::has_projection)
      if (side_.projected.rows > 0) {
        const Rows<Real> p = projected_keys(place.key, place.keys);
        const DotQuery<Real> query{narrow_projected_ + lane * p.columns, projected};
        row_dots(StoredRows<Real>{p.data, p.stride}, p.count, p.columns, &query, 1);
      }
    Score::with_form(c_.op.score, [&](const auto& form) {
      HeldForm<std::remove_cvref_t<decltype(form)>> own = form;
      const auto p = scalars();
      const RowPairs<Op, Real> pairs(*this, place, lane, projected);
      for (Index j = 0; j < place.keys; j += kLanes<Real>)
        own.score(pairs(j, Pack<Real>::load(out + j)), p).store(out + j);
    });
  }

  // Dot products to scores in one go, in place, for forward.
  void tile_scores(const TilePlace& place, TileKind kind, const LaneTile<Real>& out,
                   const LaneTile<Real>& projected, Real* running_max) const {
    const bool untouched = c_.plain() && masks_nothing(kind) && rows_ > kNarrowRows<Real>;
    dots(place, out, untouched ? running_max : nullptr);
    if (untouched) return;
    projected_dots(place, projected);
    scores(place, kind, out, projected, out, running_max);
  }

 private:
  [[nodiscard]] Rows<Real> stored_rows() const {
    return {c_.in.query.row(batch_, source_.query_head, first_) + source_.query_column, rows_,
            source_.width, c_.in.query.strides().row};
  }
  void transform_rows() {
    const Rows<Real> rows = stored_rows();
    before_.rows = side_.x.rows = rows.columns;
    pack_lanes(rows.data, rows.stride, rows.count, rows.columns, before_.data, before_.lanes);
    std::copy_n(before_.data, rows.columns * before_.lanes, side_.x.data);
    side_.transform(c_.op.score, RowSide::query, head_, c_.geometry.query_position(first_),
                    c_.plan.vectors);
    unpack_lanes(side_.x.data, side_.x.lanes, rows.count, rows.columns, transformed_, rows.columns);
  }

  // out[key][lane] = keys . queries, for the pairs of the tile that are computed.
  void strip_dots(const TilePlace& place, const Rows<Real>& keys, const LaneTile<Real>& queries,
                  const LaneTile<Real>& out) const {
    for_strips(place, c_.plan.vectors, [&](const Strip& strip) {
      const Rows<Real> k = keys.part(strip.keys.begin, strip.keys.size());
      const LaneTile<Real> q = strip.lanes_of(queries), to = strip.of(out);
      panel_gemm<Store::overwrite>(k.count, k.columns, strip.vectors,
                                   Broadcast<Real>{k.data, k.stride, 1}, q.data, q.lanes, to.data,
                                   to.lanes);
    });
  }

  // Are the scores of such a tile final once the op has given them?
  [[nodiscard]] bool masks_nothing(TileKind kind) const {
    return kind == TileKind::full && !c_.mask.has_bias() && !c_.mask.has_slopes();
  }

  // With `final_scores`, running_max is raised to them on the way.
  void score_pass(const TilePlace& place, const LaneTile<Real>& dots,
                  const LaneTile<Real>& projected, const LaneTile<Real>& scores, Real* running_max,
                  bool final_scores) const {
    if (c_.plain() && dots.data == scores.data && !final_scores) return;
    Score::with_form(c_.op.score, [&](const auto& form) {
      for (int v = 0; v < c_.plan.vectors; ++v) {
        const Pack<Real> top = score_vector(form, place, v, dots, projected, scores);
        Real* largest = running_max + v * kLanes<Real>;
        if (final_scores) max(top, Pack<Real>::load(largest)).store(largest);
      }
    });
  }

  // Scores of one vector of lanes; returns the largest.
  template <class Form>
  [[nodiscard, gnu::noinline]] Pack<Real> score_vector(const Form& form, const TilePlace& place,
                                                       int v, LaneTile<Real> dots,
                                                       LaneTile<Real> projected,
                                                       LaneTile<Real> scores) const {
    HeldForm<Form> own = form;
    const auto p = scalars();
    const LanePairs<Op, Real> pairs(*this, place, v, projected);
    const KeyRange keys = place.keys_of(v);
    Pack<Real> top = -kInfinity<Real>;
    for (Index j = keys.begin; j < keys.end; ++j) {
      const Pack<Real> score = own.score(pairs(j, dots.load(j, v)), p);
      scores.store(j, v, score);
      top = max(score, top);
    }
    return top;
  }

  const Context& c_;
  int map_;
  Index batch_ = 0, head_ = 0, first_ = 0, rows_ = 0;
  Source source_;
  ScalarsOf<Score, Real> scalars_{};
  LaneTile<Real> scaled_;  // transposed rows times query_factor(), unless the panel is narrow
  BfloatPair* paired_;     // the same in pairs of rows, where precision is mixed
  LaneTile<Real> features_, projected_;
  // Of a narrow panel: scaled rows [rows][width], projected rows [rows][rank], dots [rows][keys].
  Real *narrow_, *narrow_projected_, *dots_rows_;
  Real* visible_;           // [lanes]: keys that each query sees, where the score counts them
  LaneTile<Real> by_lane_;  // of a table by distance (engine/relative_rows.hpp)
  LaneTile<Real> before_;   // of a score with a transform: rows before it,
  Real* transformed_;       // and behind it, [rows][width]
  SideTiles<Real> side_;
};

}  // namespace HEED_ABI
}  // namespace heed
