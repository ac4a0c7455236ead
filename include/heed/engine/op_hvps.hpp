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

  // What a vector's keys add to the features of its queries and to the score's scalars.
  struct Sums {
    std::array<P, std::size_t(Score::query_features)> features{}, feature_tangents{};
    std::array<P, std::size_t(scalars_of<Score>)> scalar_tangents{};

    void add(const PairOf<Score, Moved>& d, const ScalarsOf<Score, Moved>& dp,
             typename P::Mask none) {
      for (std::size_t i = 0; i < features.size(); ++i) {
        features[i] += zero_where(none, d.query[i].value);
        feature_tangents[i] += zero_where(none, tangent_of<Real>(d.query[i]));
      }
      for (std::size_t i = 0; i < scalar_tangents.size(); ++i)
        scalar_tangents[i] += zero_where(none, tangent_of<Real>(dp[i]));
    }
    void write(const ScoreTile<Real>& tile, const DualScoreBack<Real>& back, int v) {
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

  // Invariant: behind key j, `sums` holds what the vector's keys up to j give, and the dscores of these are those of the dots.
  [[gnu::noinline, gnu::flatten]] void run_vector(const Score& score, ScoreTile<Real> tile,
                                                  ScoreTangentTile<Real> moved,
                                                  DualScoreBack<Real> back, int v) const {
    const auto p =
        dual_packs(scalars_in_lanes<Score>(tile.scalars), scalars_in_lanes<Score>(moved.scalars));
    const Moved logit_part = P(back.logit_part);
    const LanePairs<Score, Real> pairs(tile, v);
    const PairTangents<Score, Real> pair_tangents(tile, moved, v);
    const KeyRange keys = tile.place->keys_of(v);
    Sums sums;
    for (Index j = keys.begin; j < keys.end; ++j) {
      const PairOf<Score, P> pair = pairs(j, tile.dots.load(j, v));
      const PairOf<Score, Moved> both =
          dual_pair<Score, Real>(pair, pair_tangents(j, moved.tangents.load(j, v), pair, pairs));
      PairOf<Score, Moved> d{};
      ScalarsOf<Score, Moved> dp{};
      differentiate_score<Score>(score, both, p, back.dscores.load(j, v), d, dp);
      d.logit = before_cap(tile.logits, both.logit, d.logit);
      auto none = P(Real(0)) != P(Real(0));
      if (back.hidden.data) none = is_hidden(back.hidden.load(j, v));
      back.dscores.store(j, v, zero_where(none, d.logit * logit_part + d.dot));
      sums.add(d, dp, none);
      add_key_side(d, none, pairs, *tile.place, back, j, v);
    }
    sums.write(tile, back, v);
  }

  // Adds the gradients of what the pair has of key j, of a table and of its positions.
  static void add_key_side(const PairOf<Score, Moved>& d, typename P::Mask none,
                           const LanePairs<Score, Real>& pairs, const TilePlace& place,
                           const DualScoreBack<Real>& back, Index j, int v) {
    const auto add = [&](Real* to, const P& x) { (P::load(to) + zero_where(none, x)).store(to); };
    for (int i = 0; i < kFeatures; ++i) {
      const Index cell = (i * place.keys + j) * kLanes<Real>;
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
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
