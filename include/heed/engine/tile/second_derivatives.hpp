// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tangent of what a tile's scores give back: tile/derivatives.hpp on dual numbers of one direction. With every number
// x of a pair moving by x. , g = dL/dscore and d.x = g dscore/dx from the score's own score_vjp, or from dual numbers of
// dual numbers through score():
//
//   D = d.logit keep (1 - (logit/cap)^2) + d.dot               dL/d(q.k) over CallContext::row_factor(), and its tangent
//
// and likewise the sums of d.query, d.key, d.table, d.position and dp.

#include <heed/engine/tile/moving_rows.hpp>
#include <heed/engine/tile/score_tangents.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// One tile of pairs, [keys][lanes] each.
template <class Real>
struct MovingTile {
  TilePlace place;
  LaneTile<Real> dots, dot_tangents;  // scaled dot products
  LaneTile<Real> marks;  // -infinity where a pair is hidden, else 0; empty: none is hidden
  LaneTile<Real> dscores, dscore_tangents;  // in: dL/dscore and its tangent; out: D and D.
  Real *key_lanes, *key_tangent_lanes;      // out, [key_features][keys][W]
};

// What a panel gathers over all tiles.
template <class Real>
struct MovingSums {
  MovingLanes<Real> features;      // [query_features][lanes]
  MovingLanes<Real> by_lane;       // of a table by distance, as pairs of lanes read it
  LaneTile<Real> scalar_tangents;  // [scalars][lanes]
};

template <class Op, class Real>
struct MovingChain {
  using Score = typename Op::ScoreType;
  using P = Pack<Real>;
  using Moved = MovingPack<Real>;
  static constexpr int kFeatures = Score::key_features;
  const Op& op;
  const CallContext<Real>& c;
  const QuerySide<Real>& query;
  const ScoreTangents<Op, Real>& tangents;
  const MovingSums<Real>& sums;
  PositionSums<Real>& positions;

  void run(const MovingTile<Real>& tile) const {
    const Index cells = kFeatures * tile.place.keys * kLanes<Real>;
    std::fill_n(tile.key_lanes, cells, Real(0));
    std::fill_n(tile.key_tangent_lanes, cells, Real(0));
    for (int v = 0; v < c.plan.vectors; ++v) run_vector(op.score, tile, v);
  }

  // Adds the lanes' sums to the key features' gradients, key_features numbers per key.
  static void add_key_features(const MovingTile<Real>& tile, const Real* lanes, Real* to) {
    for (int i = 0; i < kFeatures; ++i)
      for (Index j = 0; j < tile.place.keys; ++j)
        to[j * kFeatures + i] +=
            sum_lanes(P::load(lanes + (i * tile.place.keys + j) * kLanes<Real>));
  }

 private:
  [[gnu::noinline, gnu::flatten]] void run_vector(const Score& score, MovingTile<Real> tile,
                                                  int v) const {
    const auto p = scalars_in_lanes<Score>(query.scalars());
    const auto moving_p = moving_scalars<Score>(p, tangents.scalars());
    const P cap = c.mask.soft_cap(), logit_part = c.scale / c.row_factor();
    const bool capped = c.mask.soft_cap() != Real(0);
    const LanePairs<Score, Real> pairs(query.score_tile(tile.place, tile.dots, {}), v);
    const typename ScoreTangents<Op, Real>::Pairs moving_pairs(tangents, tile.place, v, {});
    const KeyRange keys = tile.place.keys_of(v);
    std::array<P, std::size_t(Score::query_features)> features{}, feature_tangents{};
    std::array<P, std::size_t(scalars_of<Score>)> scalar_tangents{};
    for (Index j = keys.begin; j < keys.end; ++j) {
      const PairOf<Score, P> pair = pairs(j, tile.dots.load(j, v));
      const PairOf<Score, P> moved = moving_pairs(j, tile.dot_tangents.load(j, v), pair);
      PairOf<Score, Moved> both, d{};
      Directions<Score>::for_each_field(
          [&](auto, Moved& to, const P& a, const P& b) { to = moving_pack(a, b); }, both, pair,
          moved);
      both.query_index = Moved(pair.query_index);
      both.key_index = Moved(pair.key_index);
      ScalarsOf<Score, Moved> dp{};
      const Moved g = moving_pack(tile.dscores.load(j, v), tile.dscore_tangents.load(j, v));
      differentiate_score<Score>(score, both, moving_p, g, d, dp);
      if (capped) {
        // logit = cap tanh(x / cap):  dx = dlogit (1 - (logit / cap)^2)
        const Moved saturation = both.logit / Moved(cap);
        d.logit = d.logit * (Moved(P(Real(1))) - saturation * saturation);
      }
      const Moved out = d.logit * Moved(logit_part) + d.dot;
      auto none = P(Real(0)) != P(Real(0));
      if (tile.marks.data) none = is_hidden(tile.marks.load(j, v));
      tile.dscores.store(j, v, zero_where(none, out.value));
      tile.dscore_tangents.store(j, v, zero_where(none, tangent_of<Real>(out)));
      for (std::size_t i = 0; i < features.size(); ++i) {
        features[i] += zero_where(none, d.query[i].value);
        feature_tangents[i] += zero_where(none, tangent_of<Real>(d.query[i]));
      }
      for (std::size_t i = 0; i < scalar_tangents.size(); ++i)
        scalar_tangents[i] += zero_where(none, tangent_of<Real>(dp[i]));
      for (int i = 0; i < kFeatures; ++i) {
        const Index cell = (i * tile.place.keys + j) * kLanes<Real>;
        const auto add = [&](Real* to, P x) { (P::load(to) + zero_where(none, x)).store(to); };
        add(tile.key_lanes + cell, d.key[std::size_t(i)].value);
        add(tile.key_tangent_lanes + cell, tangent_of<Real>(d.key[std::size_t(i)]));
      }
      if constexpr (table_by_distance<Score>)
        sums.by_lane.add(
            relative_place<Real>(op.score.table_clip(),
                                 c.geometry.query_position(tile.place.query + v * kLanes<Real>) -
                                     tile.place.key - j),
            v,
            moving_pack(zero_where(none, d.table.value),
                        zero_where(none, tangent_of<Real>(d.table))));
      if constexpr (Score::has_positions)
        positions.template add<buckets_by_distance<Score>>(tile.place.query + v * kLanes<Real>, tile.place.key + j,
                      zero_where(none, tangent_of<Real>(d.position)));
    }
    if constexpr (normed_dots<Score>) {
      features[0] *= c.feature_factor();
      feature_tangents[0] *= c.feature_factor();
    }
    for (std::size_t i = 0; i < features.size(); ++i)
      sums.features.add(Index(i), v, moving_pack(features[i], feature_tangents[i]));
    for (std::size_t i = 0; i < scalar_tangents.size(); ++i)
      sums.scalar_tangents.add(Index(i), v, scalar_tangents[i]);
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
