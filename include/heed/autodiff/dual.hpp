// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward-mode derivatives: a value with its derivatives along Count directions.
//
//   const auto x = Dual<double, 2>::variable(3.0, 0);
//   const auto y = Dual<double, 2>::variable(5.0, 1);
//   (x * y).grad;                      // {5, 3}
//
// Real is float, double, long double, another Dual (for second derivatives), or a SIMD pack (each lane has
// derivatives of its own). It needs + - * / and the functions of scalar.hpp that a formula calls.
//
// Bounds: NaN and infinity propagate; 0 * inf is NaN, also in a direction on which the value does not depend.

#include <heed/core/scalar.hpp>

#include <array>
#include <compare>
#include <cstddef>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

// Types that a Dual over Real accepts as a constant operand.
template <class C, class Real>
concept ConstantOf = std::is_same_v<C, Real> || std::is_arithmetic_v<C>;

template <class Real, int Count>
struct Dual {
  static constexpr std::size_t directions = static_cast<std::size_t>(Count);

  Real value{};
  std::array<Real, directions> grad{};

  Dual() = default;
  Dual(const Real& constant) : value(constant) {}
  template <class C>
  requires(std::is_arithmetic_v<C> && !std::is_same_v<C, Real>) Dual(C constant)
      : value(math::constant<Real>(constant)) {}
  Dual(const Real& v, const std::array<Real, directions>& g) : value(v), grad(g) {}

  // The independent variable of one direction, 0 <= direction < Count.
  [[nodiscard]] static Dual variable(const Real& v, int direction = 0) {
    Dual x(v);
    x.grad[static_cast<std::size_t>(direction)] = math::constant<Real>(1);
    return x;
  }

  // f(x) from f's value and slope at x.value.
  [[nodiscard]] Dual chain(const Real& f, const Real& slope) const {
    Dual y(f);
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = slope * grad[i];
    return y;
  }

  [[nodiscard]] friend Dual operator+(const Dual& a) { return a; }
  [[nodiscard]] friend Dual operator-(const Dual& a) {
    Dual y(Real(-a.value));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = -a.grad[i];
    return y;
  }

  [[nodiscard]] friend Dual operator+(const Dual& a, const Dual& b) {
    Dual y(Real(a.value + b.value));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = a.grad[i] + b.grad[i];
    return y;
  }
  [[nodiscard]] friend Dual operator-(const Dual& a, const Dual& b) {
    Dual y(Real(a.value - b.value));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = a.grad[i] - b.grad[i];
    return y;
  }
  [[nodiscard]] friend Dual operator*(const Dual& a, const Dual& b) {
    Dual y(Real(a.value * b.value));
    for (std::size_t i = 0; i < directions; ++i)
      y.grad[i] = a.value * b.grad[i] + b.value * a.grad[i];
    return y;
  }
  [[nodiscard]] friend Dual operator/(const Dual& a, const Dual& b) {
    Dual y(Real(a.value / b.value));
    for (std::size_t i = 0; i < directions; ++i)
      y.grad[i] = (a.grad[i] - y.value * b.grad[i]) / b.value;
    return y;
  }

  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator+(const Dual& a, const C& c) {
    return Dual(Real(a.value + plain(c)), a.grad);
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator+(const C& c, const Dual& a) {
    return Dual(Real(plain(c) + a.value), a.grad);
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator-(const Dual& a, const C& c) {
    return Dual(Real(a.value - plain(c)), a.grad);
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator-(const C& c, const Dual& a) {
    Dual y = -a;
    y.value = plain(c) - a.value;
    return y;
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator*(const Dual& a, const C& c) {
    const Real factor = plain(c);
    return a.chain(Real(a.value * factor), factor);
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator*(const C& c, const Dual& a) {
    return a * c;
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator/(const Dual& a, const C& c) {
    const Real divisor = plain(c);
    Dual y(Real(a.value / divisor));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = a.grad[i] / divisor;
    return y;
  }
  template <ConstantOf<Real> C>
  [[nodiscard]] friend Dual operator/(const C& c, const Dual& a) {
    const Real quotient = plain(c) / a.value;
    return a.chain(quotient, Real(-quotient / a.value));
  }

  template <class Operand>
  Dual& operator+=(const Operand& b) {
    return *this = *this + b;
  }
  template <class Operand>
  Dual& operator-=(const Operand& b) {
    return *this = *this - b;
  }
  template <class Operand>
  Dual& operator*=(const Operand& b) {
    return *this = *this * b;
  }
  template <class Operand>
  Dual& operator/=(const Operand& b) {
    return *this = *this / b;
  }

  // Compares values only: two duals with equal values and different derivatives compare equal.
  [[nodiscard]] friend bool operator==(const Dual& a,
                                       const Dual& b) requires std::is_arithmetic_v<Real> {
    return a.value == b.value;
  }
  [[nodiscard]] friend std::partial_ordering operator<=>(
      const Dual& a, const Dual& b) requires std::is_arithmetic_v<Real> {
    return a.value <=> b.value;
  }

 private:
  template <ConstantOf<Real> C>
  [[nodiscard]] static Real plain(const C& c) {
    if constexpr (std::is_same_v<C, Real>)
      return c;
    else
      return math::constant<Real>(c);
  }
};

namespace math {

template <class Real, int Count>
[[nodiscard]] auto value_of(const Dual<Real, Count>& x, Lookup) {
  return value_of(x.value);
}

template <class Mask, class Real, int Count>
[[nodiscard]] Dual<Real, Count> select(const Mask& mask, const Dual<Real, Count>& a,
                                       const Dual<Real, Count>& b, Lookup) {
  Dual<Real, Count> y(select(mask, a.value, b.value));
  for (std::size_t i = 0; i < y.directions; ++i) y.grad[i] = select(mask, a.grad[i], b.grad[i]);
  return y;
}

template <class Real, int Count>
[[nodiscard]] Dual<Real, Count> exp(const Dual<Real, Count>& x, Lookup) {
  const Real y = exp(x.value);
  return x.chain(y, y);
}

template <class Real, int Count>
[[nodiscard]] Dual<Real, Count> log(const Dual<Real, Count>& x, Lookup) {
  return x.chain(log(x.value), Real(constant<Real>(1) / x.value));
}

template <class Real, int Count>
[[nodiscard]] Dual<Real, Count> sqrt(const Dual<Real, Count>& x, Lookup) {
  const Real y = sqrt(x.value);
  return x.chain(y, Real(constant<Real>(0.5) / y));
}

template <class Real, int Count>
[[nodiscard]] Dual<Real, Count> tanh(const Dual<Real, Count>& x, Lookup) {
  return x.chain(tanh(x.value), tanh_slope(x.value));
}

template <class Real, int Count>
[[nodiscard]] Dual<Real, Count> sigmoid(const Dual<Real, Count>& x, Lookup) {
  return x.chain(sigmoid(x.value), sigmoid_slope(x.value));
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
