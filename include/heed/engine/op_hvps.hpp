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

template <class Real>
[[gnu::always_inline]] inline void add_moving(const MovingLanes<Real>& to, Index r, int v,
                                              const MovingPack<Real>& x) {
  to.value.add(r, v, x.value);
  to.tangent.add(r, v, tangent_of<Real>(x));
}

// Rows and their tangents as the feature functions of a score see them; see LaneRow.
template <class Real>
struct MovingRow {
  using Scalar = MovingPack<Real>;
  LaneRow<Real> row;
  SideTiles<Real> tangent;

  [[nodiscard]] Index dim() const { return row.dim(); }
  [[nodiscard]] Index rank() const { return 0; }
  [[nodiscard]] Index table_rows() const { return row.table_rows(); }
  [[nodiscard]] Scalar x(Index c) const {
    return moving_pack(row.x(c), tangent.x.load(c, row.vector));
  }
  [[nodiscard]] Scalar projected(Index) const { return {}; }
  [[nodiscard]] Scalar table(Index m) const {
    return moving_pack(row.table(m), tangent.table.load(m, row.vector));
  }
  [[nodiscard]] Scalar input(Index c) const {
    return moving_pack(row.input(c), tangent.input.load(c, row.vector));
  }
  [[nodiscard]] Scalar index() const { return Scalar(row.index()); }
  [[nodiscard]] Scalar visible() const { return Scalar(row.visible()); }
};
// Where the gradients of such rows are added.
template <class Real>
struct MovingRowGrad {
  const MovingSides<Real>& to;
  int vector;

  void add_x(Index c, const MovingPack<Real>& g) const { add_moving(to.x(), c, vector, g); }
  void add_projected(Index, const MovingPack<Real>&) const {}
  void add_table(Index m, const MovingPack<Real>& g) const {
    add_moving({to.value.table, to.tangent.table}, m, vector, g);
  }
  void add_input(Index c, const MovingPack<Real>& g) const {
    add_moving({to.value.input, to.tangent.input}, c, vector, g);
  }
};

// Sum over the rows of a vector, in every lane, of which `idle` ones and those from `count` on do not count.
template <class Real>
struct MovingLaneSum {
  decltype(Pack<Real>{} == Pack<Real>{}) idle;
  int vector;
  Index count;

  [[nodiscard]] MovingPack<Real> operator()(const MovingPack<Real>& terms) const {
    const auto sum = [&](Pack<Real> x) {
      return Pack<Real>(Real(sum_valid_lanes(zero_where(idle, x), vector, count)));
    };
    return moving_pack(sum(terms.value), sum(tangent_of<Real>(terms)));
  }
};

// lifted: the score over moving packs.
template <class Lifted, class Real>
class MovingGradientOf final : public MovingGradient<Real> {
 public:
  Lifted part;

  explicit MovingGradientOf(const Lifted& of) : part(of) { set_zero(); }
  void set_zero() override {
    visit_parameters(part, [](const char*, auto& param) { param.set_zero(); });
  }
  void add_tangents_to(double* sums) const override {
    visit_parameters(part, [&](const char*, const auto& param) {
      for (Index i = 0; i < param.size(); ++i)
        *sums++ += double(tangent_of<Real>(param[i]).lane(0));
    });
  }
};

template <class Score, class Real>
class ScoreHvpsOf final : public ScoreHvps<Real> {
 public:
  using P = Pack<Real>;
  using Moved = MovingPack<Real>;
  static constexpr int kFeatures = Score::key_features;

  // jvps: of the score and of the direction of its parameters.
  ScoreHvpsOf(const Score& score, const Score& direction, const ScoreJvpsOf<Score, Real>& jvps)
      : score_(score), direction_(direction), jvps_(jvps) {}

