// SPDX-License-Identifier: Apache-2.0
#pragma once

// The tangents of a tile's scores, in forward mode. Of a pair with the fields x (dot, logit, features, entries) and the
// scalars p:
//
//   x.(scaled dot) = factor (q. k + q k.)
//   logit. = keep x. (1 - (logit/cap)^2)                   the second factor of a soft cap only
//   score. = sum_x (dscore/dx) x. + sum_i (dscore/dp_i) p._i + bias.
//
// by the score's own score_vjp with the seed 1, or by dual numbers of one direction through score().

#include <heed/engine/tangents.hpp>
#include <heed/engine/tile/scores.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The tangent of score(pair, p) along dpair and dp.
template <class Score, class Form, class S>
[[gnu::always_inline]] inline S score_tangent(const Form& form, const PairOf<Score, S>& pair,
                                              const ScalarsOf<Score, S>& p,
                                              const PairOf<Score, S>& dpair,
                                              const ScalarsOf<Score, S>& dp) {
  using At = Directions<Score>;
  if constexpr (HasScoreVjp<Score, S>) {
    PairOf<Score, S> slope{};
    ScalarsOf<Score, S> scalar_slope{};
    form.score_vjp(pair, p, math::constant<S>(1), slope, scalar_slope);
    S sum = math::constant<S>(0);
    At::for_each_field([&](auto, const S& a, const S& b) { sum += a * b; }, slope, dpair);
    for_directions<scalars_of<Score>>([&](auto i) { sum += scalar_slope[i] * dp[i]; });
    return sum;
  } else {
    using D = LaneDual<S, 1>;
    const auto lift = [](D & to, const S& value, const S& tangent) __attribute__((always_inline)) {
      to = D::template variable<0>(value);
      to.grad[0] = tangent;
    };
    PairOf<Score, D> lifted;
    At::for_each_field([&](auto, D& to, const S& a, const S& b) { lift(to, a, b); }, lifted, pair,
                       dpair);
    lifted.query_index = D(pair.query_index);
    lifted.key_index = D(pair.key_index);
    ScalarsOf<Score, D> scalars;
    for_directions<scalars_of<Score>>([&](auto i) { lift(scalars[i], p[i], dp[i]); });
    const D result = form.score(lifted, scalars);
    return result.moves[0] ? result.grad[0] : math::constant<S>(0);
  }
}

// One score map of a panel on its way forward: the tangents of its rows, and those of the scores of a tile of keys.
template <class Op, class Real>
class ScoreTangents {
 public:
  using Score = typename Op::ScoreType;
  using P = Pack<Real>;
  static constexpr int kQueryFeatures = Score::query_features;

