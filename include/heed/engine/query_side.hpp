// SPDX-License-Identifier: Apache-2.0
#pragma once

// The query side of a panel: transposed rows, side values, and the scores of a tile of keys.

#include <heed/engine/key_side.hpp>
#include <heed/engine/mask_tile.hpp>
#include <heed/engine/plan.hpp>

namespace heed::inline HEED_ABI {

// What all panels of a call read.
template <class Op, class T>
struct CallContext {
  const Op& op;
  Geometry geometry;
  const BoundMask<T>& mask;
  Inputs<T> in;
  Plan plan;
  T scale;
  const KeySide<Op, T>& keys;

  using Score = typename Op::ScoreType;
  // Transposed queries carry the scale, and a pair's raw dot product is recovered by its inverse; a scale
  // of 0 has none and multiplies the logit instead.
  [[nodiscard]] T query_factor() const { return scale != T(0) ? scale : T(1); }
  // Does the score pass have nothing to do?
  [[nodiscard]] bool plain() const {
    return Score::plain && mask.soft_cap() == T(0) && scale != T(0);
  }
};

// One score map of a panel: query rows of one head.
template <class Op, class T>
class QuerySide {
 public:
  using Score = typename Op::ScoreType;
  using Needs = SideNeeds<Op>;
  using Context = CallContext<Op, T>;
  static constexpr int kQueryFeatures = Score::query_features;

  [[nodiscard]] static Index elements(const Context& c) {
    const auto& needs = c.keys.needs();
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const Index side = Needs::any
                           ? SideTiles<T>::elements(width, needs.rank, needs.table_rows, lanes)
                           : 0;
    return side + Scratch<T>::padded(width * lanes) +
           Scratch<T>::padded(kQueryFeatures * lanes);
  }

  QuerySide(const Context& c, Scratch<T>& scratch, int map) : c_(c), map_(map) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    scaled_ = {scratch.take(width * lanes), width, lanes};
    features_ = {scratch.take(kQueryFeatures * lanes), kQueryFeatures, lanes};
    const auto& needs = c.keys.needs();
    if constexpr (Needs::any)
      side_ = SideTiles<T>::take(scratch, width, needs.rank, needs.table_rows, lanes);
  }

  // Reads the rows of a panel: queries [first, first + rows) of output head h.
  void load(Index b, Index h, Index first, Index rows) {
    batch_ = b;
    head_ = h;
    first_ = first;
    rows_ = rows;
    source_ = c_.op.normaliser.source(c_.geometry, h, map_);
    for (int i = 0; i < Score::scalars; ++i) scalars_[std::size_t(i)] = c_.op.score.scalar(i, h);
    scaled_.rows = source_.width;
    const T* row = query_rows();
    const Index stride = c_.in.query.strides().row, lanes = c_.plan.lanes;
    pack_lanes(row, stride, rows, source_.width, scaled_.data, lanes, c_.query_factor());
    if constexpr (Needs::any) {
      side_.x.rows = source_.width;
      pack_lanes(row, stride, rows, source_.width, side_.x.data, lanes);
      side_.derive(c_.op.score, c_.keys.table(h), c_.plan.vectors);
      for (int v = 0; v < c_.plan.vectors; ++v) {
        Pack<T> f[kQueryFeatures + 1];
        c_.op.score.query_features_of(side_.row(v), f);
        for (int i = 0; i < kQueryFeatures; ++i) features_.store(i, v, f[i]);
      }
    }
  }

  [[nodiscard]] const Source& source() const { return source_; }
  [[nodiscard]] const SideTiles<T>& side() const { return side_; }
  [[nodiscard]] const LaneTile<T>& features() const { return features_; }
  [[nodiscard]] const T* query_rows() const {
    return c_.in.query.row(batch_, source_.query_head, first_) + source_.query_column;
  }
  [[nodiscard]] Rows<T> key_rows(Index key, Index count) const {
    return {c_.in.key.row(batch_, source_.kv_head, key) + source_.key_column, count, source_.width,
            c_.in.key.strides().row};
  }
  [[nodiscard]] Rows<T> projected_keys(Index key, Index count) const {
    return c_.keys.projected(batch_, head_, map_, key, count);
  }

