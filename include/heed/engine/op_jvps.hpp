// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward mode of an op of any type as the engine sees it (jvps.hpp): all that jvp() compiles for a further op.
//
//   score        by its own score_vjp with the seed 1, or by dual numbers of one direction through score()
//   feature      by its vjp, seeded with 1:  f. = sum_c df/dx_c x._c
//   transform    by dual numbers through transform()
//   table        by dual numbers through prepare_table()
//   normaliser   streaming: by its dscore() and vjp(); rows: by its jvp(), or by dual numbers through reference(), row by row
//   readout      by dual numbers through reference()

#include <heed/autodiff/lane_dual.hpp>
#include <heed/engine/jvps.hpp>
#include <heed/engine/op_tiles.hpp>

#include <string>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

[[nodiscard]] inline DualNumber dual_number(double value, double tangent) {
  return {value, {tangent}};
}

// Gives a number its tangent, the same one in every lane.
inline void set_tangent(DualNumber& x, double tangent) { x.grad[0] = tangent; }
template <class Real>
void set_tangent(LaneDual<Pack<Real>, 1>& x, double tangent) {
  x = dual_pack(x.value, Pack<Real>(Real(tangent)));
}
// `part` over dual numbers, whose tangents are the learnt parameters of `direction`.
template <class Number = DualNumber, class Part>
[[nodiscard]] Rebound<Part, Number> dual_part(const Part& part, const Part& direction) {
  Rebound<Part, Number> lifted = cast_part<Number>(part);
  std::vector<double> tangents;
  visit_parameters(direction, [&](const char*, const auto& param) {
    for (Index i = 0; i < param.size(); ++i) tangents.push_back(double(param[i]));
  });
  std::size_t next = 0;
  visit_parameters(lifted, [&](const char*, auto& param) {
    for (Index i = 0; i < param.size(); ++i) set_tangent(param[i], tangents[next++]);
  });
  return lifted;
}
// Does a part have parameters that move?
template <class Part>
[[nodiscard]] bool moves(const Part& direction) {
  bool any = false;
  visit_parameters(direction, [&](const char*, const auto& param) {
    for (Index i = 0; i < param.size(); ++i) any = any || param[i] != 0;
  });
  return any;
}
// Throws unless the parameters of `direction` have the shapes of the op's.
template <class Op>
void require_direction(const Op& op, const Op& direction, const std::string& where) {
  std::vector<std::vector<Index>> shapes;
  op.visit([&](const char*, const auto& param) { shapes.push_back(param.shape()); });
  std::size_t next = 0;
  direction.visit([&](const char* name, const auto& param) {
    const std::vector<Index>& wanted = shapes[next++];
    require(param.shape() == wanted, where, ": ", name, " of the op's tangent has shape ",
            extents_text(param.shape()), ", that of the op has ", extents_text(wanted));
  });
}

// An op or a part of one over dual numbers where it is wanted, else nothing. As a member its type is made by the file that calls:
// g++ warns of one out of an anonymous namespace that a virtual function makes first.
template <bool wanted, class Part, class Number>
struct LiftedPart {
  struct Type {};
};
template <class Part, class Number>
struct LiftedPart<true, Part, Number> : Rebind<Part, Number> {};
template <bool wanted, class Part, class Number = DualNumber>
using Lifted = typename LiftedPart<wanted, Part, Number>::Type;
template <class Score, class Real>
using TransformScore = Lifted<Score::has_transform, Score, DualPack<Real>>;

// Takes what a feature's vjp adds to the gradient of its row times the row's tangent.
template <class Real>
struct AlongRow {
  const DerivedTiles<Real>& tangent;
  int vector;
  Pack<Real>& sum;

  void add_x(Index c, Pack<Real> g) const { sum += g * tangent.x.load(c, vector); }
  void add_projected(Index c, Pack<Real> g) const { sum += g * tangent.projected.load(c, vector); }
  void add_table(Index m, Pack<Real> g) const { sum += g * tangent.table.load(m, vector); }
  void add_input(Index c, Pack<Real> g) const { sum += g * tangent.input.load(c, vector); }
};

