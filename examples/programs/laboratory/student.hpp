// SPDX-License-Identifier: Apache-2.0
#pragma once

// How sure a difference between two variants is that were run with the same seeds.
//
//   d_i = b_i - a_i        mean +- t s / sqrt(n)        s^2 = sum (d_i - mean)^2 / (n - 1)
//
// t is the quantile of Student's distribution with n - 1 degrees of freedom that leaves (1 - confidence) / 2 on either side.
// The interval takes the d_i as normal and independent. It speaks of one comparison: of twenty of nothing but chance, one
// leaves out 0 at a confidence of 95 %.

#include <optional>
#include <vector>

namespace compare {

inline constexpr double kConfidence = 0.95;

// The share of Student's distribution with `degrees` > 0 of freedom that lies below t. Relative error 1e-12.
[[nodiscard]] double student_share(double t, double degrees);
// The t that has `share` below it; share in (0, 1).
[[nodiscard]] double student_quantile(double share, double degrees);

struct Difference {
  int pairs = 0;
  double mean = 0;
  double low = 0, high = 0;  // the interval

  // The interval has 0 in it.
  [[nodiscard]] bool may_be_none() const { return low <= 0 && high >= 0; }
};

// The differences b - a; none for fewer than two pairs, and where a number is not finite.
[[nodiscard]] std::optional<Difference> paired_difference(const std::vector<double>& a,
                                                          const std::vector<double>& b);

}  // namespace compare
