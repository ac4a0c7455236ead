// SPDX-License-Identifier: Apache-2.0
#pragma once

// The way back through an op of any type as the engine sees it (vjps.hpp): all that backward() compiles for a further op.

#include <heed/engine/op_tiles.hpp>
#include <heed/engine/vjps.hpp>
#include <heed/plug/derivative.hpp>

#include <array>
#include <concepts>
#include <limits>
#include <memory>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// sums[i] += terms[i]; of terms that move, dual_lanes.hpp adds the tangents. Vectors of zeros, as of the heads that a visitor has
// nothing to do with, are passed over.
template <std::floating_point Number>
void add_terms(const Number* terms, Index count, double* sums) {
  constexpr Index W = kLanes<Number>;
  const auto add = [&](Index begin, Index end) {
    for (Index i = begin; i < end; ++i) sums[i] += double(terms[i]);
  };
  const Index whole = count / W * W;
  for (Index i = 0; i < whole; i += W)
    if (any_lane(Pack<Number>::load(terms + i) != Pack<Number>(Number(0)))) add(i, i + W);
  add(whole, count);
}

template <class Part, class Real>
class PartGradientOf final : public PartGradient<Real> {
 public:
  Part part;

  explicit PartGradientOf(const Part& of) : part(of) { set_zero(); }
  void set_zero() override {
    visit_parameters(part, [](const char*, auto& param) { param.set_zero(); });
  }
  Index numbers() const override {
    Index n = 0;
    visit_parameters(part, [&](const char*, const auto& param) { n += param.size(); });
    return n;
  }
  void add_to(double* to) const override {
    visit_parameters(part, [&](const char*, const auto& param) {
      add_terms(param.data(), param.size(), to);
      to += param.size();
    });
  }
  void add_from(const double* from) override {
    visit_parameters(part, [&](const char*, auto& param) {
      for (Index i = 0; i < param.size(); ++i) param[i] += Real(*from++);
    });
  }
  void make_nan(Index h, Index heads) override {
    visit_parameters(part, [&](const char*, auto& param) {
      for (Index n = 0; n < param.size(); ++n)
        if (param.size() != heads || n == h) param[n] = std::numeric_limits<Real>::quiet_NaN();
    });
  }
  [[nodiscard]] static Part& of(PartGradient<Real>& grad) {
    return static_cast<PartGradientOf&>(grad).part;
  }
};

template <class Score>
inline constexpr bool has_column_weights = requires {
  Score::column_weights;
};

// Lifted: the score whose transform runs on Lanes, or the score itself. direction: of the score's parameters, where they move.
template <class Interface, class Score, class Lifted, class Real, class Lanes>
class RowVjpsOf : public Interface {
 public:
  RowVjpsOf(const Score& score, const Score& direction, const Lifted& lifted)
      : score_(score), direction_(direction), lifted_(lifted) {
    if constexpr (has_column_weights<Score>)
      this->column_weights = [](PartGradient<Real>& grad, Index h) {
        return ColumnsOf<Score, Real>::weights_of(PartGradientOf<Score, Real>::of(grad), h);
      };
  }

  std::unique_ptr<PartGradient<Real>> gradient() const override {
    if constexpr (!kMoves || Score::has_transform)
      return std::make_unique<PartGradientOf<Lifted, Real>>(lifted_);
    return nullptr;
  }
  void features_vjp(RowSide side, const DerivedTiles<Real, Lanes>& rows, Index h, Index first,
                    const Real* visible, int vectors, const LaneTile<Real>& features,
                    const Lanes& dfeatures, const DerivedTiles<Real, Lanes>& grads,
                    const Lanes& dscalars) const override {
    of_side(side, [&]<class Rows>(Rows) {
      constexpr int count = Rows::template count<Score>;
      if constexpr (count > 0) {
        const auto p = parameters<Rows>(h);
        for (int v = 0; v < vectors; ++v) {
          P f[std::size_t(count)], df[std::size_t(count)];
          const auto row = rows.row(v, first, visible);
          if constexpr (kMoves) features_of<Rows>(score_, row, p, f);
          for (int i = 0; i < count; ++i) {
            if constexpr (!kMoves) f[i] = features.load(i, v);
            df[i] = dfeatures.load(i, v);
          }
          const auto idle = grads.idle_lanes(df, count, v);
          ScalarsOf<Score, P> dp{};
          heed::detail::features_vjp<Rows>(score_, row, p, f, df, grads.grad(v), dp);
          grads.clear_lanes(idle, v);
          if constexpr (features_read_parameters<Rows, Score>)
            for (std::size_t i = 0; i < dp.size(); ++i)
              dscalars.add(Index(i), v, zero_where(idle, dp[i]));
        }
      }
    });
  }
  void transform_vjp(RowSide side, Index h, Index first, Index count, const Lanes& before,
                     const Lanes& work, const Lanes& d, PartGradient<Real>& grad) const override {
    if constexpr (Score::has_transform)
      DerivedTiles<Real, Lanes>::transform_vjp(lifted_, side, h, first, count, before, work, d,
                                               PartGradientOf<Lifted, Real>::of(grad));
  }
  void add_scalars(Index h, const double* sums, PartGradient<Real>& grad) const override {
    chain_scalars(PartGradientOf<Score, Real>::of(grad), h, sums);
  }

