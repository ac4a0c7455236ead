// SPDX-License-Identifier: Apache-2.0
#include "student.hpp"

#include "statistics.hpp"

#include <limits>

namespace compare {

namespace {

// The regularised incomplete beta function I_x(a, b) by its continued fraction, which converges fast for
// x < (a + 1) / (a + b + 2), evaluated from the front (modified Lentz). DLMF 8.17.22.
[[nodiscard]] double beta_fraction(double x, double a, double b) {
  constexpr double tiny = 1e-300;
  double c = 1, d = 1 / (1 - (a + b) * x / (a + 1)), fraction = d;
  for (int m = 1; m <= 10000; ++m) {
    const double even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
    const double odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1));
    double step = 1;
    for (const double term : {even, odd}) {
      d = 1 + term * d;
      c = 1 + term / c;
      if (std::abs(d) < tiny) d = tiny;
      if (std::abs(c) < tiny) c = tiny;
      d = 1 / d;
      step = c * d;
      fraction *= step;
    }
    if (std::abs(step - 1) < 1e-15) break;
  }
  return fraction;
}
[[nodiscard]] double beta_share(double x, double a, double b) {
  if (x <= 0) return 0;
  if (x >= 1) return 1;
  const double front = std::exp(std::lgamma(a + b) - std::lgamma(a) - std::lgamma(b) +
                                a * std::log(x) + b * std::log1p(-x));
  if (x < (a + 1) / (a + b + 2)) return front * beta_fraction(x, a, b) / a;
  return 1 - front * beta_fraction(1 - x, b, a) / b;
}

}  // namespace

double student_share(double t, double degrees) {
  // The share of the distribution beyond |t| on both sides is I_x(degrees / 2, 1 / 2) with x = degrees / (degrees + t^2).
  const double beyond = beta_share(degrees / (degrees + t * t), degrees / 2, 0.5) / 2;
  return t < 0 ? beyond : 1 - beyond;
}

double student_quantile(double share, double degrees) {
  if (share < 0.5) return -student_quantile(1 - share, degrees);
  double low = 0, high = 1;
  while (student_share(high, degrees) < share) high *= 2;
  // Invariant: the quantile lies in [low, high].
  for (int halving = 0; halving < 100; ++halving) {
    const double middle = (low + high) / 2;
    (student_share(middle, degrees) < share ? low : high) = middle;
  }
  return (low + high) / 2;
}

std::optional<Difference> paired_difference(const std::vector<double>& a,
                                            const std::vector<double>& b) {
  std::vector<double> d;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    d.push_back(b[i] - a[i]);
    if (!std::isfinite(d.back())) return std::nullopt;
  }
  if (d.size() < 2) return std::nullopt;
  const double mean = mean_of(d),
               half = student_quantile((1 + kConfidence) / 2, double(d.size() - 1)) * spread_of(d) /
                      std::sqrt(double(d.size()));
  return Difference{int(d.size()), mean, mean - half, mean + half};
}

}  // namespace compare