  void scores_vjp(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved,
                  const MovingBack<Real>& back) const override {
    const Index cells = kFeatures * tile.place->keys * kLanes<Real>;
    std::fill_n(back.key_lanes, cells, Real(0));
    std::fill_n(back.key_tangent_lanes, cells, Real(0));
    for (int v = 0; v < tile.vectors; ++v) run_vector(score_, tile, moved, back, v);
  }
  void features_vjp(RowSide side, const MovingSides<Real>& rows, Index h, Index first,
                    const Real* visible, int vectors, const MovingLanes<Real>& dfeatures,
                    const MovingSides<Real>& grads,
                    const LaneTile<Real>& dscalar_tangents) const override {
    const auto chain = [&]<class Rows>(Rows) {
      const ScalarsOf<Score, Moved> p =
          moving_scalars(lanes_of_scalars<Real>(score_, h), lanes_of_scalars<Real>(direction_, h));
      for (int v = 0; v < vectors; ++v) {
        const P seen = visible ? P::load(visible + v * kLanes<Real>) : P(Real(0));
        chain_features<Rows>({rows.value.row(v, first, seen), rows.tangent}, p, dfeatures, grads,
                             dscalar_tangents);
      }
    };
    if (side == RowSide::query)
      chain(OfQueries{});
    else
      chain(OfKeys{});
  }
  std::unique_ptr<MovingGradient<Real>> transform_gradient() const override {
    if constexpr (Score::has_transform) return std::make_unique<Gradient>(jvps_.transform_score());
    return nullptr;
  }
  void transform_vjp([[maybe_unused]] RowSide side, [[maybe_unused]] Index h,
                     [[maybe_unused]] Index first, [[maybe_unused]] Index count,
                     [[maybe_unused]] const MovingLanes<Real>& before,
                     [[maybe_unused]] const MovingLanes<Real>& work,
                     [[maybe_unused]] const MovingLanes<Real>& d,
                     [[maybe_unused]] MovingGradient<Real>& grad) const override {
    if constexpr (Score::has_transform)
      for (int v = 0; v * kLanes<Real> < count; ++v) {
        const P zero = Real(0), position = P::iota() + Real(first + v * kLanes<Real>);
        auto idle = zero == zero;
        for (Index c = 0; c < d.value.rows; ++c)
          idle = idle & (d.value.load(c, v) == zero) & (d.tangent.load(c, v) == zero);
        const MovingRowInPlace<Real> rows{work.value,
                                          work.tangent,
                                          v,
                                          position,
                                          before.value.constant(),
                                          before.tangent.constant()};
        rows.restore();
        jvps_.transform_score().transform_vjp(
            side, h, rows, MovingRowInPlace<Real>{d.value, d.tangent, v, position},
            MovingLaneSum<Real>{idle, v, count}, static_cast<Gradient&>(grad).part);
        for (const LaneTile<Real>& tile : {d.value, d.tangent})
          for (Index c = 0; c < tile.rows; ++c) tile.store(c, v, zero_where(idle, tile.load(c, v)));
      }
  }
  Moving slope([[maybe_unused]] const Moving& x) const override {
    if constexpr (sums_inputs<Score>)
      return score_.summand(Dual<Moving, 1>::variable(x)).grad[0];
    else
      return {};
  }

 private:
  using Gradient = MovingGradientOf<TransformScore<Score, Real>, Real>;

  // Numbers of a head that score() reads, with their tangents.
  [[nodiscard]] static ScalarsOf<Score, Moved> moving_scalars(const ScalarsOf<Score, P>& p,
                                                              const ScalarsOf<Score, P>& dp) {
    ScalarsOf<Score, Moved> both;
    for (std::size_t i = 0; i < p.size(); ++i) both[i] = moving_pack(p[i], dp[i]);
    return both;
  }