 protected:
  using P = typename Lanes::P;
  static constexpr bool kMoves = Lanes::planes > 1;

  template <class Rows>
  [[nodiscard]] ScalarsOf<Score, P> parameters(Index h) const {
    const auto p = parameters_for<Rows, Real>(score_, h);
    if constexpr (kMoves)
      return dual_packs(p, parameters_for<Rows, Real>(direction_, h));
    else
      return p;
  }

  const Score &score_, &direction_;
  const Lifted& lifted_;
};

template <class Score, class Real>
class ScoreVjpsOf final : public RowVjpsOf<ScoreVjps<Real>, Score, Score, Real, LaneTile<Real>> {
 public:
  explicit ScoreVjpsOf(const Score& score)
      : RowVjpsOf<ScoreVjps<Real>, Score, Score, Real, LaneTile<Real>>(score, score, score) {}

  int scores_vjp(const ScoreTile<Real>& tile, const ScoreBack<Real>& back) const override {
    int key_gradients = 0;
    Score::with_form(this->score_, [&](const auto& form) {
      key_gradients = key_gradients_of<std::remove_cvref_t<decltype(form)>>();
      clear_key_lanes(tile, back, key_gradients);
      for (int v = 0; v < tile.vectors; ++v)
        if (back.hidden.data)
          run_vector<true>(form, tile, back, v);
        else
          run_vector<false>(form, tile, back, v);
    });
    return key_gradients;
  }
  void table_vjp(Index h, Index dim, const double* dtable,
                 PartGradient<Real>& grad) const override {
    if constexpr (Score::has_table) this->score_.table_vjp(h, dim, dtable, typed(grad));
  }
  void add_positions(Index h, const double* sums, PartGradient<Real>& grad) const override {
    if constexpr (Score::has_positions) {
      Param<Real>& to = typed(grad).*Score::positions;
      const Index first = position_row(to, h);
      for (Index n = 0; n < to.extent(1); ++n) to[first + n] += Real(sums[n]);
    }
  }

 private:
  using P = Pack<Real>;
  [[nodiscard]] static Score& typed(PartGradient<Real>& grad) {
    return PartGradientOf<Score, Real>::of(grad);
  }

  template <class Form>
  [[nodiscard]] static constexpr int key_gradients_of() {
    if constexpr (GathersSums<Form>)
      return Form::key_gradients;
    else
      return Score::key_features;
  }
  // Zeroes cells that vector 0 skips: it stores, later vectors add.
  static void clear_key_lanes(const ScoreTile<Real>& tile, const ScoreBack<Real>& back,
                              int key_gradients) {
    const KeyRange set = tile.place->keys_of(0);
    const Index keys = tile.place->keys;
    for (int i = 0; i < key_gradients; ++i) {
      Real* lanes = back.key_lanes + i * keys * kLanes<Real>;
      std::fill(lanes, lanes + set.begin * kLanes<Real>, Real(0));
      std::fill(lanes + set.end * kLanes<Real>, lanes + keys * kLanes<Real>, Real(0));
    }
  }

  // What a loop over the keys adds up per lane, for forms that leave it to the engine.
  template <class Form>
  struct Sums {
    std::array<P, std::size_t(Score::query_features)> query{};
    ScalarsOf<Score, P> scalars{};

