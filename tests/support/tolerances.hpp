// SPDX-License-Identifier: Apache-2.0
#pragma once

// The allowed distance of a fast result from the slow one, and the reasons. eps is the machine
// epsilon of the scalar type of the computation.
//
//   S        largest sum of |scale q_c k_c| of a row, or |score| if that is larger: each of the dim
//            products is rounded, and so is the score, and exp turns an absolute error of x into a
//            relative error of the weight
//   sum p|v| the factor of the error of a weight

#include <algorithm>
#include <limits>

namespace heed_test::tolerance {

template <class T>
inline constexpr double eps = double(std::numeric_limits<T>::epsilon());

// Mixed rows, float or double, against the reference in double. 64 eps covers sums of a few thousand terms in the engine
// and as many in the reference, which has its own rounding in double. For float results the reference is exact by
// comparison: 16 eps for exp, sums and division, 4 eps S for the dot product.
template <class T>
[[nodiscard]] constexpr double forward(double s, double weighted_abs_value) {
  const double factor = sizeof(T) == sizeof(float) ? 16 + 4 * s : 64 * (1 + s);
  return eps<T> * factor * weighted_abs_value;
}

// A float result is held against the naive float loop: twice its largest error, since blocking and exp
// may cost as much as the loop's own rounding; 4 eps of the largest output, since a short loop may be
// exact by luck.
[[nodiscard]] constexpr double forward_beside_naive(double naive_error, double largest) {
  return 2 * naive_error + 4 * eps<float> * largest;
}

// Backward recomputes the weights and adds up four products: three times the naive error, and four times the slack of
// forward. The terms are of size 1 for inputs of size 1 even where they cancel to less, hence max(1, largest).
[[nodiscard]] constexpr double backward_beside_naive(double naive_error, double largest) {
  return 3 * naive_error + 16 * eps<float> * std::max(1.0, largest);
}

// A gradient that is a single number summed over all pairs (a parameter), or exactly 0 because all terms
// cancel (the scores of a single key): the naive error is a single random draw. The bound uses the
// size of the terms |dout_i| |v_j| and, as roundings are independent, the root of their number.
[[nodiscard]] constexpr double sum_of_terms(double naive_error, double terms) {
  return 3 * naive_error + 4 * eps<float> * terms;
}

// Outputs of a readout, and results stored in files, in double: relative to the tensor's largest number,
// because a norm or a recursion mixes the columns of a row. 4500 eps.
[[nodiscard]] constexpr double relative_to_largest(double largest) { return 1e-12 * largest; }

// A gradient in double against exact differentiation (tape, dual numbers, complex step): 4500 eps.
[[nodiscard]] constexpr double exact_gradient(double largest) {
  return 1e-12 * std::max(1.0, largest);
}

// Central differences in double, h = 1e-5: the truncation h^2 f'''/6 and the rounding eps f / h both
// stand near 1e-10.
inline constexpr double central_step = 1e-5;
inline constexpr double central_difference = 1e-8;

// lse is a sum of magnitude S, and log is exact to an ulp.
template <class T>
[[nodiscard]] constexpr double lse(double s, double value) {
  const double factor = sizeof(T) == sizeof(float) ? 16 + 4 * s : 64 * (1 + s);
  return eps<T> * (factor + (value < 0 ? -value : value));
}

// Weights that sum to 1, times a value of 1: two roundings per weight, and those of the sum.
template <class T>
inline constexpr double sum_of_weights = 32 * eps<T>;

}  // namespace heed_test::tolerance
