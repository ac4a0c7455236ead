// SPDX-License-Identifier: Apache-2.0
#pragma once

// An op of any type as the engine sees it (tiles.hpp): all that forward() compiles for a further op. Loops over the pairs of a
// tile stand here, and run the op's formulas on vectors.

#include <heed/engine/pairs.hpp>
#include <heed/engine/tile/stream_states.hpp>
#include <heed/engine/tiles.hpp>
#include <heed/plug/attention.hpp>
#include <heed/plug/derivative.hpp>
#include <heed/plug/feature_calls.hpp>
#include <heed/plug/readout_calls.hpp>
#include <heed/plug/row_calls.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <memory>
#include <string_view>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// A text that each type has for itself.
template <class Type>
[[nodiscard]] std::string_view type_name() {
  return __PRETTY_FUNCTION__;
}

// Has no parameter of the part a value per head?
template <class Part>
[[nodiscard]] bool has_one_value_each(const Part& part) {
  bool one = true;
  visit_parameters(part, [&](const char*, const auto& param) { one = one && param.size() <= 1; });
  return one;
}

// f(OfQueries) or f(OfKeys)
template <class F>
void of_side(RowSide side, F&& f) {
  if (side == RowSide::query)
    f(OfQueries{});
  else
    f(OfKeys{});
}

// p of head h in every lane, for features that read them; others do not pay for them.
template <class Rows, class Real, class Score>
[[nodiscard]] ScalarsOf<Score, Pack<Real>> parameters_for(const Score& score, Index h) {
  if constexpr (features_read_parameters<Rows, Score>) return lanes_of_scalars<Real>(score, h);
  return {};
}

template <class Score, class Real>
[[nodiscard]] ScoreTraits score_traits(const Score& score) {
  ScoreTraits t;
  t.plain = Score::plain;
  t.has_projection = Score::has_projection;
  t.has_table = Score::has_table;
  t.has_transform = Score::has_transform;
  t.has_positions = Score::has_positions;
  t.counts_visible = Score::counts_visible;
  t.table_by_distance = table_by_distance<Score>;
  t.has_vjp = HasScoreVjp<Score, Pack<Real>>;
  t.normed_dots = normed_dots<Score>;
  t.kept_features = kept_features<Score>;
  t.place_free = place_free<Score>;
  t.one_value_each = has_one_value_each(score);
  t.scalars_differ = scalars_differ_by_head(score);
  t.key_features_read_p = features_read_parameters<OfKeys, Score>;
  t.sums_inputs = sums_inputs<Score>;
  t.scalars = scalars_of<Score>;
  t.query_features = Score::query_features;
  t.key_features = Score::key_features;
  t.query_inputs = query_row_inputs<Score>;
  t.key_inputs = key_inputs_of<Score>;
  t.key_inputs_name = key_inputs_name<Score>();
  return t;
}

// In place of a score's sums over columns, for scores that have none.
struct NoColumns {
  template <class Score>
  explicit NoColumns(const Score&) {}
};
template <class Score, class Real>
using AnyColumns =
    std::conditional_t<(Score::numbers_per_column > 0), ColumnsOf<Score, Real>, NoColumns>;

template <class Score, class Real>
class ScoreTilesOf final : public ScoreTiles<Real> {
 public:
  explicit ScoreTilesOf(const Score& score) : score_(score), columns_(score) {
    this->traits = score_traits<Score, Real>(score);
    if constexpr (Score::numbers_per_column > 0) this->columns = &columns_;
    if constexpr (Score::has_projection)
      if (score.projection().given()) this->projection = score.projection().data();
  }