    template <class F>
    void for_each(Sums& other, F&& f) {
      for (std::size_t i = 0; i < query.size(); ++i) f(query[i], other.query[i]);
      for (std::size_t i = 0; i < scalars.size(); ++i) f(scalars[i], other.scalars[i]);
    }
  };
  template <GathersSums Form>
  struct Sums<Form> {
    std::array<P, std::size_t(Form::lane_sums)> sums{};

    template <class F>
    void for_each(Sums& other, F&& f) {
      for (std::size_t i = 0; i < sums.size(); ++i) f(sums[i], other.sums[i]);
    }
  };

  // One vector of queries against all keys of the tile. What the loops read comes by value: it then stays in registers. Dual
  // numbers cost little where every call is part of the loop, hence flatten.
  template <bool Hidden, class Form>
  void run_vector(const Form& form, const ScoreTile<Real>& tile, const ScoreBack<Real>& back,
                  int v) const {
    if constexpr (HasScoreVjp<Score, P>)
      by_hand<Hidden>(form, tile, back, v, tile.place->keys_of(v));
    else
      by_duals<Hidden>(form, tile, back, v, tile.place->keys_of(v));
  }
  template <bool Hidden, class Form>
  [[gnu::noinline]] void by_hand(const Form& form, ScoreTile<Real> tile, ScoreBack<Real> back,
                                 int v, const KeyRange keys) const {
    loop_over_keys<Hidden>(form, tile, back, v, keys);
  }
  template <bool Hidden, class Form>
  [[gnu::noinline, gnu::flatten]] void by_duals(const Form& form, ScoreTile<Real> tile,
                                                ScoreBack<Real> back, int v,
                                                const KeyRange keys) const {
    loop_over_keys<Hidden>(form, tile, back, v, keys);
  }

  // Invariant: behind key j, `total` holds the sums over the vector's keys up to j, and their dscores are those of the
  // dots.
  template <bool Hidden, class Form>
  [[gnu::always_inline]] void loop_over_keys(const Form& of_op, const ScoreTile<Real>& tile,
                                             const ScoreBack<Real>& back, int v,
                                             const KeyRange keys) const {
    HeldForm<Form> form = of_op;
    const auto p = scalars_in_lanes<Score>(tile.scalars);
    const P logit_part = back.logit_part;
    const LanePairs<Score, Real> pairs(tile, v);
    const LaneTile<Real> dots = tile.dots, dscores = back.dscores, marks = back.hidden;
    const Index tile_keys = tile.place->keys;
    Sums<Form> total;
    for (Index j = keys.begin; j < keys.end; ++j) {
      const auto pair = pairs(j, dots.load(j, v));
      PairOf<Score, P> d{};
      if constexpr (Hidden) {
        Sums<Form> own;
        differentiate(form, tile.logits, pair, p, dscores.load(j, v), d, own);
        const auto hidden = is_hidden(marks.load(j, v));
        const auto drop = [&](P& g) { g = zero_where(hidden, g); };
        for (P* g : {&d.dot, &d.logit, &d.projected, &d.table, &d.position}) drop(*g);
        for (P& g : d.key) drop(g);
        own.for_each(total, [&](P& g, P& sum) {
          drop(g);
          sum += g;
        });
      } else {
        differentiate(form, tile.logits, pair, p, dscores.load(j, v), d, total);
      }
      dscores.store(j, v, mul_add(d.logit, logit_part, d.dot));
      keep_derived_keys<key_gradients_of<Form>()>(tile, back, tile_keys, j, v, d, pair, pairs);
    }
    add_sums(form, total, pairs.query(), p, tile, back, v);
  }