  // `side`: the queries themselves, loaded before load() here.
  ScoreTangents(const Op& op, const CallContext<Real>& c, const TangentOperands<Real>& d,
                const KeyTangents<Op, Real>& keys, const Op& direction,
                const QuerySide<Real>& side, Scratch<Real>& scratch)
      : op_(op), c_(c), d_(d), keys_(keys), direction_(direction), side_(side) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto take = [&](Index rows) {
      return LaneTile<Real>{scratch.take(rows * lanes), rows, lanes};
    };
    query_ = take(width);
    tangent_ = take(width);
    features_ = take(kQueryFeatures);
    if (c_.keys.needs().any) {
      const auto& needs = c.keys.needs();
      side_tangents_ = SideTiles<Real>::take(scratch, width, needs.rank, needs.table_rows,
                                             query_row_inputs<Score>, lanes);
      if constexpr (table_by_distance<Score>)
        by_lane_ = take_relative(scratch, needs.table_rows, lanes);
    }
  }

  // Reads the panel at `place`.
  void load(const TilePlace& place) {
    const Source& source = side_.source();
    for (int i = 0; i < scalars_of<Score>; ++i)
      scalars_[std::size_t(i)] = P(scalar_of<Real>(direction_.score, i, place.head));
    const auto pack_tangents = [&](const LaneTile<Real>& to, Real factor) {
      if (d_.query.given())
        pack_lanes(d_.query.row(place.batch, source.query_head, place.query) + source.query_column,
                   d_.query.strides().row, place.rows, source.width, to.data, to.lanes, factor);
      else
        to.fill(Real(0));
    };
    query_.rows = tangent_.rows = source.width;
    pack_tangents(tangent_, c_.query_factor());
    if (c_.keys.needs().any) {
      side_tangents_.x.rows = source.width;
      pack_tangents(side_tangents_.x, Real(1));
    }
    if constexpr (Score::has_transform) {
      std::copy_n(side_.before().data, source.width * query_.lanes, query_.data);
      keys_.transform().run(RowSide::query, place.head, c_.geometry.query_position(place.query),
                            c_.plan.vectors, query_, side_tangents_.x);
      for (Index col = 0; col < source.width; ++col)
        for (int v = 0; v < c_.plan.vectors; ++v)
          tangent_.store(col, v, side_tangents_.x.load(col, v) * c_.query_factor());
    }
    const Rows<Real> own = side_.query_rows();
    pack_lanes(own.data, own.stride, own.count, own.columns, query_.data, query_.lanes,
               c_.query_factor());
    if (c_.keys.needs().any) {
      load_inputs(d_.query_inputs, c_.geometry, {place.batch, place.head, place.query, place.rows},
                  side_tangents_.input);
      derive_tangents(c_.op.score.projection, c_.keys.table(place.head), keys_.table(place.head),
                      side_.side_tiles(), side_tangents_, c_.plan.vectors);
      if constexpr (table_by_distance<Score>)
        lay_out_by_lane(side_tangents_.table, c_.plan.vectors, by_lane_);
      for (int v = 0; v < c_.plan.vectors; ++v) {
        P f[std::size_t(kQueryFeatures + 1)], tangents[std::size_t(kQueryFeatures + 1)];
        for (int i = 0; i < kQueryFeatures; ++i) f[i] = side_.features().load(i, v);
        feature_tangents<OfQueries>(op_.score, side_.lane_row(v), side_tangents_,
                                    scalars_in_lanes<Score>(side_.scalars()), scalars_, f,
                                    tangents);
        for (int i = 0; i < kQueryFeatures; ++i) features_.store(i, v, tangents[i]);
        for (Index r = 0; r < side_tangents_.projected.rows; ++r)
          side_tangents_.projected.store(
              r, v, side_tangents_.projected.load(r, v) * c_.projected_factor());
      }
    }
  }

  // Tangents of scaled dot products, and of projected ones.
  void dots(const TilePlace& place, const LaneTile<Real>& out,
            const LaneTile<Real>& projected) const {
    product(place, side_.key_rows(place.key, place.keys), key_tangents(place), tangent_, query_,
            out);
    if constexpr (Score::has_projection)
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
      Score::with_form(op_.score, [&](const auto& form) {
        for (int v = 0; v < c_.plan.vectors; ++v)
          score_vector(form, place, v, dots, projected, projected_tangents, tangents);
      });
    if (d_.bias.given()) add_bias(place, tangents, scratch);
  }

  // The fields of pairs of vector v with one key after the other, as they move.
  class Pairs {
   public:
    Pairs(const ScoreTangents& of, const TilePlace& place, int v,
          const LaneTile<Real>& projected_tangents)
        : of_(of), v_(v), place_(place), projected_(projected_tangents) {
      for (std::size_t i = 0; i < features_.size(); ++i)
        features_[i] = of.keys_.feature(place.batch, place.head, of.side_.map(), int(i), place.key);
      for (std::size_t i = 0; i < query_.size(); ++i) query_[i] = of.features_.load(Index(i), v);
      if constexpr (normed_dots<Score>) query_[0] *= of.c_.feature_factor();
    }
    // Key j of the tile; `dot` is the tangent of its scaled dot product.
    [[gnu::always_inline]] PairOf<Score, P> operator()(Index j, P dot,
                                                       const PairOf<Score, P>& pair) const {
      PairOf<Score, P> d;
      const CallContext<Real>& c = of_.c_;
      d.dot = dot * c.dot_factor();
      d.logit = dot * c.logit_factor();
      if (c.mask.soft_cap() != Real(0)) {
        // logit = cap tanh(x / cap):  logit. = x. (1 - (logit / cap)^2)
        const P saturation = pair.logit / P(c.mask.soft_cap());
        d.logit = d.logit * (Real(1) - saturation * saturation);
      }
      if constexpr (Score::has_projection)
        if (of_.side_tangents_.projected.rows > 0) d.projected = projected_.load(j, v_);
      if constexpr (table_by_distance<Score>)
        d.table = of_.by_lane_.load(
            relative_place<Real>(
                of_.op_.score.table_clip(),
                c.geometry.query_position(place_.query + v_ * kLanes<Real>) - place_.key - j),
            v_);
      else if constexpr (Score::has_table)
        d.table = of_.side_tangents_.table.load(Index(pair.key[0].lane(0)), v_);
      if constexpr (Score::has_positions)
        d.position = of_.keys_.positions().template of_queries<buckets_by_distance<Score>>(place_.head, place_.query + v_ * kLanes<Real>,
                                                      place_.key + j);
      for (std::size_t i = 0; i < query_.size(); ++i) d.query[i] = query_[i];
      for (std::size_t i = 0; i < features_.size(); ++i) d.key[i] = P(features_[i][j]);
      return d;
    }
    [[nodiscard]] const auto& query() const { return query_; }

   private:
    const ScoreTangents& of_;
    int v_;
    const TilePlace& place_;
    LaneTile<Real> projected_;
    std::array<const Real*, std::size_t(Score::key_features)> features_;
    std::array<P, std::size_t(Score::query_features)> query_;
  };
  [[nodiscard]] const ScalarsOf<Score, P>& scalars() const { return scalars_; }
  // Tangents of the rows, unscaled, and of what is derived of them.
  [[nodiscard]] const SideTiles<Real>& side() const { return side_tangents_; }
  // Do the rows that products are made of move?
  [[nodiscard]] bool queries_move() const { return d_.query.given() || keys_.transform().moves(); }
  [[nodiscard]] bool keys_move() const { return d_.key.given() || keys_.transform().moves(); }
  // Of the keys that products are made of; no rows where they hold still.
  [[nodiscard]] Rows<Real> key_tangents(const TilePlace& place) const {
    const Source& source = side_.source();
    if (!keys_move()) return {};
    if constexpr (Score::has_transform)
      return keys_.transformed(place.batch, place.head, side_.map(), place.key, place.keys,
                               source.width);
    return {d_.key.row(place.batch, source.kv_head, place.key) + source.key_column, place.keys,
            source.width, d_.key.strides().row};
  }

 private:
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

  // Dual numbers cost little where every call is part of the loop, hence flatten.
  template <class Form>
  [[gnu::noinline, gnu::flatten]] void score_vector(const Form& of_op, const TilePlace& place,
                                                    int v, LaneTile<Real> dots,
                                                    LaneTile<Real> projected,
                                                    LaneTile<Real> projected_tangents,
                                                    LaneTile<Real> tangents) const {
    HeldForm<Form> form = of_op;
    const auto p = scalars_in_lanes<Score>(side_.scalars());
    const LanePairs<Score, Real> pairs(side_.score_tile(place, dots, projected), v);
    const Pairs moving_pairs(*this, place, v, projected_tangents);
    const KeyRange keys = place.keys_of(v);
    if constexpr (GathersSums<Form>) {
      const auto by_sum = sum_tangents(form, pairs.query(), moving_pairs.query(), p);
      for (Index j = keys.begin; j < keys.end; ++j) {
        const auto pair = pairs(j, dots.load(j, v));
        const auto d = moving_pairs(j, tangents.load(j, v), pair);
        PairOf<Score, P> slope{};
        std::array<P, std::size_t(Form::lane_sums)> sums{};
        form.score_vjp(pair, p, P(Real(1)), slope, sums);
        P tangent = slope.logit * d.logit + slope.dot * d.dot;
        for (int i = 0; i < Form::key_gradients; ++i)
          tangent += slope.key[std::size_t(i)] * d.key[std::size_t(i)];
        for (std::size_t i = 0; i < sums.size(); ++i) tangent += sums[i] * by_sum[i];
        tangents.store(j, v, tangent);
      }
    } else {
      for (Index j = keys.begin; j < keys.end; ++j) {
        const auto pair = pairs(j, dots.load(j, v));
        const auto d = moving_pairs(j, tangents.load(j, v), pair);
        tangents.store(j, v, score_tangent<Score>(form, pair, p, d, scalars_));
      }
    }
  }

  // What each sum of a form that gathers them adds to a score's tangent: finish() is linear in the sums.
  template <class Form, class Query>
  [[nodiscard]] auto sum_tangents(const Form& form, const Query& query, const Query& tangent,
                                  const ScalarsOf<Score, P>& p) const {
    std::array<P, std::size_t(Form::lane_sums)> by_sum;
    for (std::size_t n = 0; n < by_sum.size(); ++n) {
      std::array<P, std::size_t(Form::lane_sums)> one{};
      one[n] = Real(1);
      Query dquery{};
      ScalarsOf<Score, P> dp{};
      form.finish(one, query, p, dquery, dp);
      by_sum[n] = Real(0);
      for (std::size_t i = 0; i < dquery.size(); ++i) by_sum[n] += dquery[i] * tangent[i];
      for (std::size_t i = 0; i < dp.size(); ++i) by_sum[n] += dp[i] * scalars_[i];
    }
    return by_sum;
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
        tangents.add(j, v, shared ? P(source[j]) : bias.load(j, v));
    }
  }

  const Op& op_;
  const CallContext<Real>& c_;
  TangentOperands<Real> d_;
  const KeyTangents<Op, Real>& keys_;
  const Op& direction_;
  const QuerySide<Real>& side_;
  ScalarsOf<Score, P> scalars_{};
  LaneTile<Real> query_, tangent_;  // the rows and their tangents, times query_factor()
  LaneTile<Real> features_;
  LaneTile<Real> by_lane_;         // those of a table by distance, as pairs of lanes read them
  SideTiles<Real> side_tangents_;  // projected rows times projected_factor()
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