  void validate(const Geometry& g, const char* where) const override {
    heed::validate(score_, g, where);
    if constexpr (Score::has_positions) require_positions(score_, g, where);
    if constexpr (reads_inputs<Score>) require_declared_inputs<Real>(score_, g.dim_qk, where);
  }
  Index rank() const override {
    if constexpr (Score::has_projection)
      if (score_.projection().given()) return score_.projection().extent(1);
    return 0;
  }
  Index table_rows() const override {
    if constexpr (Score::has_table) return score_.table_size();
    return 0;
  }
  bool transform_differs() const override {
    if constexpr (Score::has_transform) return score_.differs_by_head();
    return false;
  }
  void scalars(Index h, Real* p) const override {
    for (int i = 0; i < scalars_of<Score>; ++i) p[i] = scalar_of<Real>(score_, i, h);
  }
  void prepare_table(Index h, Index dim, Real* out) const override {
    if constexpr (Score::has_table) score_.prepare_table(h, dim, out);
  }
  PositionTable<Real> position_table(const Geometry& g) const override {
    if constexpr (Score::has_positions) {
      require_positions(score_, g, "heed");
      return {score_.*Score::positions, g, buckets_by_distance<Score>,
              [&](Index i, Index j) { return bucket_of(score_, i, j); }};
    } else {
      return {};
    }
  }
  void stamp(KeyFeaturesStamp<Real>& to) const override {
    if constexpr (Score::has_projection) {
      const auto& basis = score_.projection();
      to.projection.numbers.assign(basis.data(), basis.data() + basis.size());
    }
    if constexpr (requires { score_.feature_numbers(); })
      to.numbers.numbers = score_.feature_numbers();
    const auto add = [&to](const char* name, const auto& param) {
      to.parameters.push_back({name, {param.data(), param.data() + param.size()}});
    };
    if constexpr (Score::has_transform)
      visit_parameters(score_, add);
    else if constexpr (features_read_parameters<OfKeys, Score>)
      for_each_scalar<Score>(
          [&](const auto& entry, int) { add(entry.name, score_.*entry.member); });
  }
  void summands(const Real* x, Index stride, Index count, double* values,
                double* slopes) const override {
    if constexpr (sums_inputs<Score>)
      for (Index t = 0; t < count; ++t) {
        const double number = double(x[t * stride]);
        if (values) values[t] = score_.summand(number);
        if (slopes) slopes[t] = slope_of_summand(score_, number);
      }
  }

  void features(RowSide side, const DerivedTiles<Real>& rows, Index h, Index first,
                const Real* visible, int vectors, const LaneTile<Real>& out) const override {
    of_side(side, [&]<class Rows>(Rows) {
      constexpr int count = Rows::template count<Score>;
      if constexpr (count > 0) {
        const auto p = parameters_for<Rows, Real>(score_, h);
        for (int v = 0; v < vectors; ++v) {
          P f[std::size_t(count)];
          features_of<Rows>(score_, rows.row(v, first, visible), p, f);
          for (int i = 0; i < count; ++i) out.store(i, v, f[i]);
        }
      }
    });
  }
  void transform(RowSide side, Index h, Index first, int vectors,
                 const LaneTile<Real>& x) const override {
    if constexpr (Score::has_transform)
      DerivedTiles<Real>::transform(score_, side, h, first, vectors, x);
  }

  void scores(const ScoreTile<Real>& t) const override {
    Score::with_form(score_, [&](const auto& form) {
      for (int v = 0; v < t.vectors; ++v) {
        const P top = score_vector(form, t, v, t.place->keys_of(v));
        if (!t.running_max) continue;
        Real* largest = t.running_max + v * kLanes<Real>;
        max(top, P::load(largest)).store(largest);
      }
    });
  }
  void row_scores(const ScoreRow<Real>& r) const override {
    Score::with_form(score_, [&](const auto& form) {
      HeldForm<std::remove_cvref_t<decltype(form)>> own = form;
      const auto p = scalars_in_lanes<Score>(r.scalars);
      const RowPairs<Score, Real> pairs(r);
      for (Index j = 0; j < r.place->keys; j += kLanes<Real>)
        own.score(pairs(j, P::load(r.scores + j)), p).store(r.scores + j);
    });
  }

 private:
  using P = Pack<Real>;

