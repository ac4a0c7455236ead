// SPDX-License-Identifier: Apache-2.0
#pragma once

// From dL/dscore of a tile to the gradients of what the score read: dot products, side values of queries
// and keys, table entries and the score's own scalars.

#include <heed/engine/tile/scores.hpp>
#include <heed/plug/derivative.hpp>

namespace heed {
inline namespace HEED_ABI {

// Gradients that a panel gathers for one score map over all tiles.
template <class Op, class Real>
struct QueryGrad {
  using Score = typename Op::ScoreType;
  LaneTile<Real> dq;        // [width][lanes]: of the rows, over CallContext::row_factor()
  LaneTile<Real> features;  // [query_features][lanes]
  LaneTile<Real> scalars;   // [scalars][lanes]
  SideTiles<Real> side;     // of the rows (through side values), projected rows and table

  [[nodiscard]] static QueryGrad take(const CallContext<Op, Real>& c, Scratch<Real>& scratch) {
    const Index lanes = c.plan.lanes, width = c.geometry.dim_qk;
    const auto& needs = c.keys.needs();
    const auto rows = [&](Index n) { return LaneTile<Real>{scratch.take(n * lanes), n, lanes}; };
    QueryGrad grad;
    grad.dq = rows(width);
    grad.features = rows(Score::query_features);
    grad.scalars = rows(scalars_of<Score>);
    grad.side = SideTiles<Real>::take(scratch, SideNeeds<Op>::any ? width : 0, needs.rank,
                                      needs.table_rows, lanes);
    return grad;
  }
  void clear(Index width) {
    dq.rows = width;
    if (SideNeeds<Op>::any) side.x.rows = width;
    for (const auto& tile : {dq, features, scalars, side.x, side.projected, side.table})
      tile.fill(Real(0));
  }
};

// One tile on its way back through the score.
template <class Op, class Real>
struct ScoreChain {
  using Score = typename Op::ScoreType;
  const CallContext<Op, Real>& c;
  const QuerySide<Op, Real>& query;
  QueryGrad<Op, Real>& grad;
  Real*
      key_lanes;  // scratch [key_features][keys][W]: gradients of key features, lanes not yet summed
  int key_gradients = Score::key_features;  // those that the score's form has

  // dscores becomes dL/d(q.k), over CallContext::row_factor(); dprojected is filled where a projection is in use.
  // Hidden pairs (`marks` is -infinity there; may be empty) contribute nothing.
  void run(const TilePlace& place, const LaneTile<Real>& dots, const LaneTile<Real>& projected,
           const LaneTile<Real>& dscores, const LaneTile<Real>& dprojected,
           const LaneTile<Real>& marks) {
    Score::with_form(c.op.score, [&](const auto& form) {
      key_gradients = key_gradients_of<std::remove_cvref_t<decltype(form)>>();
      query.with_pairs([&]<bool Scaled>() {
        for (int v = 0; v < c.plan.vectors; ++v) {
          const auto run = [&]<bool Hidden>() {
            if constexpr (HasScoreVjp<Score, Pack<Real>>)
              vector<Scaled, Hidden>(form, place, v, dots, projected, dscores, dprojected, marks);
            else
              vector_by_duals<Scaled, Hidden>(form, place, v, dots, projected, dscores, dprojected,
                                              marks);
          };
          if (marks.data)
            run.template operator()<true>();
          else
            run.template operator()<false>();
        }
      });
    });
  }

  // Adds the lanes' sums to the key features' gradients, kFeatures numbers per key.
  void add_key_features(const TilePlace& place, Real* dfeatures) const {
    constexpr Index W = kLanes<Real>, features = Score::key_features;
    for (int i = 0; i < key_gradients; ++i)
      for (Index j = 0; j < place.keys; j += W) {
        const Index count = std::min(W, place.keys - j);
        Pack<Real> lanes[W];
        for (Index k = 0; k < W; ++k)
          lanes[k] = k < count ? Pack<Real>::load(key_lanes + (i * place.keys + j + k) * W)
                               : Pack<Real>(Real(0));
        const Pack<Real> sums = detail::sums_of_lanes(lanes);
        for (Index k = 0; k < count; ++k) dfeatures[(j + k) * features + i] += sums.v[k];
      }
  }

 private:
  template <class Form>
  [[nodiscard]] static constexpr int key_gradients_of() {
    if constexpr (GathersSums<Form>)
      return Form::key_gradients;
    else
      return Score::key_features;
  }

  // What a loop over the keys adds up per lane, for forms that leave it to us.
  template <class Form>
  struct Sums {
    std::array<Pack<Real>, std::size_t(Score::query_features)> query{};
    ScalarsOf<Score, Pack<Real>> scalars{};
  };
  template <GathersSums Form>
  struct Sums<Form> {
    std::array<Pack<Real>, std::size_t(Form::lane_sums)> sums{};
  };

  // Dual numbers cost little where every call is part of the loop. GCC 12 flattens no call inside of a lambda
  // that it has cloned, hence the attribute of run_back.
  template <bool Scaled, bool Hidden, class Form>
  [[gnu::noinline, gnu::flatten]] void vector_by_duals(const Form& form, const TilePlace& place,
                                                       int v, LaneTile<Real> dots,
                                                       LaneTile<Real> projected,
                                                       LaneTile<Real> dscores,
                                                       LaneTile<Real> dprojected,
                                                       LaneTile<Real> marks) const {
    run_vector<Scaled, Hidden>(form, place, v, dots, projected, dscores, dprojected, marks);
  }
  template <bool Scaled, bool Hidden, class Form>
  [[gnu::noinline]] void vector(const Form& form, const TilePlace& place, int v,
                                LaneTile<Real> dots, LaneTile<Real> projected,
                                LaneTile<Real> dscores, LaneTile<Real> dprojected,
                                LaneTile<Real> marks) const {
    run_vector<Scaled, Hidden>(form, place, v, dots, projected, dscores, dprojected, marks);
  }

  template <bool Scaled, bool Hidden, class Form>
  [[gnu::always_inline]] void run_vector(const Form& of_op, const TilePlace& at, int v,
                                         LaneTile<Real> dots, LaneTile<Real> projected,
                                         LaneTile<Real> dscores, LaneTile<Real> dprojected,
                                         LaneTile<Real> marks) const {
    using P = Pack<Real>;
    HeldForm<Form> form = of_op;
    const TilePlace place = at;
    const auto p = query.scalars();
    const P cap = c.mask.soft_cap(), logit_part = c.scale / c.row_factor();
    Sums<Form> total;
    const LanePairs<Op, Real, Scaled> pairs(query, place, v, projected);
    for (Index j = 0; j < place.keys; ++j) {
      const auto pair = pairs(j, dots.load(j, v));
      PairOf<Score, P> d{};
      const auto run_back = [&](Sums<Form> & sums) __attribute__((always_inline)) {
        differentiate(form, pair, p, dscores.load(j, v), d, sums);
        if (Scaled || cap.lane(0) == Real(0)) return;
        const P saturation = pair.logit / cap;
        d.logit = d.logit * (Real(1) - saturation * saturation);
      };
      if constexpr (Hidden) {
        Sums<Form> own;
        run_back(own);
        const auto hidden = marks.load(j, v) == P(-kInfinity<Real>);
        const auto drop = [&](P& g) { g = select(hidden, P(Real(0)), g); };
        for (P* g : {&d.dot, &d.logit, &d.projected, &d.table}) drop(*g);
        for (P& g : d.key) drop(g);
        for_sums(own, total, [&](P& g, P& sum) {
          drop(g);
          sum += g;
        });
      } else {
        run_back(total);
      }
      dscores.store(j, v, mul_add(d.logit, logit_part, d.dot));
      keep_key_side<key_gradients_of<Form>()>(place, j, v, d, dprojected, pair);
    }
    add_sums(form, total, pairs.query(), p, v);
  }

  // d of the pair; what belongs to its query and to the score's scalars is added to `sums`.
  template <class Form, class P>
  [[gnu::always_inline]] static void differentiate(const Form& form, const PairOf<Score, P>& pair,
                                                   const ScalarsOf<Score, P>& p, P g,
                                                   PairOf<Score, P>& d, Sums<Form>& sums) {
    if constexpr (GathersSums<Form>) {
      form.score_vjp(pair, p, g, d, sums.sums);
    } else {
      differentiate_score<Score>(form, pair, p, g, d, sums.scalars);
      for (std::size_t i = 0; i < sums.query.size(); ++i) sums.query[i] += d.query[i];
    }
  }
  template <class S, class F>
  static void for_sums(S& from, S& to, F&& f) {
    if constexpr (requires { from.sums; }) {
      for (std::size_t i = 0; i < from.sums.size(); ++i) f(from.sums[i], to.sums[i]);
    } else {
      for (std::size_t i = 0; i < from.query.size(); ++i) f(from.query[i], to.query[i]);
      for (std::size_t i = 0; i < from.scalars.size(); ++i) f(from.scalars[i], to.scalars[i]);
    }
  }
  template <class Form, class Query, class P>
  void add_sums(const Form& form, const Sums<Form>& total, const Query& query_values, const P& p,
                int v) const {
    Query dquery{};
    P dp{};
    if constexpr (GathersSums<Form>) {
      form.finish(total.sums, query_values, p, dquery, dp);
    } else {
      dquery = total.query;
      dp = total.scalars;
    }
    if constexpr (normed_dots<Score>) dquery[0] *= c.feature_factor();
    for (std::size_t i = 0; i < dp.size(); ++i) grad.scalars.add(Index(i), v, dp[i]);
    for (std::size_t i = 0; i < dquery.size(); ++i) grad.features.add(Index(i), v, dquery[i]);
  }

  template <int KeyGradients>
  void keep_key_side(const TilePlace& place, Index j, int v, const PairOf<Score, Pack<Real>>& d,
                     const LaneTile<Real>& dprojected,
                     const PairOf<Score, Pack<Real>>& pair) const {
    constexpr Index W = kLanes<Real>;
    for (int i = 0; i < KeyGradients; ++i) {
      Real* cell = key_lanes + (i * place.keys + j) * W;
      const Pack<Real> g = d.key[std::size_t(i)];
      (v == 0 ? g : Pack<Real>::load(cell) + g).store(cell);
    }
    if constexpr (Score::has_projection)
      if (grad.side.projected.rows > 0) dprojected.store(j, v, d.projected);
    if constexpr (Score::has_table) grad.side.table.add(Index(pair.key[0].lane(0)), v, d.table);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
