// SPDX-License-Identifier: Apache-2.0
#pragma once

// Softmax as a streaming normaliser: a row arrives in chunks of keys.
//
//   weight_j = 2^(x_j) / sum_j 2^(x_j),   x_j = (s_j - shift) log2(e) - reference
//
// `reference` is the integer ceiling of the running maximum in log2 units, so that a moved reference
// rescales earlier results by an exact power of two; `shift` is 0 until scores are so large that they
// have no fraction left, and then takes the maximum's place.
//
// Backward (G = dL/dweight, delta = sum_j weight_j G_j):   dL/ds_j = weight_j (G_j - delta)
//
// Bounds  scores up to the largest finite number; a row without a visible key has sum 0, factor 0 and
//         lse -infinity; a visible NaN makes its row NaN and no other.

#include <heed/plug/normaliser.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/scratch.hpp>

#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Online-softmax state of each query of a panel: shift, reference (in log2 units) and sum, a lane per query.
template <class Real>
struct SoftmaxState {
  Real *shift, *reference, *sum;  // [lanes]
  static constexpr Index rows = 3;
  [[nodiscard]] static SoftmaxState take(Scratch<Real>& scratch, Index lanes) {
    return {scratch.take(lanes), scratch.take(lanes), scratch.take(lanes)};
  }
};

template <class Real>
struct Softmax : NormaliserDefaults {
  static constexpr bool streams = true;
  using PlaceFree = Softmax;
  using P = Pack<Real>;

  static void begin(const SoftmaxState<Real>& state, Index lanes) {
    std::fill(state.shift, state.shift + lanes, Real(0));
    std::fill(state.reference, state.reference + lanes, -kInfinity<Real>);
    std::fill(state.sum, state.sum + lanes, Real(0));
  }

  // Moves the reference of vector v up to chunk_max (natural units). Returns the factor for what was
  // accumulated against the old one; `moved` tells whether any lane's factor differs from 1.
  [[nodiscard]] static P move_reference(const SoftmaxState<Real>& state, int v, P chunk_max,
                                        bool& moved) {
    const Index at = v * kLanes<Real>;
    const P shift = P::load(state.shift + at), reference = P::load(state.reference + at);
    const P top = chunk_max * Real(kLog2e);
    const P limit = kIntegerLimit;
    const auto huge = (top > limit) | (top < -limit);
    const P new_shift = select(huge, chunk_max, P(Real(0)));
    const P new_reference = select(huge, P(Real(0)), ceiling(top));
    // Position of both references on one axis; a huge one never compares close to a small one.
    const auto higher = (new_shift > shift) | ((new_shift == shift) & (new_reference > reference));
    const auto first = reference == P(-kInfinity<Real>);
    const auto visible = (chunk_max == chunk_max) & (chunk_max > P(-kInfinity<Real>));
    const auto moves = visible & (higher | first);
    if (!any_lane(moves)) return Real(1);
    moved = true;
    // Not above 0 in lanes that move; in others anything, which exp2_weight must not see.
    const P difference =
        min((shift - new_shift) * Real(kLog2e) + (reference - new_reference), P(Real(0)));
    select(moves, new_shift, shift).store(state.shift + at);
    select(moves, new_reference, reference).store(state.reference + at);
    const P factor = zero_where(first, exp2_weight(difference));
    const P rescale = select(moves, factor, P(Real(1)));
    (P::load(state.sum + at) * rescale).store(state.sum + at);
    return rescale;
  }

  // Scores of vector v become unnormalised weights; their sum is added to the state.
  static void exponentiate(const LaneTile<Real>& scores, int v, const SoftmaxState<Real>& state) {
    const P shift = P::load(state.shift + v * kLanes<Real>);
    if (any_lane(shift != P(Real(0))))
      exponentiate_about(scores, v, state, [shift](P score) { return score - shift; });
    else
      exponentiate_about(scores, v, state, [](P score) { return score; });
  }

  // 1 / sum, 0 for a row that sees no key; NaN stays NaN.
  [[nodiscard]] static P factor(const SoftmaxState<Real>& state, int v) {
    return inverse_or_zero(P::load(state.sum + v * kLanes<Real>));
  }

  // Natural-log sum of exp of lane i.
  [[nodiscard]] static Real lse(const SoftmaxState<Real>& state, Index i) {
    if (state.sum[i] == Real(0)) return -kInfinity<Real>;
    return state.shift[i] + (state.reference[i] * Real(kLn2) + std::log(state.sum[i]));
  }

  [[nodiscard]] static P weight_of(P score, P shift, P reference) {
    return shifted_weight(score - shift, reference);
  }
  // The reference to subtract: 0 where no key was seen yet.
  [[nodiscard]] static P exponent_base(const SoftmaxState<Real>& state, int v) {
    const P reference = P::load(state.reference + v * kLanes<Real>);
    return zero_where(reference == P(-kInfinity<Real>), reference);
  }

  // In long hand: weights of one row, given its visible scores (rows[map][key]).
  template <class S>
  [[nodiscard]] std::vector<S> reference(const std::vector<std::vector<S>>& rows, Index,
                                         const S&) const {
    return long_hand_softmax(rows[0]);
  }

 private:
  // Beyond it, floating-point numbers are whole: 2^20 (float), 2^49 (double).
  static constexpr Real kIntegerLimit = detail::FloatLayout<Real>::round_magic / Real(12);

  [[nodiscard]] static P shifted_weight(P score, P reference) {
    return exp2_weight(mul_add(score, P(Real(kLog2e)), -reference));
  }

  template <class Shifted>
  static void exponentiate_about(const LaneTile<Real>& scores, int v,
                                 const SoftmaxState<Real>& state, Shifted&& shifted) {
    const Index at = v * kLanes<Real>;
    const P reference = exponent_base(state, v);
    P sum = P::load(state.sum + at);
    Real* cell = scores.data + at;
    for (Index j = 0; j < scores.rows; ++j, cell += scores.lanes) {
      const P weight = shifted_weight(shifted(P::load(cell)), reference);
      weight.store(cell);
      sum += weight;
    }
    sum.store(state.sum + at);
  }

  [[nodiscard]] static P ceiling(P x) {
    const P rounded = detail::integer_of(P(x + detail::FloatLayout<Real>::round_magic));
    return select(rounded < x, rounded + Real(1), rounded);
  }
};

}  // namespace HEED_ABI
}  // namespace heed
