// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward over backward of a score of any type as the engine sees it (hvps.hpp): all that hvp() compiles for a further op.
//
//   features f(x)       dx += df . df/dx         by the features' vjp on dual numbers
//   transform t(x)      dx  = dt . dt/dx         by the transform's vjp on dual numbers
//   score s(x, p)       d.x = g ds/dx            by its score_vjp on dual numbers, or by dual numbers of dual numbers
//   D = d.logit keep (1 - (logit/cap)^2) + d.dot             dL/d(q.k) over CallContext::row_factor(), and its tangent

#include <heed/engine/hvps.hpp>
#include <heed/engine/op_jvps.hpp>
#include <heed/engine/op_vjps.hpp>

#include <array>
#include <memory>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Score, class Real>
class ScoreHvpsOf final
    : public RowVjpsOf<ScoreHvps<Real>, Score, TransformScore<Score, Real>, Real, DualLanes<Real>> {
 public:
  static constexpr int kFeatures = Score::key_features;

  // jvps: of the score and of the direction of its parameters.
  ScoreHvpsOf(const Score& score, const Score& direction, const ScoreJvpsOf<Score, Real>& jvps)
      : RowVjpsOf<ScoreHvps<Real>, Score, TransformScore<Score, Real>, Real, DualLanes<Real>>(
            score, direction, jvps.transform_score()) {}

  void scores_vjp(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved,
                  const DualScoreBack<Real>& back) const override {
    const Index cells = kFeatures * tile.place->keys * kLanes<Real>;
    std::fill_n(back.key_lanes, cells, Real(0));
    std::fill_n(back.key_tangent_lanes, cells, Real(0));
    for (int v = 0; v < tile.vectors; ++v) run_vector(this->score_, tile, moved, back, v);
  }
  DualNumber slope([[maybe_unused]] const DualNumber& x) const override {
    if constexpr (sums_inputs<Score>)
      return this->score_.summand(Dual<DualNumber, 1>::variable(x)).grad[0];
    else
      return {};
  }

 private:
  using P = Pack<Real>;
  using Moved = DualPack<Real>;

  // Invariant: behind key j, the sums hold what the vector's keys up to j give, and the dscores of these are those of the dots.
  [[gnu::noinline, gnu::flatten]] void run_vector(const Score& score, ScoreTile<Real> tile,
                                                  ScoreTangentTile<Real> moved,
                                                  DualScoreBack<Real> back, int v) const {
    const auto p =
        dual_packs(scalars_in_lanes<Score>(tile.scalars), scalars_in_lanes<Score>(moved.scalars));
    const P cap = tile.logits.cap, logit_part = back.logit_part;
    const LanePairs<Score, Real> pairs(tile, v);
    const PairTangents<Score, Real> pair_tangents(tile, moved, v);
    const TilePlace& place = *tile.place;
    const KeyRange keys = place.keys_of(v);
    std::array<P, std::size_t(Score::query_features)> features{}, feature_tangents{};
    std::array<P, std::size_t(scalars_of<Score>)> scalar_tangents{};
    for (Index j = keys.begin; j < keys.end; ++j) {
      const PairOf<Score, P> pair = pairs(j, tile.dots.load(j, v));
      const PairOf<Score, P> tangent = pair_tangents(j, moved.tangents.load(j, v), pair, pairs);
      PairOf<Score, Moved> both, d{};
      Directions<Score>::for_each_field(
          [&](auto, Moved& to, const P& a, const P& b) { to = dual_pack(a, b); }, both, pair,
          tangent);
      both.query_index = Moved(pair.query_index);
      both.key_index = Moved(pair.key_index);
      ScalarsOf<Score, Moved> dp{};
      const Moved g = back.dscores.load(j, v);
      differentiate_score<Score>(score, both, p, g, d, dp);
      if (tile.logits.cap != Real(0)) {
        // logit = cap tanh(x / cap):  dx = dlogit (1 - (logit / cap)^2)
        const Moved saturation = both.logit / Moved(cap);
        d.logit = d.logit * (Moved(P(Real(1))) - saturation * saturation);
      }
      auto none = P(Real(0)) != P(Real(0));
      if (back.hidden.data) none = is_hidden(back.hidden.load(j, v));
      back.dscores.store(j, v, zero_where(none, d.logit * Moved(logit_part) + d.dot));
      for (std::size_t i = 0; i < features.size(); ++i) {
        features[i] += zero_where(none, d.query[i].value);
        feature_tangents[i] += zero_where(none, tangent_of<Real>(d.query[i]));
      }
      for (std::size_t i = 0; i < scalar_tangents.size(); ++i)
        scalar_tangents[i] += zero_where(none, tangent_of<Real>(dp[i]));
      for (int i = 0; i < kFeatures; ++i) {
        const Index cell = (i * place.keys + j) * kLanes<Real>;
        const auto add = [&](Real* to, P x) { (P::load(to) + zero_where(none, x)).store(to); };
        add(back.key_lanes + cell, d.key[std::size_t(i)].value);
        add(back.key_tangent_lanes + cell, tangent_of<Real>(d.key[std::size_t(i)]));
      }
      if constexpr (table_by_distance<Score>)
        back.dtable.add(pairs.place_of(j), v, zero_where(none, d.table));
      if constexpr (Score::has_positions)
        back.position_tangents->template add<buckets_by_distance<Score>>(
            place.query + v * kLanes<Real>, place.key + j,
            zero_where(none, tangent_of<Real>(d.position)));
    }
    if constexpr (normed_dots<Score>) {
      features[0] *= tile.logits.feature;
      feature_tangents[0] *= tile.logits.feature;
    }
    for (std::size_t i = 0; i < features.size(); ++i)
      back.dfeatures.add(Index(i), v, dual_pack(features[i], feature_tangents[i]));
    for (std::size_t i = 0; i < scalar_tangents.size(); ++i)
      back.dscalar_tangents.add(Index(i), v, scalar_tangents[i]);
  }
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
