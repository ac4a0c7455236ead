// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks with one sentence per missing member. A concept alone says "no matching function". Public calls make these checks
// first, so that the author of a variant reads which member is missing, and where it is described.

#include <heed/plug/attention.hpp>
#include <heed/plug/derivative.hpp>
#include <heed/plug/feature_calls.hpp>
#include <heed/plug/row_calls.hpp>
#include <heed/plug/token_inputs.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Members that every part has.
template <class Part>
consteval bool check_part() {
  static_assert(
      requires(Part p) { p.keep_jointly(); },
      "heed: a part of an op inherits PlainScore, PlainRows or PlainReadout, or has "
      "keep_jointly() (plug/parameters.hpp)");
  static_assert(
      !requires(Part p) { p.visit([](const char*, auto&) {}); },
      "heed: a part of an op names its parameters in `parameters`; the engine asks for no "
      "visit(f) (plug/parameters.hpp)");
  return true;
}

// True if the Param that `positions` points to is an entry of the score's list, and has a shape.
template <class Score>
consteval bool find_positions() {
  bool found = false;
  for_each_entry<Score>([&]<class Entry>(const Entry& entry) {
    using Pointer = std::remove_cvref_t<decltype(Score::positions)>;
    if constexpr (Entry::kind == ParameterKind::tensor || Entry::kind == ParameterKind::fixed)
      if constexpr (std::is_same_v<decltype(entry.member), Pointer>)
        found |= entry.member == Score::positions;
  });
  return found;
}
template <class Score>
inline constexpr bool names_positions = find_positions<Score>();

// Checks the members of a streaming normaliser on probes; plug/streaming.hpp brings it.
template <class Normaliser, class Real>
struct StreamProbe;

// Finds a member called score_vjp, whatever its signature: if the score has one, the name is
// ambiguous in a class that inherits both.
struct AnyScoreVjp {
  int score_vjp;
};
template <class Score>
struct BothScoreVjps : Score, AnyScoreVjp {};
template <class Score>
inline constexpr bool names_score_vjp = !requires {
  &BothScoreVjps<Score>::score_vjp;
};

// Finds a normaliser's vjp in the same way.
struct AnyVjp {
  int vjp;
};
template <class Normaliser>
struct BothVjps : Normaliser, AnyVjp {};
template <class Normaliser>
inline constexpr bool names_vjp = !requires {
  &BothVjps<Normaliser>::vjp;
};

// True if the score has functions for the features of such rows.
template <class Rows, class Score, class Row>
inline constexpr bool has_features = requires(const Score& score, const Row& row,
                                              typename Row::Scalar* f) {
  Rows::of(score, row, f);
}
|| requires(const Score& score, const Row& row, const ScalarsOf<Score, typename Row::Scalar>& p,
            typename Row::Scalar* f) {
  Rows::of(score, row, p, f);
};

// The parts of check_score() and check_normaliser() below: what a score says of its tables, a normaliser of its stream or its rows.
template <class Score, class Real>
consteval bool check_tables() {
  if constexpr (Score::has_positions)
    static_assert(
        requires(const Score s) { (s.*Score::positions).extent(1); } &&
            (buckets_by_distance<Score> ||
             requires(const Score s) { s.bucket(Index(0), Index(0)); }),
        "heed: a score with a table of positions needs `positions`, a pointer to its Param, and "
        "bucket(distance) or bucket(i, j) const (plug/score.hpp)");
  static_assert(
      Score::has_positions || (
                                  !requires(const Score s) { s.bucket(Index(0)); } &&
                                  !requires(const Score s) { s.bucket(Index(0), Index(0)); }),
      "heed: a score with bucket() needs `positions`, a pointer to its Param, without "
      "which pair.position is 0 (plug/score.hpp)");
  if constexpr (Score::has_positions)
    static_assert(names_positions<Score>,
                  "heed: `parameters` of the score does not name its table of positions: add "
                  "heed::tensor(name, &Score::table, &Score::shape) (plug/score.hpp)");
  if constexpr (Score::has_table)
    static_assert(
        requires(const Score s, Real* out, const double* d, Score& grad) {
          { s.table_size() } -> std::convertible_to<Index>;
          s.prepare_table(Index(0), Index(0), out);
          s.table_vjp(Index(0), Index(0), d, grad);
        },
        "heed: a score with has_table needs table_size(), prepare_table(head, dim, out) and "
        "table_vjp(head, dim, dtable, grad) (plug/score.hpp)");
  return true;
}