// A pair that moves.
template <class Score, class Real>
[[nodiscard, gnu::always_inline]] inline PairOf<Score, DualPack<Real>> dual_pair(
    const PairOf<Score, Pack<Real>>& pair, const PairOf<Score, Pack<Real>>& tangent) {
  using D = DualPack<Real>;
  PairOf<Score, D> both;
  Directions<Score>::for_each_field(
      [](auto, D& to, const Pack<Real>& a, const Pack<Real>& b) { to = dual_pack(a, b); }, both,
      pair, tangent);
  both.query_index = D(pair.query_index);
  both.key_index = D(pair.key_index);
  return both;
}

// The tangent of score(pair, p) along dpair and dp.
template <class Score, class Form, class Real>
[[gnu::always_inline]] inline Pack<Real> score_tangent(const Form& form,
                                                       const PairOf<Score, Pack<Real>>& pair,
                                                       const ScalarsOf<Score, Pack<Real>>& p,
                                                       const PairOf<Score, Pack<Real>>& dpair,
                                                       const ScalarsOf<Score, Pack<Real>>& dp) {
  using P = Pack<Real>;
  if constexpr (HasScoreVjp<Score, P>) {
    PairOf<Score, P> slope{};
    ScalarsOf<Score, P> scalar_slope{};
    form.score_vjp(pair, p, P(Real(1)), slope, scalar_slope);
    P sum = Real(0);
    Directions<Score>::for_each_field([&](auto, const P& a, const P& b) { sum += a * b; }, slope,
                                      dpair);
    for_directions<scalars_of<Score>>([&](auto i) { sum += scalar_slope[i] * dp[i]; });
    return sum;
  } else {
    return tangent_of<Real>(form.score(dual_pair<Score, Real>(pair, dpair), dual_packs(p, dp)));
  }
}

// The fields of pairs of vector v with one key after the other, as they move.
template <class Score, class Real>
class PairTangents {
 public:
  using P = Pack<Real>;
  PairTangents(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved, int v)
      : v_(v),
        logits_(tile.logits),
        projected_(moved.projected),
        table_(moved.table),
        positions_(moved.positions),
        head_(tile.place->head),
        first_row_(tile.place->query + v * kLanes<Real>),
        first_key_(tile.place->key) {
    for (std::size_t i = 0; i < key_.size(); ++i)
      key_[i] = moved.key_features + Index(i) * moved.key_stride;
    for (std::size_t i = 0; i < query_.size(); ++i) query_[i] = moved.features.load(Index(i), v);
    if constexpr (normed_dots<Score>) query_[0] *= logits_.feature;
  }

  // Key j of the tile; `dot` is the tangent of its scaled dot product, `pairs` have `pair` made.
  [[gnu::always_inline]] PairOf<Score, P> operator()(Index j, P dot, const PairOf<Score, P>& pair,
                                                     const LanePairs<Score, Real>& pairs) const {
    PairOf<Score, P> d;
    d.dot = dot * logits_.dot;
    d.logit = before_cap(logits_, pair.logit, P(dot * logits_.keep));
    if constexpr (Score::has_projection)
      if (projected_.data) d.projected = projected_.load(j, v_);
    if constexpr (table_by_distance<Score>)
      d.table = table_.load(pairs.place_of(j), v_);
    else if constexpr (Score::has_table)
      d.table = table_.load(Index(pair.key[0].lane(0)), v_);
    if constexpr (Score::has_positions)
      d.position = positions_->template of_queries<buckets_by_distance<Score>>(head_, first_row_,
                                                                               first_key_ + j);
    for (std::size_t i = 0; i < query_.size(); ++i) d.query[i] = query_[i];
    for (std::size_t i = 0; i < key_.size(); ++i) d.key[i] = P(key_[i][j]);
    return d;
  }
  [[nodiscard]] const auto& query() const { return query_; }

 private:
  int v_;
  LogitFactors<Real> logits_;
  LaneTile<Real> projected_, table_;
  const PositionTable<Real>* positions_;
  Index head_, first_row_, first_key_;
  std::array<const Real*, std::size_t(Score::key_features)> key_;
  std::array<P, std::size_t(Score::query_features)> query_;
};

