// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward-mode derivatives: a value with its derivatives along N directions.
//
//   const auto x = Dual<double, 2>::variable(3.0, 0);
//   const auto y = Dual<double, 2>::variable(5.0, 1);
//   (x * y).grad;                      // {5, 3}
//
// T is float, double, long double, another Dual (second derivatives), or a SIMD pack, one
// derivative per lane. Of T it asks for + - * / and the functions of scalar.hpp.
//
// Bounds: NaN and infinity propagate; 0 * inf is NaN, in a direction without influence as well.

#include <heed/core/scalar.hpp>

#include <array>
#include <compare>
#include <cstddef>
#include <type_traits>

namespace heed::inline HEED_ABI {

// What a Dual over T accepts as the other, constant operand.
template <class C, class T>
concept ConstantOf = std::is_same_v<C, T> || std::is_arithmetic_v<C>;

template <class T, int N>
struct Dual {
  static constexpr std::size_t directions = static_cast<std::size_t>(N);

  T value{};
  std::array<T, directions> grad{};

  Dual() = default;
  Dual(const T& constant) : value(constant) {}
  template <class C>
    requires(std::is_arithmetic_v<C> && !std::is_same_v<C, T>)
  Dual(C constant) : value(math::constant<T>(constant)) {}
  Dual(const T& v, const std::array<T, directions>& g) : value(v), grad(g) {}

  // The independent variable of one direction, 0 <= direction < N.
  [[nodiscard]] static Dual variable(const T& v, int direction = 0) {
    Dual x(v);
    x.grad[static_cast<std::size_t>(direction)] = math::constant<T>(1);
    return x;
  }

  // f(x) from f's value and slope at x.value.
  [[nodiscard]] Dual chain(const T& f, const T& slope) const {
    Dual y(f);
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = slope * grad[i];
    return y;
  }

  [[nodiscard]] friend Dual operator+(const Dual& a) { return a; }
  [[nodiscard]] friend Dual operator-(const Dual& a) {
    Dual y(T(-a.value));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = -a.grad[i];
    return y;
  }

  [[nodiscard]] friend Dual operator+(const Dual& a, const Dual& b) {
    Dual y(T(a.value + b.value));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = a.grad[i] + b.grad[i];
    return y;
  }
  [[nodiscard]] friend Dual operator-(const Dual& a, const Dual& b) {
    Dual y(T(a.value - b.value));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = a.grad[i] - b.grad[i];
    return y;
  }
  [[nodiscard]] friend Dual operator*(const Dual& a, const Dual& b) {
    Dual y(T(a.value * b.value));
    for (std::size_t i = 0; i < directions; ++i)
      y.grad[i] = a.value * b.grad[i] + b.value * a.grad[i];
    return y;
  }
  [[nodiscard]] friend Dual operator/(const Dual& a, const Dual& b) {
    Dual y(T(a.value / b.value));
    for (std::size_t i = 0; i < directions; ++i)
      y.grad[i] = (a.grad[i] - y.value * b.grad[i]) / b.value;
    return y;
  }

  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator+(const Dual& a, const C& c) {
    return Dual(T(a.value + plain(c)), a.grad);
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator+(const C& c, const Dual& a) {
    return Dual(T(plain(c) + a.value), a.grad);
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator-(const Dual& a, const C& c) {
    return Dual(T(a.value - plain(c)), a.grad);
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator-(const C& c, const Dual& a) {
    Dual y = -a;
    y.value = plain(c) - a.value;
    return y;
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator*(const Dual& a, const C& c) {
    const T factor = plain(c);
    return a.chain(T(a.value * factor), factor);
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator*(const C& c, const Dual& a) {
    return a * c;
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator/(const Dual& a, const C& c) {
    const T divisor = plain(c);
    Dual y(T(a.value / divisor));
    for (std::size_t i = 0; i < directions; ++i) y.grad[i] = a.grad[i] / divisor;
    return y;
  }
  template <ConstantOf<T> C>
  [[nodiscard]] friend Dual operator/(const C& c, const Dual& a) {
    const T quotient = plain(c) / a.value;
    return a.chain(quotient, T(-quotient / a.value));
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

  // By value only: two duals with equal values and different derivatives compare equal.
  [[nodiscard]] friend bool operator==(const Dual& a, const Dual& b)
    requires std::is_arithmetic_v<T>
  {
    return a.value == b.value;
  }
  [[nodiscard]] friend std::partial_ordering operator<=>(const Dual& a, const Dual& b)
    requires std::is_arithmetic_v<T>
  {
    return a.value <=> b.value;
  }

 private:
  template <ConstantOf<T> C>
  [[nodiscard]] static T plain(const C& c) {
    if constexpr (std::is_same_v<C, T>)
      return c;
    else
      return math::constant<T>(c);
  }
};

namespace math {

template <class T, int N>
[[nodiscard]] auto value_of(const Dual<T, N>& x, Lookup) {
  return value_of(x.value);
}

template <class Mask, class T, int N>
[[nodiscard]] Dual<T, N> select(const Mask& mask, const Dual<T, N>& a, const Dual<T, N>& b,
                                Lookup) {
  Dual<T, N> y(select(mask, a.value, b.value));
  for (std::size_t i = 0; i < y.directions; ++i) y.grad[i] = select(mask, a.grad[i], b.grad[i]);
  return y;
}

template <class T, int N>
[[nodiscard]] Dual<T, N> exp(const Dual<T, N>& x, Lookup) {
  const T y = exp(x.value);
  return x.chain(y, y);
}

template <class T, int N>
[[nodiscard]] Dual<T, N> log(const Dual<T, N>& x, Lookup) {
  return x.chain(log(x.value), T(constant<T>(1) / x.value));
}

template <class T, int N>
[[nodiscard]] Dual<T, N> sqrt(const Dual<T, N>& x, Lookup) {
  const T y = sqrt(x.value);
  return x.chain(y, T(constant<T>(0.5) / y));
}

template <class T, int N>
[[nodiscard]] Dual<T, N> tanh(const Dual<T, N>& x, Lookup) {
  return x.chain(tanh(x.value), tanh_slope(x.value));
}

template <class T, int N>
[[nodiscard]] Dual<T, N> sigmoid(const Dual<T, N>& x, Lookup) {
  return x.chain(sigmoid(x.value), sigmoid_slope(x.value));
}

}  // namespace math
}  // namespace heed::inline HEED_ABI