  template <class Rows>
  void chain_features(const MovingRow<Real>& row, const ScalarsOf<Score, Moved>& p,
                      const MovingLanes<Real>& dfeatures, const MovingSides<Real>& to,
                      const LaneTile<Real>& dscalar_tangents) const {
    constexpr int count = Rows::template count<Score>;
    const int v = row.row.vector;
    P df[std::size_t(count + 1)], tangents[std::size_t(count + 1)];
    Moved f[std::size_t(count + 1)], moving_df[std::size_t(count + 1)];
    for (int i = 0; i < count; ++i) {
      df[i] = dfeatures.value.load(i, v);
      tangents[i] = dfeatures.tangent.load(i, v);
      moving_df[i] = moving_pack(df[i], tangents[i]);
    }
    const auto idle = to.value.idle_lanes(df, count, v) & to.tangent.idle_lanes(tangents, count, v);
    features_of<Rows>(score_, row, p, f);
    ScalarsOf<Score, Moved> dp{};
    heed::detail::features_vjp<Rows>(score_, row, p, f, moving_df, MovingRowGrad<Real>{to, v}, dp);
    to.value.clear_lanes(idle, v);
    to.tangent.clear_lanes(idle, v);
    for (std::size_t i = 0; i < dp.size(); ++i)
      dscalar_tangents.add(Index(i), v, zero_where(idle, tangent_of<Real>(dp[i])));
  }

  // Invariant: behind key j, the sums hold what the vector's keys up to j give, and the dscores of these are those of the dots.
  [[gnu::noinline, gnu::flatten]] void run_vector(const Score& score, ScoreTile<Real> tile,
                                                  ScoreTangentTile<Real> moved,
                                                  MovingBack<Real> back, int v) const {
    const auto p = moving_scalars(scalars_in_lanes<Score>(tile.scalars),
                                  scalars_in_lanes<Score>(moved.scalars));
    const P cap = tile.logits.cap, logit_part = back.logit_part;
    const bool capped = tile.logits.cap != Real(0);
    const LanePairs<Score, Real> pairs(tile, v);
    const PairTangents<Score, Real> moving_pairs(tile, moved, v);
    const TilePlace& place = *tile.place;
    const KeyRange keys = place.keys_of(v);
    std::array<P, std::size_t(Score::query_features)> features{}, feature_tangents{};
    std::array<P, std::size_t(scalars_of<Score>)> scalar_tangents{};
    for (Index j = keys.begin; j < keys.end; ++j) {
      const PairOf<Score, P> pair = pairs(j, tile.dots.load(j, v));
      const PairOf<Score, P> tangent = moving_pairs(j, moved.tangents.load(j, v), pair, pairs);
      PairOf<Score, Moved> both, d{};
      Directions<Score>::for_each_field(
          [&](auto, Moved& to, const P& a, const P& b) { to = moving_pack(a, b); }, both, pair,
          tangent);
      both.query_index = Moved(pair.query_index);
      both.key_index = Moved(pair.key_index);
      ScalarsOf<Score, Moved> dp{};
      const Moved g = moving_pack(back.dscores.value.load(j, v), back.dscores.tangent.load(j, v));
      differentiate_score<Score>(score, both, p, g, d, dp);
      if (capped) {
        // logit = cap tanh(x / cap):  dx = dlogit (1 - (logit / cap)^2)
        const Moved saturation = both.logit / Moved(cap);
        d.logit = d.logit * (Moved(P(Real(1))) - saturation * saturation);
      }
      const Moved out = d.logit * Moved(logit_part) + d.dot;
      auto none = P(Real(0)) != P(Real(0));
      if (back.hidden.data) none = is_hidden(back.hidden.load(j, v));
      back.dscores.value.store(j, v, zero_where(none, out.value));
      back.dscores.tangent.store(j, v, zero_where(none, tangent_of<Real>(out)));
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
        add_moving(back.dtable, pairs.place_of(j), v,
                   moving_pack(zero_where(none, d.table.value),
                               zero_where(none, tangent_of<Real>(d.table))));
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
      add_moving(back.dfeatures, Index(i), v, moving_pack(features[i], feature_tangents[i]));
    for (std::size_t i = 0; i < scalar_tangents.size(); ++i)
      back.dscalar_tangents.add(Index(i), v, scalar_tangents[i]);
  }

  const Score &score_, &direction_;
  const ScoreJvpsOf<Score, Real>& jvps_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