template <class Score, class Real>
class ScoreJvpsOf final : public ScoreJvps<Real> {
 public:
  using P = Pack<Real>;

  ScoreJvpsOf(const Score& score, const Score& direction)
      : score_(score), direction_(direction), columns_(direction) {
    if constexpr (Score::numbers_per_column > 0) this->columns = &columns_;
    if constexpr (Score::has_table) lifted_ = dual_part(score, direction);
    if constexpr (Score::has_transform) {
      transform_ = dual_part<DualPack<Real>>(score, direction);
      transform_moves_ = moves(direction);
    }
    if constexpr (Score::has_positions) {
      positions_ = score;  // with the tangent of its table of positions in the table's place
      positions_.*Score::positions = direction.*Score::positions;
    }
  }

  bool transform_moves() const override { return transform_moves_; }
  void scalars(Index h, Real* p) const override {
    for (int i = 0; i < scalars_of<Score>; ++i) p[i] = scalar_of<Real>(direction_, i, h);
  }
  void prepare_table([[maybe_unused]] Index h, [[maybe_unused]] Index dim,
                     [[maybe_unused]] Real* out) const override {
    if constexpr (Score::has_table) {
      std::vector<DualNumber> table(std::size_t(score_.table_size() * dim), DualNumber(0));
      lifted_.prepare_table(h, dim, table.data());
      for (const DualNumber& entry : table) *out++ = Real(entry.grad[0]);
    }
  }
  PositionTable<Real> position_table(const Geometry& g) const override {
    if constexpr (Score::has_positions)
      return ScoreTilesOf<Score, Real>(positions_).position_table(g);
    else
      return {};
  }
  void features(RowSide side, const DerivedDuals<Real>& rows, Index h, Index first,
                const Real* visible, int vectors, const DualLanes<Real>& out) const override {
    const DerivedTiles<Real> values = rows.plane(0), tangents = rows.plane(1);
    of_side(side, [&]<class Rows>(Rows) {
      constexpr int count = Rows::template count<Score>;
      if constexpr (count > 0) {
        const auto p = parameters_for<Rows, Real>(score_, h),
                   dp = parameters_for<Rows, Real>(direction_, h);
        for (int v = 0; v < vectors; ++v) {
          P f[std::size_t(count)];
          const LaneRow<Real> row = values.row(v, first, visible);
          features_of<Rows>(score_, row, p, f);
          for (int i = 0; i < count; ++i) {
            P seed[std::size_t(count)];
            for (int n = 0; n < count; ++n) seed[n] = Real(n == i ? 1 : 0);
            P tangent = Real(0);
            ScalarsOf<Score, P> slopes{};
            features_vjp<Rows>(score_, row, p, f, seed, AlongRow<Real>{tangents, v, tangent},
                               slopes);
            for (std::size_t n = 0; n < slopes.size(); ++n) tangent += slopes[n] * dp[n];
            out.store(i, v, dual_pack(f[i], tangent));
          }
        }
      }
    });
  }
  void transform(RowSide side, Index h, Index first, int vectors,
                 const DualLanes<Real>& x) const override {
    if constexpr (Score::has_transform)
      DerivedDuals<Real>::transform(transform_, side, h, first, vectors, x);
  }
  void scores(const ScoreTile<Real>& tile, const ScoreTangentTile<Real>& moved) const override {
    Score::with_form(score_, [&](const auto& form) {
      for (int v = 0; v < tile.vectors; ++v)
        score_vector(form, tile, moved, v, tile.place->keys_of(v));
    });
  }

  // The score over dual packs, for scores with a transform.
  [[nodiscard]] const TransformScore<Score, Real>& transform_score() const { return transform_; }