template <class Normaliser, class Real>
consteval bool check_stream() {
  using P = Pack<Real>;
  static_assert(key_inputs_of<Normaliser> == 0,
                "heed: a streaming normaliser reads numbers of its query's token alone and has no "
                "key_inputs; a number of a key belongs into its score, or the normaliser inherits "
                "PlainRows (plug/token_inputs.hpp)");
  static_assert(Normaliser::maps == 1,
                "heed: a streaming normaliser has one score map; with more, whole rows are "
                "weighed by one that inherits PlainRows (plug/normaliser.hpp)");
  static_assert(
      requires { typename Normaliser::State; },
      "heed: a streaming normaliser inherits StreamedRows<Real, numbers> (plug/streaming.hpp)");
  if constexpr (requires {
                  typename Normaliser::State;
                  sizeof(StreamProbe<Normaliser, Real>);
                })
    static_assert(StreamProbe<Normaliser, Real>::check());
  static_assert(
      requires(const Normaliser n, const typename Normaliser::State& state, P score) {
        { n.weight(state, score) } -> std::convertible_to<P>;
      },
      "heed: a streaming normaliser needs weight(state, score) const (plug/streaming.hpp)");
  static_assert(
      requires(const Normaliser n, const typename Normaliser::State& state, P x) {
        { n.dscore(state, x, x, x, x) } -> std::convertible_to<P>;
      },
      "heed: a streaming normaliser needs dscore(state, score, weight, pull, delta) const "
      "(plug/streaming.hpp)");
  return true;
}

template <class Normaliser, class Real>
consteval bool check_rows() {
  static_assert(
      requires(const Normaliser n) {
        { n.work_tiles(true) } -> std::convertible_to<Index>;
      },
      "heed: a row normaliser needs work_tiles(backward) const (plug/normaliser.hpp)");
  if constexpr (HasRowVjp<Normaliser, Real> || names_vjp<Normaliser>) {
    static_assert(
        requires(const Normaliser n, RowBlock<Real>& block) { n.forward(block); },
        "heed: a row normaliser needs forward(RowBlock&) const (plug/normaliser.hpp)");
    static_assert(HasRowVjp<Normaliser, Real>,
                  "heed: a row normaliser needs vjp(RowBlock&, grad) const (plug/normaliser.hpp)");
  } else {
    static_assert(!Normaliser::differentiates_lse,
                  "heed: a normaliser without vjp() gives no lse of its own: "
                  "differentiates_lse needs vjp(RowBlock&, grad) (plug/normaliser.hpp)");
    static_assert(
        knows_row_formulas<Normaliser, Real>,
        "heed: a row normaliser needs vjp(RowBlock&, grad) const beside forward(RowBlock&) "
        "const, or else `auto forward(const auto& row) const` alone and a line "
        "`#include <heed/plug/row_formula.hpp>`, which differentiates it");
    if constexpr (knows_row_formulas<Normaliser, Real>)
      static_assert(RowFormula<Normaliser, Real>::check());
  }
  return true;
}

}  // namespace detail