  // d of the pair; what belongs to its query and to the score's scalars is added to `sums`.
  template <class Form>
  [[gnu::always_inline]] static void differentiate(const Form& form, const LogitFactors<Real>& c,
                                                   const PairOf<Score, P>& pair,
                                                   const ScalarsOf<Score, P>& p, P g,
                                                   PairOf<Score, P>& d, Sums<Form>& sums) {
    if constexpr (GathersSums<Form>) {
      form.score_vjp(pair, p, g, d, sums.sums);
    } else {
      differentiate_score<Score>(form, pair, p, g, d, sums.scalars);
      for (std::size_t i = 0; i < sums.query.size(); ++i) sums.query[i] += d.query[i];
    }
    d.logit = before_cap(c, pair.logit, d.logit);
  }
  template <class Form, class Query>
  void add_sums(const Form& form, const Sums<Form>& total, const Query& query_values,
                const ScalarsOf<Score, P>& p, const ScoreTile<Real>& tile,
                const ScoreBack<Real>& back, int v) const {
    Query dquery{};
    ScalarsOf<Score, P> dp{};
    if constexpr (GathersSums<Form>) {
      form.finish(total.sums, query_values, p, dquery, dp);
    } else {
      dquery = total.query;
      dp = total.scalars;
    }
    if constexpr (normed_dots<Score>) dquery[0] *= tile.logits.feature;
    for (std::size_t i = 0; i < dp.size(); ++i) back.dscalars.add(Index(i), v, dp[i]);
    for (std::size_t i = 0; i < dquery.size(); ++i) back.dfeatures.add(Index(i), v, dquery[i]);
  }

  template <int KeyGradients>
  [[gnu::always_inline]] static void keep_derived_keys(const ScoreTile<Real>& tile,
                                                       const ScoreBack<Real>& back, Index tile_keys,
                                                       Index j, int v, const PairOf<Score, P>& d,
                                                       const PairOf<Score, P>& pair,
                                                       const LanePairs<Score, Real>& pairs) {
    for (int i = 0; i < KeyGradients; ++i) {
      Real* cell = back.key_lanes + (i * tile_keys + j) * kLanes<Real>;
      const P g = d.key[std::size_t(i)];
      (v == 0 ? g : P::load(cell) + g).store(cell);
    }
    if constexpr (Score::has_projection)
      if (back.dprojected.data) back.dprojected.store(j, v, d.projected);
    if constexpr (table_by_distance<Score>)
      back.dtable.add(pairs.place_of(j), v, d.table);
    else if constexpr (Score::has_table)
      back.dtable.add(Index(pair.key[0].lane(0)), v, d.table);
    if constexpr (Score::has_positions)
      back.positions->template add<buckets_by_distance<Score>>(tile.place->query + v * kLanes<Real>,
                                                               tile.place->key + j, d.position);
  }
};

template <class Normaliser, class Real>
class NormaliserVjpsOf final : public NormaliserVjps<Real> {
 public:
  explicit NormaliserVjpsOf(const Normaliser& normaliser) : normaliser_(normaliser) {
    if constexpr (has_learnt_keys<Normaliser>)
      this->learnt = [](PartGradient<Real>& grad, Index h) {
        LearntRows<Real> rows;
        with_learnt(typed(grad), [&](auto& keys, auto* values) {
          const auto of_head = [h](auto& x) {
            return x.data() + (x.extent(0) == 1 ? 0 : h) * x.extent(1) * x.extent(2);
          };
          rows.keys = of_head(keys);
          if (values && values->given()) rows.values = of_head(*values);
        });
        return rows;
      };
  }

  std::unique_ptr<PartGradient<Real>> gradient() const override {
    return std::make_unique<PartGradientOf<Normaliser, Real>>(normaliser_);
  }
  void vjp(const StreamQueries<Real>& queries, int v, const LaneTile<Real>& states,
           const Real* delta, PartGradient<Real>& grad) const override {
    if constexpr (Normaliser::streams)
      normaliser_.vjp(queries, States(states.data, states.lanes).load(v),
                      P::load(delta + v * kLanes<Real>), typed(grad));
  }
  void weigh_vjp(const LaneTile<Real>& scores, const LaneTile<Real>& x, const TilePlace& at,
                 int vectors, const LaneTile<Real>& states, const Real* delta,
                 const PanelDropout<Real>& dropout) const override {
    if constexpr (Normaliser::streams)
      for (int v = 0; v < vectors; ++v) {
        const KeyRange keys = at.keys_of(v);
        const LaneTile<Real> own = scores.part(keys.begin, keys.size()),
                             own_x = x.part(keys.begin, keys.size());
        const auto state = States(states.data, states.lanes).load(v);
        const P of_row = P::load(delta + v * kLanes<Real>);
        if (dropout.drops())
          weigh(state, of_row, v, dropout.along_queries(v, at.key + keys.begin), own, own_x);
        else
          weigh(state, of_row, v, KeepAll{}, own, own_x);
      }
  }
  void weights_vjp(RowBlock<Real>& block, PartGradient<Real>& grad) const override {
    if constexpr (!Normaliser::streams) normalise_rows_vjp(normaliser_, block, typed(grad));
  }