  // Scores of one vector of lanes; returns the largest. What the loop reads comes by value: it then stays in registers.
  template <class Form>
  [[nodiscard, gnu::noinline]] P score_vector(const Form& form, const ScoreTile<Real>& t, int v,
                                              const KeyRange keys) const {
    HeldForm<Form> own = form;
    const auto p = scalars_in_lanes<Score>(t.scalars);
    const LanePairs<Score, Real> pairs(t, v);
    const LaneTile<Real> dots = t.dots, scores = t.scores;
    P top = -kInfinity<Real>;
    for (Index j = keys.begin; j < keys.end; ++j) {
      const P score = own.score(pairs(j, dots.load(j, v)), p);
      scores.store(j, v, score);
      top = max(score, top);
    }
    return top;
  }

  const Score& score_;
  [[no_unique_address]] AnyColumns<Score, Real> columns_;
};

template <class Normaliser>
[[nodiscard]] NormaliserTraits normaliser_traits(const Normaliser& normaliser) {
  NormaliserTraits t;
  t.maps = Normaliser::maps;
  t.diagnostics = Normaliser::diagnostics;
  t.streams = Normaliser::streams;
  t.counts_visible = Normaliser::counts_visible;
  t.uses_extra = Normaliser::uses_extra;
  t.uses_query = Normaliser::uses_query;
  t.differentiates_lse = Normaliser::differentiates_lse;
  t.mergeable = mergeable<Normaliser>;
  t.place_free = place_free<Normaliser>;
  t.one_value_each = has_one_value_each(normaliser);
  t.query_inputs = query_inputs_of<Normaliser>;
  t.key_inputs = key_inputs_of<Normaliser>;
  if constexpr (Normaliser::streams) {
    t.state_numbers = Normaliser::State::numbers;
    t.needs_weight = Normaliser::needs_weight;
  }
  return t;
}

// What both kinds of normalisers are asked for.
template <class Normaliser, class Real>
class AnyNormaliserTiles : public NormaliserTiles<Real> {
 public:
  explicit AnyNormaliserTiles(const Normaliser& normaliser) : normaliser_(normaliser) {
    this->traits = normaliser_traits(normaliser);
  }
  void validate(const Geometry& g, const char* where) const override {
    heed::validate(normaliser_, g, where);
  }
  Source source(const Geometry& g, Index h, int map) const override {
    return normaliser_.source(g, h, map);
  }
  Index query_heads(Index heads) const override { return normaliser_.query_heads(heads); }
  const char* diagnostic_name(int i) const override { return Normaliser::diagnostic_name(i); }

 protected:
  const Normaliser& normaliser_;
};

template <class Normaliser, class Real>
class StreamTilesOf final : public AnyNormaliserTiles<Normaliser, Real> {
 public:
  explicit StreamTilesOf(const Normaliser& normaliser)
      : AnyNormaliserTiles<Normaliser, Real>(normaliser) {
    if constexpr (has_learnt_keys<Normaliser>) this->learnt = learnt_of<Real>(normaliser);
  }

