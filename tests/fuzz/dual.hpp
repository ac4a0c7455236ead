// SPDX-License-Identifier: Apache-2.0
#pragma once

// A number and its derivative along one direction, for the plain loops: by school rules, without
// heed's own differentiation. |x| and sqrt(x) have derivative 0 at 0, by the ops' conventions.

#include <cmath>

namespace fuzz {

struct Dual {
  double x = 0, d = 0;
  Dual() = default;
  Dual(double value) : x(value) {}
  Dual(double value, double derivative) : x(value), d(derivative) {}
  Dual& operator+=(const Dual& b) { return *this = {x + b.x, d + b.d}; }
};

[[nodiscard]] inline Dual operator+(const Dual& a, const Dual& b) { return {a.x + b.x, a.d + b.d}; }
[[nodiscard]] inline Dual operator-(const Dual& a, const Dual& b) { return {a.x - b.x, a.d - b.d}; }
[[nodiscard]] inline Dual operator-(const Dual& a) { return {-a.x, -a.d}; }
[[nodiscard]] inline Dual operator*(const Dual& a, const Dual& b) {
  return {a.x * b.x, a.d * b.x + a.x * b.d};
}
[[nodiscard]] inline Dual operator/(const Dual& a, const Dual& b) {
  return {a.x / b.x, (a.d - a.x / b.x * b.d) / b.x};
}

[[nodiscard]] inline Dual exp(const Dual& a) { return {std::exp(a.x), std::exp(a.x) * a.d}; }
[[nodiscard]] inline Dual log(const Dual& a) { return {std::log(a.x), a.d / a.x}; }
[[nodiscard]] inline Dual tanh(const Dual& a) {
  const double t = std::tanh(a.x), c = 1 / std::cosh(a.x);
  return {t, c * c * a.d};
}
[[nodiscard]] inline Dual sqrt(const Dual& a) {
  const double root = std::sqrt(a.x);
  return {root, root == 0 ? 0 : a.d / (2 * root)};
}

[[nodiscard]] inline double value(double x) { return x; }
[[nodiscard]] inline double value(const Dual& x) { return x.x; }

}  // namespace fuzz