  // scaled dot products of the keys of `place`; `running_max` is raised to them if given.
  void dots(const TilePlace& place, const LaneTile<T>& out, T* running_max = nullptr) const {
    const Rows<T> k = key_rows(place.key, place.keys);
    const Broadcast<T> a{k.data, k.stride, 1};
    if (running_max)
      panel_gemm<Store::overwrite_and_max>(k.count, k.columns, c_.plan.vectors, a, scaled_.data,
                                           scaled_.lanes, out.data, out.lanes, running_max);
    else
      panel_gemm<Store::overwrite>(k.count, k.columns, c_.plan.vectors, a, scaled_.data,
                                   scaled_.lanes, out.data, out.lanes);
  }
  // Projected dot products; nothing without a projection.
  void projected_dots(const TilePlace& place, const LaneTile<T>& out) const {
    if constexpr (Score::has_projection) {
      if (side_.projected.rows == 0) return;
      const Rows<T> k = projected_keys(place.key, place.keys);
      panel_gemm<Store::overwrite>(k.count, k.columns, c_.plan.vectors,
                                   Broadcast<T>{k.data, k.stride, 1}, side_.projected.data,
                                   side_.projected.lanes, out.data, out.lanes);
    }
  }

  // The pair of lanes v and key j, from its dot products.
  [[nodiscard]] PairOf<Score, Pack<T>> pair(const TilePlace& place, Index j, int v, Pack<T> scaled_dot,
                                            const LaneTile<T>& projected) const {
    PairOf<Score, Pack<T>> pair;
    pair.logit = c_.scale != T(0) ? scaled_dot : scaled_dot * T(0);
    pair.dot = scaled_dot * (T(1) / c_.query_factor());
    const T cap = c_.mask.soft_cap();
    if (cap != T(0)) pair.logit = cap * math::tanh(pair.logit * (T(1) / cap));
    if constexpr (Score::has_projection)
      if (side_.projected.rows > 0) pair.projected = projected.load(j, v);
    const T* key = c_.keys.features(batch_, head_, map_, place.key + j);
    for (std::size_t i = 0; i < pair.key.size(); ++i) pair.key[i] = Pack<T>(key[i]);
    for (std::size_t i = 0; i < pair.query.size(); ++i) pair.query[i] = features_.load(Index(i), v);
    if constexpr (Score::has_table) pair.table = side_.table.load(Index(key[0]), v);
    pair.query_index = Pack<T>::iota() + T(place.query + v * kLanes<T>);
    pair.key_index = T(place.key + j);
    return pair;
  }
  [[nodiscard]] ScalarsOf<Score, Pack<T>> scalars() const {
    ScalarsOf<Score, Pack<T>> p;
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = Pack<T>(scalars_[i]);
    return p;
  }

  // From dot products to masked scores, maximum included. `dots` may be `scores`; `scratch` has room
  // for a tile (bias).
  void scores(const TilePlace& place, TileKind kind, const LaneTile<T>& dots,
              const LaneTile<T>& projected, const LaneTile<T>& scores, T* running_max,
              T* scratch) const {
    score_pass(place, dots, projected, scores);
    const TileMask<T> tile_mask(c_.mask, place, c_.plan.vectors);
    if (c_.mask.has_slopes()) tile_mask.add_slopes(scores);
    if (c_.mask.has_bias()) tile_mask.add_bias(scores, scratch);
    if (kind == TileKind::partial) tile_mask.hide(scores);
    for (int v = 0; v < c_.plan.vectors; ++v) {
      Pack<T> top = Pack<T>::load(running_max + v * kLanes<T>);
      for (Index j = 0; j < place.keys; ++j) top = max(scores.load(j, v), top);
      top.store(running_max + v * kLanes<T>);
    }
  }

  // Dot products to scores in one go, in place, for forward.
  void tile_scores(const TilePlace& place, TileKind kind, const LaneTile<T>& out,
                   const LaneTile<T>& projected, T* running_max, T* scratch) const {
    const bool untouched = c_.plain() && kind == TileKind::full && !c_.mask.has_bias() &&
                           !c_.mask.has_slopes();
    dots(place, out, untouched ? running_max : nullptr);
    if (untouched) return;
    projected_dots(place, projected);
    scores(place, kind, out, projected, out, running_max, scratch);
  }

 private:
  void score_pass(const TilePlace& place, const LaneTile<T>& dots, const LaneTile<T>& projected,
                  const LaneTile<T>& scores) const {
    if (c_.plain()) {
      if (dots.data != scores.data)
        std::copy(dots.data, dots.data + place.keys * dots.lanes, scores.data);
      return;
    }
    const auto p = scalars();
    for (int v = 0; v < c_.plan.vectors; ++v)
      for (Index j = 0; j < place.keys; ++j)
        scores.store(j, v, c_.op.score.score(pair(place, j, v, dots.load(j, v), projected), p));
  }

  const Context& c_;
  int map_;
  Index batch_ = 0, head_ = 0, first_ = 0, rows_ = 0;
  Source source_;
  ScalarsOf<Score, T> scalars_{};
  LaneTile<T> scaled_, features_;
  SideTiles<T> side_;
};

}  // namespace heed::inline HEED_ABI