  void begin(const StreamQueries<Real>& queries, int v,
             const LaneTile<Real>& states) const override {
    of(states).store(v, this->normaliser_.begin(queries));
  }
  bool move(const LaneTile<Real>& states, const Real* top, Real* factors,
            int vectors) const override {
    bool moved = false;
    for (int v = 0; v < vectors; ++v) {
      const Index at = v * kLanes<Real>;
      auto state = of(states).load(v);
      const P factor = this->normaliser_.move(state, P::load(top + at), moved);
      factor.store(factors + at);
      state.sum = state.sum * factor;
      of(states).store(v, state);
    }
    return moved;
  }
  void weigh(const LaneTile<Real>& tile, const TilePlace& at, int vectors,
             const LaneTile<Real>& states) const override {
    for (int v = 0; v < vectors; ++v) {
      const KeyRange keys = at.keys_of(v);
      weigh_vector(tile.part(keys.begin, keys.size()), v, of(states));
    }
  }
  void weigh_row(Real* row, Index keys, Index i, const LaneTile<Real>& states) const override {
    const auto state = of(states).of_lane(i);
    P sum = Real(0);
    for (Index j = 0; j < keys; j += kLanes<Real>) {
      const P weight = this->normaliser_.weight(state, P::load(row + j));
      weight.store(row + j);
      sum += weight;
    }
    of(states).sums()[i] += sum_lanes(sum);
  }
  void join(const LaneTile<Real>& states, const LaneTile<Real>& others, int vectors, Real* factors,
            Real* other_factors) const override {
    if constexpr (mergeable<Normaliser>)
      for (int v = 0; v < vectors; ++v) {
        auto state = of(states).load(v);
        const auto other = of(others).load(v);
        P factor, other_factor;
        this->normaliser_.join(state, other, factor, other_factor);
        state.sum = state.sum * factor + other.sum * other_factor;
        of(states).store(v, state);
        factor.store(factors + v * kLanes<Real>);
        other_factor.store(other_factors + v * kLanes<Real>);
      }
  }
  void finish(const LaneTile<Real>& states, int vectors, Real* factors, Real* lse) const override {
    for (int v = 0; v < vectors; ++v) {
      const auto state = of(states).load(v);
      this->normaliser_.finish(state).store(factors + v * kLanes<Real>);
      this->normaliser_.lse(state).store(lse + v * kLanes<Real>);
    }
  }

 private:
  using P = Pack<Real>;
  using States = StreamStates<Normaliser, Real>;
  [[nodiscard]] static States of(const LaneTile<Real>& states) {
    return States(states.data, states.lanes);
  }
  void weigh_vector(const LaneTile<Real>& scores, int v, const States& states) const {
    auto state = states.load(v);
    P sum = state.sum;
    Normaliser::with_weight(this->normaliser_, state, [&](const auto& weight_of) {
      Real* cell = scores.data + v * kLanes<Real>;
      for (Index j = 0; j < scores.rows; ++j, cell += scores.lanes) {
        const P weight = weight_of(P::load(cell));
        weight.store(cell);
        sum += weight;
      }
    });
    state.sum = sum;
    states.store(v, state);
  }
};

template <class Normaliser, class Real>
class RowTilesOf final : public AnyNormaliserTiles<Normaliser, Real> {
 public:
  using AnyNormaliserTiles<Normaliser, Real>::AnyNormaliserTiles;
  void weights(RowBlock<Real>& block) const override { normalise_rows(this->normaliser_, block); }
  Index work_tiles(bool backward) const override {
    return row_work_tiles<Real>(this->normaliser_, backward);
  }
};

template <class Normaliser, class Real>
using NormaliserTilesOf = std::conditional_t<Normaliser::streams, StreamTilesOf<Normaliser, Real>,
                                             RowTilesOf<Normaliser, Real>>;

// In place of a score that a readout does not read: such readouts are compiled once for all scores.
struct NoScore {};
template <class Readout, class Score>
using ScoreOfReadout = std::conditional_t<Readout::uses_score, Score, NoScore>;

// f(score...) of the score that a readout reads, if it reads one.
template <class Readout, class Score, class F>
decltype(auto) with_score([[maybe_unused]] const Score& score, F&& f) {
  if constexpr (Readout::uses_score)
    return f(score);
  else
    return f();
}

template <class Readout>
[[nodiscard]] ReadoutTraits readout_traits(const Readout& readout) {
  ReadoutTraits t;
  t.identity = Readout::identity;
  t.saves_mixed = Readout::saves_mixed;
  t.uses_query = Readout::uses_query;
  t.uses_own_rows = Readout::uses_own_rows;
  t.maps_values = maps_values<Readout>;
  t.uses_extra = Readout::uses_extra;
  t.uses_lse = Readout::uses_lse;
  t.counts_steps = Readout::counts_steps;
  t.rehearses = Readout::rehearses;
  t.place_free = place_free<Readout>;
  t.one_value_each = has_one_value_each(readout);
  t.diagnostics = Readout::diagnostics;
  t.query_inputs = query_inputs_of<Readout>;
  return t;
}