template <class Score, class Real>
consteval bool check_score() {
  static_assert(
      requires {
        { Score::query_features } -> std::convertible_to<int>;
        { Score::key_features } -> std::convertible_to<int>;
        { Score::counts_visible } -> std::convertible_to<bool>;
        { Score::plain } -> std::convertible_to<bool>;
        { Score::has_projection } -> std::convertible_to<bool>;
        { Score::has_table } -> std::convertible_to<bool>;
        { Score::has_positions } -> std::convertible_to<bool>;
        { Score::has_transform } -> std::convertible_to<bool>;
        { Score::gathers_sums } -> std::convertible_to<bool>;
      },
      "heed: a score inherits PlainScore, or ScoreWith<its derived values> (plug/score.hpp)");
  static_assert(detail::check_part<Score>());
  if constexpr (requires { Score::check_formula(); }) static_assert(Score::check_formula());
  static_assert(
      requires(const Score s, const PairOf<Score, Pack<Real>>& pair,
               const ScalarsOf<Score, Pack<Real>>& p) {
        { s.score(pair, p) } -> std::convertible_to<Pack<Real>>;
      },
      "heed: a score needs `template <class S> S score(const PairOf<Score, S>& pair, const "
      "auto& p) const` (plug/score.hpp)");
  static_assert(
      !detail::names_score_vjp<Score> || HasScoreVjp<Score, Pack<Real>>,
      "heed: score_vjp must be callable as score_vjp(pair, p, g, d, dp) (plug/score.hpp)");
  static_assert(HasScoreVjp<Score, Pack<Real>> || detail::knows_lane_duals<Pack<Real>>,
                "heed: a score without score_vjp() is differentiated on dual numbers: add a line "
                "`#include <heed/autodiff/lane_dual.hpp>`, or have its formula in an OwnScore "
                "(plug/own_score.hpp)");
  if constexpr (sums_inputs<Score>)
    static_assert(
        requires(const Score s) { s.summand(1.0); } && key_inputs_of<Score> > 0 &&
            query_inputs_of<Score> == 0,
        "heed: a score with sums_inputs needs key_inputs, no query_inputs, and summand(x) const "
        "(plug/token_inputs.hpp)");
  if constexpr (Score::has_projection)
    static_assert(
        requires(const Score s) { s.projection().data(); },
        "heed: a score with has_projection needs projection() const (plug/score.hpp)");
  if constexpr (Score::has_transform) {
    static_assert(
        requires(const Score s, const LaneRowInPlace<Real>& x, Score& grad) {
          { s.differs_by_head() } -> std::convertible_to<bool>;
          s.transform(RowSide::key, Index(0), x);
          s.transform_vjp(
              RowSide::key, Index(0), x, x, [](Pack<Real>) { return Real(0); }, grad);
        },
        "heed: a transform inherits PlainTransform and needs transform(side, head, x) const and "
        "transform_vjp(side, head, x, d, sum, grad) const (plug/transform.hpp)");
  }
  static_assert(detail::check_tables<Score, Real>());
  return true;
}

template <class Normaliser, class Real>
consteval bool check_normaliser() {
  static_assert(
      requires {
        { Normaliser::streams } -> std::convertible_to<bool>;
        { Normaliser::maps } -> std::convertible_to<int>;
        { Normaliser::diagnostics } -> std::convertible_to<int>;
        { Normaliser::uses_extra } -> std::convertible_to<bool>;
        { Normaliser::differentiates_lse } -> std::convertible_to<bool>;
      },
      "heed: a normaliser inherits PlainRows (plug/normaliser.hpp) or StreamedRows "
      "(plug/streaming.hpp)");
  static_assert(Normaliser::maps >= 1 && Normaliser::maps <= kMostMaps,
                "heed: a normaliser has 1 to 8 score maps per output head (plug/normaliser.hpp)");
  static_assert(detail::check_part<Normaliser>());
  static_assert(
      requires(const Normaliser n, const Geometry& g) {
        { n.source(g, Index(0), 0) } -> std::same_as<Source>;
        { n.query_heads(Index(1)) } -> std::convertible_to<Index>;
      },
      "heed: a normaliser needs source(geometry, head, map) and query_heads(heads) "
      "(plug/normaliser.hpp)");
  static_assert(!has_learnt_keys<Normaliser> || Normaliser::streams,
                "heed: a normaliser with learnt_keys streams (plug/streaming.hpp)");
  if constexpr (Normaliser::streams)
    static_assert(detail::check_stream<Normaliser, Real>());
  else
    static_assert(detail::check_rows<Normaliser, Real>());
  return true;
}