 private:
  // Dual numbers cost little where every call is part of the loop, hence flatten.
  template <class Form>
  [[gnu::noinline, gnu::flatten]] void score_vector(const Form& of_op, ScoreTile<Real> tile,
                                                    ScoreTangentTile<Real> moved, int v,
                                                    const KeyRange keys) const {
    HeldForm<Form> form = of_op;
    const auto p = scalars_in_lanes<Score>(tile.scalars),
               dp = scalars_in_lanes<Score>(moved.scalars);
    const LanePairs<Score, Real> pairs(tile, v);
    const PairTangents<Score, Real> pair_tangents(tile, moved, v);
    const LaneTile<Real> dots = tile.dots, tangents = moved.tangents;
    if constexpr (GathersSums<Form>) {
      const auto by_sum = sum_tangents(form, pairs.query(), pair_tangents.query(), p, dp);
      for (Index j = keys.begin; j < keys.end; ++j) {
        const auto pair = pairs(j, dots.load(j, v));
        const auto d = pair_tangents(j, tangents.load(j, v), pair, pairs);
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
        const auto d = pair_tangents(j, tangents.load(j, v), pair, pairs);
        tangents.store(j, v, score_tangent<Score, Form, Real>(form, pair, p, d, dp));
      }
    }
  }
  // What each sum of a form that gathers them adds to a score's tangent: finish() is linear in the sums.
  template <class Form, class Query>
  [[nodiscard]] static auto sum_tangents(const Form& form, const Query& query, const Query& tangent,
                                         const ScalarsOf<Score, P>& p,
                                         const ScalarsOf<Score, P>& scalar_tangents) {
    std::array<P, std::size_t(Form::lane_sums)> by_sum;
    for (std::size_t n = 0; n < by_sum.size(); ++n) {
      std::array<P, std::size_t(Form::lane_sums)> one{};
      one[n] = Real(1);
      Query dquery{};
      ScalarsOf<Score, P> dp{};
      form.finish(one, query, p, dquery, dp);
      by_sum[n] = Real(0);
      for (std::size_t i = 0; i < dquery.size(); ++i) by_sum[n] += dquery[i] * tangent[i];
      for (std::size_t i = 0; i < dp.size(); ++i) by_sum[n] += dp[i] * scalar_tangents[i];
    }
    return by_sum;
  }

  const Score &score_, &direction_;
  [[no_unique_address]] AnyColumns<Score, Real> columns_;
  Lifted<Score::has_table, Score> lifted_;
  TransformScore<Score, Real> transform_;
  bool transform_moves_ = false;
  struct Nothing {};
  std::conditional_t<Score::has_positions, Score, Nothing> positions_;
};

template <class Normaliser, class Real>
class StreamJvpsOf final : public NormaliserJvps<Real> {
 public:
  using P = Pack<Real>;

  StreamJvpsOf(const Normaliser& normaliser, const Normaliser& direction)
      : normaliser_(normaliser), direction_(direction), moves_(moves(direction)) {
    if constexpr (has_learnt_keys<Normaliser>) this->learnt = learnt_of<Real>(direction);
  }

  void weigh(const LaneTile<Real>& scores, const LaneTile<Real>& tangents, const TilePlace& at,
             int vectors, const LaneTile<Real>& states, bool open, Real* pulled) const override {
    for (int v = 0; v < vectors; ++v) {
      const KeyRange keys = at.keys_of(v);
      weigh_vector(scores.part(keys.begin, keys.size()), tangents.part(keys.begin, keys.size()), v,
                   of(states), open, pulled + v * kLanes<Real>);
    }
  }
  void pull(const StreamQueries<Real>& queries, int v, const LaneTile<Real>& states,
            const LaneTile<Real>& inputs, Real* pulled) const override {
    P own = Real(0);
    if constexpr (query_inputs_of<Normaliser> != 0) {
      // Each lane has numbers of its own, whose gradients for delta = 1 are multiplied by their tangents.
      queries.dinputs.fill(Real(0));
      Normaliser slope = normaliser_;
      normaliser_.vjp(queries, of(states).load(v), P(Real(1)), slope);
      for (Index n = 0; n < inputs.rows; ++n) own += queries.dinputs.load(n, v) * inputs.load(n, v);
    }
    // Parameters: their gradients for delta = 1 in one lane, times their tangents.
    for (Index lane = 0; moves_ && lane < queries.valid; ++lane) {
      P delta = Real(0);
      delta.v[lane] = Real(1);
      Normaliser slope = normaliser_;
      visit_parameters(slope, [](const char*, auto& param) { param.set_zero(); });
      normaliser_.vjp(queries, of(states).load(v), delta, slope);
      own.v[lane] += along(slope);
    }
    (P::load(pulled) + own).store(pulled);
  }