// Score: the one that the readout reads, or NoScore.
template <class Readout, class Score, class Real>
class ReadoutTilesOf final : public ReadoutTiles<Real> {
 public:
  ReadoutTilesOf(const Readout& readout, const Score& score) : readout_(readout), score_(score) {
    this->traits = readout_traits(readout);
  }
  void validate(const Geometry& g, const char* where) const override {
    with_score<Readout>(
        score_, [&](const auto&... score) { heed::validate(readout_, g, where, score...); });
  }
  Index extra_dim(const Geometry& g) const override { return readout_.extra_dim(g); }
  const char* extra_name() const override { return readout_.extra_name(); }
  Index work_rows(const Geometry& g, bool backward) const override {
    return with_score<Readout>(score_, [&](const auto&... score) -> Index {
      return readout_work_rows<Real>(readout_, g, backward, score...);
    });
  }
  Index step_columns(const Geometry& g) const override { return readout_.step_columns(g); }
  const char* without_steps() const override { return readout_.without_steps(); }
  const char* diagnostic_name(int i) const override { return Readout::diagnostic_name(i); }
  void read_out(const ReadoutPanel<Real>& panel) const override {
    with_score<Readout>(score_,
                        [&](const auto&... score) { read_out_rows(readout_, panel, score...); });
  }
  void map_values([[maybe_unused]] Real* x, [[maybe_unused]] Real* slope,
                  [[maybe_unused]] Index n) const override {
    if constexpr (maps_values<Readout>)
      ReadoutFormula<Readout, Real>::map_values(readout_, x, slope, n);
  }
  bool needs_rehearsal() const override {
    if constexpr (Readout::rehearses) return readout_.needs_rehearsal();
    return false;
  }
  std::unique_ptr<ReadoutTiles<Real>> rehearsal() const override {
    if constexpr (Readout::rehearses) return own(readout_.rehearsal());
    return nullptr;
  }
  std::unique_ptr<ReadoutTiles<Real>> settled(const Saved<Real>& reports) const override {
    if constexpr (Readout::rehearses) {
      Readout readout = readout_;
      readout.settle(reports);
      return own(readout);
    }
    return nullptr;
  }

 private:
  // A readout that stands here alone.
  [[nodiscard]] std::unique_ptr<ReadoutTiles<Real>> own(const Readout& readout) const {
    auto memory = std::make_unique<Readout>(readout);
    auto tiles = std::make_unique<ReadoutTilesOf>(*memory, score_);
    tiles->own_ = std::move(memory);
    return tiles;
  }

  std::unique_ptr<Readout> own_;  // what readout_ refers to, unless it is the op's
  const Readout& readout_;
  const Score& score_;
};

// The parts of an op, which must outlive this.
template <class Op>
class OpTilesOf {
 public:
  using Real = typename Op::Scalar;
  using Score = typename Op::ScoreType;
  using Readout = typename Op::ReadoutType;

  explicit OpTilesOf(const Op& op)
      : score_(op.score), normaliser_(op.normaliser), readout_(op.readout, score_of_readout(op)) {}
  OpTilesOf(const OpTilesOf&) = delete;  // tiles() refers to its members

  [[nodiscard]] OpTiles<Real> tiles() const {
    using Columns = InputColumns<Op>;
    return {
        score_,
        normaliser_,
        readout_,
        {Columns::score_query, Columns::normaliser_query, Columns::readout_query,
         Columns::score_key, Columns::normaliser_key, &Columns::query_names, &Columns::key_names},
        type_name<Op>()};
  }

  // The score as a readout takes it.
  [[nodiscard]] static const auto& score_of_readout([[maybe_unused]] const Op& op) {
    static constexpr NoScore none{};
    if constexpr (Readout::uses_score)
      return op.score;
    else
      return none;
  }

 private:
  ScoreTilesOf<Score, Real> score_;
  NormaliserTilesOf<typename Op::NormaliserType, Real> normaliser_;
  ReadoutTilesOf<Readout, ScoreOfReadout<Readout, Score>, Real> readout_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