template <class Readout, class Real>
consteval bool check_readout() {
  static_assert(
      requires {
        { Readout::identity } -> std::convertible_to<bool>;
        { Readout::saves_mixed } -> std::convertible_to<bool>;
        { Readout::uses_query } -> std::convertible_to<bool>;
        { Readout::uses_own_rows } -> std::convertible_to<bool>;
        { Readout::uses_extra } -> std::convertible_to<bool>;
        { Readout::uses_lse } -> std::convertible_to<bool>;
        { Readout::uses_score } -> std::convertible_to<bool>;
        { Readout::rehearses } -> std::convertible_to<bool>;
        { Readout::counts_steps } -> std::convertible_to<bool>;
        { Readout::diagnostics } -> std::convertible_to<int>;
      },
      "heed: a readout inherits PlainReadout (plug/readout.hpp)");
  static_assert(detail::check_part<Readout>());
  static_assert(
      key_inputs_of<Readout> == 0,
      "heed: a readout reads numbers of its query's token alone and has no key_inputs; the "
      "score and a row normaliser may have some (plug/token_inputs.hpp)");
  static_assert(!detail::maps_values<Readout> || detail::knows_readout_formulas<Readout, Real>,
                "heed: a readout with value(x) needs a line `#include "
                "<heed/plug/readout_formula.hpp>`, which differentiates it");
  // The members that a readout with uses_score must have depend on the score.
  if constexpr (!Readout::uses_score) {
    static_assert(
        requires(const Readout r, const Geometry& g) {
          { r.work_rows(g, true) } -> std::convertible_to<Index>;
          { r.extra_dim(g) } -> std::convertible_to<Index>;
        },
        "heed: a readout needs work_rows(geometry, backward) and extra_dim(geometry) "
        "(plug/readout.hpp)");
    if constexpr (HasReadoutVjp<Readout, Real> || detail::names_vjp<Readout>) {
      static_assert(
          requires(const Readout r, const ReadoutPanel<Real>& panel) { r.forward(panel); },
          "heed: a readout needs forward(panel) const (plug/readout.hpp)");
      static_assert(HasReadoutVjp<Readout, Real>,
                    "heed: a readout needs vjp(panel, grad) const (plug/readout.hpp)");
    } else {
      static_assert(
          detail::knows_readout_formulas<Readout, Real>,
          "heed: a readout needs vjp(panel, grad) const beside forward(panel) const, or else `auto "
          "forward(const auto& row) const` alone and a line `#include "
          "<heed/plug/readout_formula.hpp>`, which differentiates it");
      if constexpr (detail::knows_readout_formulas<Readout, Real>)
        static_assert(detail::ReadoutFormula<Readout, Real>::check());
    }
  }
  return true;
}

// Fails to compile, with one sentence, when Op is not an op that the engine can run.
template <class Op>
consteval bool check_attention_op() {
  static_assert(
      requires {
        typename Op::Scalar;
        typename Op::ScoreType;
        typename Op::NormaliserType;
        typename Op::ReadoutType;
      },
      "heed: an op names Scalar, ScoreType, NormaliserType and ReadoutType; build it with "
      "Attention<T, Score, Normaliser, Readout> (plug/attention.hpp)");
  static_assert(
      requires(const Op& op) {
        op.score;
        op.normaliser;
        op.readout;
      },
      "heed: an op has the members score, normaliser and readout; build it with "
      "Attention<T, Score, Normaliser, Readout> (plug/attention.hpp)");
  static_assert(check_score<typename Op::ScoreType, typename Op::Scalar>());
  static_assert(check_normaliser<typename Op::NormaliserType, typename Op::Scalar>());
  static_assert(check_readout<typename Op::ReadoutType, typename Op::Scalar>());
  if constexpr (Op::ReadoutType::uses_score)
    static_assert(
        requires(const Op op, const ReadoutPanel<typename Op::Scalar>& panel) {
          op.readout.forward(panel, op.score);
        },
        "heed: the readout works on parameters of a score that this op does not have "
        "(plug/readout.hpp)");
  static_assert(
      requires(Op op, const Op& constant, const Geometry& g) {
        constant.validate(g, "");
        op.visit([](const char*, Param<typename Op::Scalar>&) {});
      },
      "heed: an op has validate(geometry, where) const and visit(f); build it with "
      "Attention<T, Score, Normaliser, Readout> (plug/attention.hpp)");
  static_assert(!sums_inputs<typename Op::NormaliserType> && !sums_inputs<typename Op::ReadoutType>,
                "heed: sums of numbers of tokens are for scores: a normaliser or readout has no "
                "sums_inputs (plug/token_inputs.hpp)");
  static_assert(!table_by_distance<typename Op::ScoreType> || Op::NormaliserType::maps == 1,
                "heed: a score with a table of relative rows has one score map (plug/score.hpp)");
  static_assert(
      !Op::ReadoutType::uses_lse || Op::NormaliserType::differentiates_lse,
      "heed: the readout reads lse, and the normaliser of this op has no derivative of it "
      "(differentiates_lse in plug/normaliser.hpp)");
  return true;
}

}  // namespace HEED_ABI
}  // namespace heed