 private:
  using States = StreamStates<Normaliser, Real>;
  [[nodiscard]] static States of(const LaneTile<Real>& states) {
    return States(states.data, states.lanes);
  }
  void weigh_vector(const LaneTile<Real>& scores, const LaneTile<Real>& tangents, int v,
                    const States& states, bool open, Real* pulled) const {
    auto state = states.load(v);
    const P factor = open ? P(Real(1)) : normaliser_.finish(state);
    P sum = state.sum, pull = P::load(pulled);
    Normaliser::with_weight(normaliser_, state, [&](const auto& weight_of) {
      const P zero = Real(0), one = Real(1);
      for (Index j = 0; j < scores.rows; ++j) {
        const P score = scores.load(j, v), tangent = tangents.load(j, v);
        const P raw = weight_of(score), weight = raw * factor;
        const auto hidden = is_hidden(score);
        sum += raw;
        const P own = normaliser_.dscore(state, score, weight, one, zero) * tangent;
        const P shared = normaliser_.dscore(state, score, weight, zero, one) * tangent;
        pull += zero_where(hidden, shared);
        scores.store(j, v, zero_where(hidden, weight));
        tangents.store(j, v, zero_where(hidden, own));
      }
    });
    pull.store(pulled);
    if (!open) return;
    state.sum = sum;
    states.store(v, state);
  }
  // The sum of slopes times tangents over the normaliser's parameters.
  [[nodiscard]] Real along(const Normaliser& slope) const {
    std::vector<Real> slopes;
    visit_parameters(slope, [&](const char*, const auto& param) {
      slopes.insert(slopes.end(), param.data(), param.data() + param.size());
    });
    double sum = 0;
    auto next = slopes.begin();
    visit_parameters(direction_, [&](const char*, const auto& param) {
      for (Index i = 0; i < param.size(); ++i) sum += double(*next++) * double(param[i]);
    });
    return Real(sum);
  }

  const Normaliser &normaliser_, &direction_;
  bool moves_;
};

// Has a row normaliser forward mode by hand?
template <class Normaliser, class Real>
concept HasRowJvp = requires(const Normaliser& normaliser, const RowBlock<Real>& block,
                             const RowTangents<Real>& tangents) {
  normaliser.jvp(block, tangents, normaliser);
};

template <class Normaliser, class Real>
class RowJvpsOf final : public NormaliserJvps<Real> {
 public:
  RowJvpsOf(const Normaliser& normaliser, const Normaliser& direction)
      : normaliser_(normaliser), direction_(direction) {
    if constexpr (!kByHand) lifted_ = dual_part(normaliser, direction);
  }
  void weights(RowBlock<Real>& block, const RowTangents<Real>& tangents) const override {
    if constexpr (kByHand)
      normaliser_.jvp(block, tangents, direction_);
    else
      for (Index i = 0; i < block.lanes(); ++i) weigh_row(block, tangents, i);
  }

 private:
  static constexpr bool kByHand = HasRowJvp<Normaliser, Real>;
  static constexpr std::size_t kMaps = std::size_t(Normaliser::maps);

