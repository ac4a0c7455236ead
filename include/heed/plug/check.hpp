// SPDX-License-Identifier: Apache-2.0
#pragma once

// One sentence per missing member. A concept alone says "no matching function"; the doors call these
// checks first, so that the author of a variant reads what is missing, and where it is described.

#include <heed/plug/attention.hpp>
#include <heed/plug/derivative.hpp>

#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Members that every part has.
template <class Part>
consteval bool check_part() {
  static_assert(
      requires(Part p) { p.visit([](const char*, auto&) {}); },
      "heed: a part of an op needs visit(f), which calls f(name, parameter) for each of its "
      "parameters (plug/score.hpp)");
  static_assert(
      requires(const Part p, const Geometry& g) { p.validate(g, ""); },
      "heed: a part of an op needs validate(geometry, where) const (plug/score.hpp)");
  static_assert(
      requires { typename Part::template rebind<double>; },
      "heed: a part of an op needs `template <class U> using rebind = Part<U>;`, so that the "
      "reference can run it on other scalars (plug/attention.hpp)");
  return true;
}

}  // namespace detail

template <class Score, class Real>
consteval bool check_score() {
  static_assert(
      requires {
        { Score::scalars } -> std::convertible_to<int>;
      },
      "heed: a score needs `static constexpr int scalars`, the numbers per head that score() "
      "reads (plug/score.hpp)");
  static_assert(
      requires {
        { Score::query_features } -> std::convertible_to<int>;
        { Score::key_features } -> std::convertible_to<int>;
        { Score::plain } -> std::convertible_to<bool>;
        { Score::has_projection } -> std::convertible_to<bool>;
        { Score::has_table } -> std::convertible_to<bool>;
      },
      "heed: a score needs plain, query_features, key_features, has_projection and "
      "has_table; inherit NoSideValues if it reads none (plug/score.hpp)");
  static_assert(detail::check_part<Score>());
  static_assert(
      requires(const Score s, Index h) {
        { s.scalar(0, h) } -> std::convertible_to<Real>;
      },
      "heed: a score needs scalar(i, head) const, the value of its number i "
      "(plug/score.hpp)");
  static_assert(
      requires(const Score s, const double* dp, Score& grad) {
        s.chain_scalars(Index(0), dp, grad);
      },
      "heed: a score needs chain_scalars(head, dp, grad) const, which adds the gradients of "
      "its numbers to its parameters (plug/score.hpp)");
  static_assert(
      requires(const Score s, const PairOf<Score, Pack<Real>>& pair,
               const ScalarsOf<Score, Pack<Real>>& p) {
        { s.score(pair, p) } -> std::convertible_to<Pack<Real>>;
      },
      "heed: a score needs `template <class S> S score(const PairOf<Score, S>& pair, const "
      "ScalarsOf<Score, S>& p) const` (plug/score.hpp)");
  if constexpr (Score::has_projection)
    static_assert(
        requires(const Score s) { s.projection().data(); },
        "heed: a score with has_projection needs projection() const (plug/score.hpp)");
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
consteval bool check_normaliser() {
  static_assert(
      requires {
        { Normaliser::streams } -> std::convertible_to<bool>;
        { Normaliser::maps } -> std::convertible_to<int>;
        { Normaliser::diagnostics } -> std::convertible_to<int>;
        { Normaliser::uses_extra } -> std::convertible_to<bool>;
      },
      "heed: a normaliser needs streams, maps, diagnostics and uses_extra "
      "(plug/normaliser.hpp)");
  static_assert(Normaliser::maps == 1 || Normaliser::maps == 2,
                "heed: a normaliser has one or two score maps (plug/normaliser.hpp)");
  static_assert(detail::check_part<Normaliser>());
  static_assert(
      requires(const Normaliser n, const Geometry& g) {
        { n.source(g, Index(0), 0) } -> std::same_as<Source>;
        { n.query_heads(Index(1)) } -> std::convertible_to<Index>;
      },
      "heed: a normaliser needs source(geometry, head, map) and query_heads(heads) "
      "(plug/normaliser.hpp)");
  if constexpr (!Normaliser::streams) {
    static_assert(
        requires(const Normaliser n) {
          { n.work_tiles(true) } -> std::convertible_to<Index>;
        },
        "heed: a row normaliser needs work_tiles(backward) const (plug/normaliser.hpp)");
    static_assert(
        requires(const Normaliser n, RowBlock<Real>& block) { n.forward(block); },
        "heed: a row normaliser needs forward(RowBlock&) const (plug/normaliser.hpp)");
    static_assert(
        requires(const Normaliser n, RowBlock<Real>& block, Normaliser& grad) {
          n.vjp(block, grad);
        },
        "heed: a row normaliser needs vjp(RowBlock&, grad) const (plug/normaliser.hpp)");
  }
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
        { Readout::diagnostics } -> std::convertible_to<int>;
      },
      "heed: a readout needs identity, saves_mixed, uses_query, uses_own_rows, uses_extra "
      "and diagnostics; inherit PlainReadout for the defaults (plug/readout.hpp)");
  static_assert(detail::check_part<Readout>());
  static_assert(
      requires(const Readout r, const Geometry& g) {
        { r.work_rows(g, true) } -> std::convertible_to<Index>;
        { r.extra_dim(g) } -> std::convertible_to<Index>;
      },
      "heed: a readout needs work_rows(geometry, backward) and extra_dim(geometry) "
      "(plug/readout.hpp)");
  static_assert(
      requires(const Readout r, const ReadoutPanel<Real>& panel) { r.forward(panel); },
      "heed: a readout needs forward(panel) const (plug/readout.hpp)");
  static_assert(
      requires(const Readout r, const ReadoutPanel<Real>& panel, Readout& grad) {
        r.vjp(panel, grad);
      },
      "heed: a readout needs vjp(panel, grad) const (plug/readout.hpp)");
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
  static_assert(check_score<typename Op::ScoreType, typename Op::Scalar>());
  static_assert(check_normaliser<typename Op::NormaliserType, typename Op::Scalar>());
  static_assert(check_readout<typename Op::ReadoutType, typename Op::Scalar>());
  static_assert(AttentionOp<Op>, "heed: Op does not satisfy AttentionOp (plug/attention.hpp)");
  return true;
}

}  // namespace HEED_ABI
}  // namespace heed
