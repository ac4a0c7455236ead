// SPDX-License-Identifier: Apache-2.0
#pragma once

// The difference between two variants that were run with the same seeds, and how sure it is.
//
//   d_i = b_i - a_i        mean +- t s / sqrt(n)        s^2 = sum (d_i - mean)^2 / (n - 1)
//
// t is the quantile of Student's distribution with n - 1 degrees of freedom that leaves (1 - confidence) / 2 on either
// side. The interval assumes that the d_i are normal and independent. It holds for one comparison: out of twenty
// comparisons of nothing but chance, one interval does not contain 0 at a confidence of 95 %.

#include <optional>
#include <vector>

namespace compare {

inline constexpr double kConfidence = 0.95;

// The share of Student's distribution with `degrees` > 0 of freedom below t. Relative error 1e-12.
[[nodiscard]] double student_share(double t, double degrees);
// The t below which the share `share` lies; share in (0, 1).
[[nodiscard]] double student_quantile(double share, double degrees);

struct Difference {
  int pairs = 0;
  double mean = 0;
  double low = 0, high = 0;  // the interval

  // True if the interval contains 0.
  [[nodiscard]] bool may_be_none() const { return low <= 0 && high >= 0; }
};

// The differences b - a; none for fewer than two pairs, or if a number is not finite.
[[nodiscard]] std::optional<Difference> paired_difference(const std::vector<double>& a,
                                                          const std::vector<double>& b);

}  // namespace compare