  // Lane i: a row of scores becomes one of weights, and likewise their tangents, by dual numbers.
  void weigh_row(RowBlock<Real>& block, const RowTangents<Real>& tangents, Index i) const {
    const bool valid = i < block.valid_lanes;
    const LongHandRow<DualNumber> row =
        valid ? row_of(block, tangents, i) : LongHandRow<DualNumber>{};
    for (Index j = 0; j < block.keys(); ++j)
      block.scores[0].row(j)[i] = tangents.scores[0].row(j)[i] = Real(0);
    const std::vector<DualNumber> weights =
        valid ? long_hand_weights(lifted_, row) : std::vector<DualNumber>();
    for (std::size_t n = 0; n < weights.size(); ++n) {
      const Index j = row.keys[n] - block.first_key;
      block.scores[0].row(j)[i] = Real(weights[n].value);
      tangents.scores[0].row(j)[i] = Real(weights[n].grad[0]);
    }
    for (std::size_t m = 0; m < kMaps; ++m) {
      const DualNumber lse = row.keys.empty() ? dual_number(double(-kInfinity<Real>), 0)
                                              : lifted_.reference_lse(row, m);
      block.lse[m][i] = Real(lse.value);
      tangents.lse[m][i] = Real(lse.grad[0]);
    }
  }
  // What the query of lane i sees: keys that some map has a score for.
  [[nodiscard]] static LongHandRow<DualNumber> row_of(const RowBlock<Real>& block,
                                                      const RowTangents<Real>& tangents, Index i) {
    const auto at = [](const Real* values, const Real* moved, Index n) {
      return dual_number(double(values[n]), moved ? double(moved[n]) : 0.0);
    };
    LongHandRow<DualNumber> row;
    row.scores.resize(kMaps);
    row.head = block.head;
    row.query = block.first_query + i;
    for (Index j = 0; j < block.keys(); ++j) {
      bool seen = false;
      for (std::size_t m = 0; m < kMaps; ++m)
        seen = seen || block.scores[m].row(j)[i] != -kInfinity<Real>;
      if (!seen) continue;
      row.keys.push_back(block.first_key + j);
      for (std::size_t m = 0; m < kMaps; ++m) {
        const double score = double(block.scores[m].row(j)[i]);
        const double tangent = double(tangents.scores[m].row(j)[i]);
        row.scores[m].push_back(
            dual_number(score, score == double(-kInfinity<Real>) ? 0 : tangent));
      }
      if constexpr (key_inputs_of<Normaliser> != 0) {
        row.key_inputs.emplace_back();
        for (Index c = 0; c < key_inputs_of<Normaliser>; ++c)
          row.key_inputs.back().push_back(
              dual_number(double(block.key_inputs(j, c)), double(tangents.key_inputs(j, c))));
      }
    }
    if constexpr (Normaliser::uses_extra) row.extra = at(block.extra, tangents.extra, i);
    if constexpr (Normaliser::uses_query)
      for (Index c = 0; c < block.query.rows; ++c)
        row.query_row.push_back(at(block.query.row(c), tangents.query.row(c), i));
    for (Index c = 0; c < query_inputs_of<Normaliser>; ++c)
      row.query_inputs.push_back(at(block.query_inputs.row(c), tangents.query_inputs.row(c), i));
    return row;
  }

  const Normaliser &normaliser_, &direction_;
  Lifted<!kByHand, Normaliser> lifted_;
};

template <class Op>
class ReadoutJvpsOf final : public ReadoutJvps {
 public:
  ReadoutJvpsOf(const Op& op, const Op& direction) {
    if constexpr (!Op::ReadoutType::identity) {
      lifted_.score = dual_part(op.score, direction.score);
      lifted_.readout = dual_part(op.readout, direction.readout);
    }
  }
  void read_out(ReadoutContext<DualNumber>& context) const override {
    if constexpr (!Op::ReadoutType::identity) lifted_.read_out_reference(context);
  }

 private:
  Lifted<!Op::ReadoutType::identity, Op> lifted_;
};

// The parts of an op and of a direction of its parameters, which must outlive this.
template <class Op>
class OpJvpsOf {
 public:
  using Real = typename Op::Scalar;
  using Score = typename Op::ScoreType;
  using Normaliser = typename Op::NormaliserType;

  OpJvpsOf(const Op& op, const Op& direction)
      : direction_(direction),
        score_(op.score, direction.score),
        normaliser_(op.normaliser, direction.normaliser),
        readout_(op, direction) {}
  OpJvpsOf(const OpJvpsOf&) = delete;  // jvps() refers to its members

  [[nodiscard]] OpJvps<Real> jvps() const { return {score_, normaliser_, readout_}; }
  [[nodiscard]] const ScoreJvpsOf<Score, Real>& score() const { return score_; }
  [[nodiscard]] const Op& direction() const { return direction_; }

 private:
  const Op& direction_;
  ScoreJvpsOf<Score, Real> score_;
  std::conditional_t<Normaliser::streams, StreamJvpsOf<Normaliser, Real>,
                     RowJvpsOf<Normaliser, Real>>
      normaliser_;
  ReadoutJvpsOf<Op> readout_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
