// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax of a row that is read once:
//
//   weight_j = 2^(x_j) / sum_j 2^(x_j),   x_j = (s_j - shift) log2(e) - reference
//
// `reference` is the integer ceiling of the running maximum in log2 units, so that a moved reference
// rescales earlier results by an exact power of two; `shift` is 0 until scores are so large that
// they have no fraction left; from then on it is the maximum.
//
// Backward (G = dL/dweight, delta = sum_j weight_j G_j - dL/dlse):   dL/ds_j = weight_j (G_j - delta)
//
// Bounds  scores up to the largest finite number; a row without a visible key has sum 0, factor 0 and
//         lse -infinity; a visible NaN makes its row NaN and no other.
//
// A softmax with one more term in its sum, which has no value, begins with that term: begin_with(score).

#include <heed/plug/streamed_rows.hpp>
#include <heed/simd/log.hpp>

#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct Softmax : StreamedRows<Real, 2> {
  static constexpr bool needs_weight = true, differentiates_lse = true;
  using PlaceFree = Softmax;
  using Mergeable = Softmax;
  using Base = StreamedRows<Real, 2>;
  using typename Base::P, typename Base::State, typename Base::Queries;

  // The state of a row before its first key: shift 0, reference -infinity.
  [[nodiscard]] State begin(const Queries&) const { return {P(Real(0)), {P(Real(0)), nothing()}}; }
  // The state of a row that has seen one key with this score, whose value is 0.
  [[nodiscard]] State begin_with(P score) const {
    State state{P(Real(0)), {P(Real(0)), nothing()}};
    bool moved = false;
    (void)move(state, score, moved);
    state.sum = weight(state, score);
    return state;
  }

  [[nodiscard]] P move(State& state, P top, bool& moved) const {
    const P in_log2 = top * Real(kLog2e);
    const P limit = kIntegerLimit;
    const auto huge = (in_log2 > limit) | (in_log2 < -limit);
    const auto visible = (top == top) & (top > nothing());
    return raise(state, select(huge, top, P(Real(0))), select(huge, P(Real(0)), ceiling(in_log2)),
                 visible, moved);
  }

  void join(State& state, State other, P& factor, P& other_factor) const {
    bool moved = false;
    factor = raise(state, other.own[0], other.own[1], other.own[1] > nothing(), moved);
    other_factor = raise(other, state.own[0], state.own[1], state.own[1] > nothing(), moved);
  }

  [[nodiscard, gnu::always_inline]] P weight(const State& state, P score) const {
    const P reference = zero_where(state.own[1] == nothing(), state.own[1]);  // no key was seen yet
    return exp2_weight(mul_add(score - state.own[0], P(Real(kLog2e)), -reference));
  }

  // Removes the subtraction of the shift where it is 0, which it nearly always is.
  template <class Normaliser, class F>
  static void with_weight(const Normaliser& normaliser, const State& state, F&& f) {
    if (any_lane(state.own[0] != P(Real(0)))) return Base::with_weight(normaliser, state, f);
    State unshifted = state;
    unshifted.own[0] = Real(0);
    Base::with_weight(normaliser, unshifted, f);
  }

  // 1 / sum, 0 for a row that sees no key; NaN stays NaN.
  [[nodiscard]] P finish(const State& state) const { return inverse_or_zero(state.sum); }

  // Natural-log sum of exp; -infinity for a row that sees no key.
  [[nodiscard]] P lse(const State& state) const {
    const P log = state.own[0] + (state.own[1] * Real(kLn2) + math::log(state.sum));
    return select(state.sum == P(Real(0)), nothing(), log);
  }

  [[nodiscard, gnu::always_inline]] P dscore(const State&, P, P weight, P pull, P delta) const {
    return weight * (pull - delta);
  }

  // Reference: the weights of one row.
  template <class S>
  [[nodiscard]] std::vector<S> reference(const LongHandRow<S>& row) const {
    return long_hand_softmax(row.scores[0]);
  }

 private:
  // Floating-point numbers beyond it are whole: 2^20 (float), 2^49 (double).
  static constexpr Real kIntegerLimit = detail::FloatLayout<Real>::round_magic / Real(12);
  [[nodiscard]] static P nothing() { return -kInfinity<Real>; }

  // Raises the references of the lanes where `may` is set to new ones, if these are higher; returns
  // the factor of earlier weights.
  template <class Lanes>
  [[nodiscard]] static P raise(State& state, P new_shift, P new_reference, Lanes may, bool& moved) {
    P &shift = state.own[0], &reference = state.own[1];
    // Position of both references on one axis; a huge one never compares close to a small one.
    const auto higher = (new_shift > shift) | ((new_shift == shift) & (new_reference > reference));
    const auto first = reference == nothing();
    const auto moves = may & (higher | first);
    if (!any_lane(moves)) return Real(1);
    moved = true;
    // At most 0 in lanes that move; other lanes may hold any number, which exp2_weight must not see.
    const P difference =
        min((shift - new_shift) * Real(kLog2e) + (reference - new_reference), P(Real(0)));
    shift = select(moves, new_shift, shift);
    reference = select(moves, new_reference, reference);
    const P factor = zero_where(first, exp2_weight(difference));
    return select(moves, factor, P(Real(1)));
  }

  [[nodiscard]] static P ceiling(P x) {
    const P rounded = detail::integer_of(P(x + detail::FloatLayout<Real>::round_magic));
    return select(rounded < x, rounded + Real(1), rounded);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