 private:
  using P = Pack<Real>;
  using States = StreamStates<Normaliser, Real>;
  [[nodiscard]] static Normaliser& typed(PartGradient<Real>& grad) {
    return PartGradientOf<Normaliser, Real>::of(grad);
  }
  struct KeepAll {
    void next() {}
    [[nodiscard]] P operator()(P x) const { return x; }
  };
  template <class State, class Drop>
  void weigh(const State& state, P delta, int v, Drop drop, const LaneTile<Real>& scores,
             const LaneTile<Real>& x) const {
    const P factor = normaliser_.finish(state);
    for (Index j = 0; j < scores.rows; ++j) {
      drop.next();
      const P score = scores.load(j, v);
      const P weight = normaliser_.weight(state, score) * factor;
      const P dscore = normaliser_.dscore(state, score, weight, drop(x.load(j, v)), delta);
      // Both by select: in a row that holds a NaN, the weight of a hidden pair is 0 times NaN.
      scores.store(j, v, zero_where(is_hidden(score), drop(weight)));
      x.store(j, v, zero_where(is_hidden(score), dscore));
    }
  }

  const Normaliser& normaliser_;
};

// Score: the one that the readout reads, or NoScore.
template <class Readout, class Score, class Real>
class ReadoutVjpsOf final : public ReadoutVjps<Real> {
 public:
  ReadoutVjpsOf(const Readout& readout, const Score& score) : readout_(readout), score_(score) {}

  std::unique_ptr<PartGradient<Real>> gradient() const override {
    return std::make_unique<PartGradientOf<Readout, Real>>(readout_);
  }
  void read_out_vjp(const ReadoutPanel<Real>& panel, PartGradient<Real>& grad,
                    [[maybe_unused]] PartGradient<Real>& score_grad) const override {
    Readout& own = PartGradientOf<Readout, Real>::of(grad);
    if constexpr (Readout::uses_score)
      read_out_rows_vjp(readout_, panel, own, score_, PartGradientOf<Score, Real>::of(score_grad));
    else
      read_out_rows_vjp(readout_, panel, own);
  }
  std::unique_ptr<ReadoutVjps<Real>> settled(const Saved<Real>& reports) const override {
    if constexpr (Readout::rehearses) {
      auto memory = std::make_unique<Readout>(readout_);
      memory->settle(reports);
      auto vjps = std::make_unique<ReadoutVjpsOf>(*memory, score_);
      vjps->own_ = std::move(memory);
      return vjps;
    }
    return nullptr;
  }

 private:
  std::unique_ptr<Readout> own_;  // what readout_ refers to, unless it is the op's
  const Readout& readout_;
  const Score& score_;
};

// The parts of an op, which must outlive this.
template <class Op>
class OpVjpsOf {
 public:
  using Real = typename Op::Scalar;
  using Score = typename Op::ScoreType;
  using Normaliser = typename Op::NormaliserType;
  using Readout = typename Op::ReadoutType;

  explicit OpVjpsOf(const Op& op)
      : score_(op.score),
        normaliser_(op.normaliser),
        readout_(op.readout, OpTilesOf<Op>::score_of_readout(op)) {}
  OpVjpsOf(const OpVjpsOf&) = delete;  // vjps() refers to its members

  [[nodiscard]] OpVjps<Real> vjps() const { return {score_, normaliser_, readout_}; }
  // The gradient as an object of the op's type, with the options of `op`.
  [[nodiscard]] static Op typed(const Op& op, const OpGradient<Real>& of) {
    Op gradient = op;
    gradient.score = PartGradientOf<Score, Real>::of(*of.score);
    gradient.normaliser = PartGradientOf<Normaliser, Real>::of(*of.normaliser);
    gradient.readout = PartGradientOf<Readout, Real>::of(*of.readout);
    return gradient;
  }

 private:
  ScoreVjpsOf<Score, Real> score_;
  NormaliserVjpsOf<Normaliser, Real> normaliser_;
  ReadoutVjpsOf<Readout, ScoreOfReadout<Readout, Score>, Real> readout_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
