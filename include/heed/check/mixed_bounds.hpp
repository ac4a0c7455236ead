// SPDX-License-Identifier: Apache-2.0
#pragma once

// How far results in Precision::mixed lie from exact ones. Roundings of float, which Precision::storage has as well,
// come on top.
//
// With u = 2^-8 (kBfloatRoundoff), x = scale q.k, S_ij = |scale| sum_c |q_ic k_jc|, and primes for mixed precision:
//
//   |x' - x| <= dot S_ij               dot = (1 + u)^2 - 1 = 0.0078: q and k are rounded, their products are not
//   |s' - s| <= e                      of a row's scores; dot max_j S_ij for plain attention
//   |p' - p| <= weight(e) p            weight(e) = e^(2 e) - 1, since p'_j = p_j e^(d_j) / sum p e^d with |d| <= e
//   |O' - O| <= out(e) sum_j p_j |v_j|     out(e) = (1 + weight(e)) (1 + u)^2 - 1: weights and values are rounded
//
// and backward, with X = V dO^T, A_ij = sum_c |v_jc dO_ic| and B_i = sum_j p_ij A_ij, for plain attention:
//
//   |X' - X| <= dot A_ij,   |delta' - delta| <= out(e) B_i,   |X - delta| <= A_ij + B_i
//   |dS' - dS| <= dscore(e) p (A_ij + B_i)     dscore(e) = (1 + weight(e)) out(e) + weight(e)
//   |dV' - dV| <= out(e) sum_i p_ij |dO_i|
//   |dQ' - dQ| <= gradient(e) |scale| sum_j p_ij (A_ij + B_i) |k_j|,   dK with |q_i| and the sum over i
//                                              gradient(e) = (1 + dscore(e)) (1 + u)^2 - 1
//
// What a variant makes of it, for its mixed rows m (O above) and its output:
//
//   sdpa, prototype, dialectical   e = dot max_j S_ij. Categories, t and the recursion are computed from float rows;
//                                  what the recursion makes of an error of m is a matter of its weights
//   intent                         the same, and gates are at most 1: out is off by no more than m
//   differential                   the same with p = P1 + |lambda| P2 and the larger e of both maps. The norm of V1
//                                  divides an error of m by the row's root mean square, as it does the row
//   dar, ode                       e has another part: ops/dar.hpp and ops/resonant_ode.hpp, Mixed
//
// For e = 0.0078, a row with max S_ij = 1, out is 0.024, dscore 0.040 and gradient 0.048. These are worst cases: in
// random calls roundings cancel. With normal rows of widths 8 to 64 no mixed row of a variant was off by more than
// 1.8 u sum_j p_j |v_j|, and no gradient by more than 2.3 u of the tensor's largest, but for dar-converged (4.5 u) and
// differential-v1 (3.3 u).
//
// Bounds  numbers that are rounded are 0, or lie between 2^-126 and 2^128 (1 - 2^-9) in size; dropout divides p by the
//         share that is kept, and the bounds hold for what is left.

#include <heed/simd/bfloat_pairs.hpp>

#include <cmath>

namespace heed {
inline namespace HEED_ABI {

// dot: relative to |scale| sum_c |q_c k_c|.
inline constexpr double kMixedDotError = (1 + kBfloatRoundoff) * (1 + kBfloatRoundoff) - 1;

// weight(e): relative to the weight.
[[nodiscard]] inline double mixed_weight_error(double score_error) {
  return std::expm1(2 * score_error);
}

// out(e): relative to sum_j p_j |v_j|, in dV to sum_i p_ij |dO_i|.
[[nodiscard]] inline double mixed_out_error(double score_error) {
  return (1 + mixed_weight_error(score_error)) * (1 + kMixedDotError) - 1;
}

// dscore(e): relative to p (A + B).
[[nodiscard]] inline double mixed_dscore_error(double score_error) {
  const double weight = mixed_weight_error(score_error);
  return (1 + weight) * mixed_out_error(score_error) + weight;
}

// gradient(e): relative to the sums at the head of the file.
[[nodiscard]] inline double mixed_gradient_error(double score_error) {
  return (1 + mixed_dscore_error(score_error)) * (1 + kMixedDotError) - 1;
}

}  // namespace HEED_ABI
}  // namespace heed
