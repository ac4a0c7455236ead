// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward-mode derivatives for inner loops: a value with its derivatives along Count directions, and with a flag
// per direction that says whether the value depends on it.
//
//   x.moves[n] = false     dx/dn is 0 whatever the numbers are, and x.grad[n] is never read
//
// The flags follow from the formula, not from the numbers. Once a formula is inlined the compiler knows each flag and
// leaves out the derivatives that are 0. Dual (autodiff/dual.hpp) has the same rules without flags.
//
// Bounds  the derivative along a direction on which a value does not depend is 0, even if the value is NaN or infinite.

#include <heed/core/scalar.hpp>
#include <heed/simd/exp.hpp>

#include <type_traits>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

// S is a Pack, a plain number, or another LaneDual (for second derivatives).
template <class S, int Count>
struct LaneDual {
  S value{};
  // One element more than directions, since Count may be 0.
  S grad[std::size_t(Count + 1)];
  bool moves[std::size_t(Count + 1)] = {};

  LaneDual() = default;
  [[gnu::always_inline]] LaneDual(const S& constant) : value(constant) {}
  template <class C>
  requires(std::is_arithmetic_v<C> && !std::is_same_v<C, S>)
      [[gnu::always_inline]] LaneDual(C constant)
      : value(math::constant<S>(constant)) {}
  // Copies derivatives one by one. GCC copies an array in halves of a vector, and a processor that
  // then loads the whole vector waits until both halves have left its store buffer.
  [[gnu::always_inline]] LaneDual(const LaneDual& other) : value(other.value) {
    set_from(other, [&](auto n) { return other.grad[n]; });
  }
  [[gnu::always_inline]] LaneDual& operator=(const LaneDual& other) {
    value = other.value;
    set_from(other, [&](auto n) { return other.grad[n]; });
    return *this;
  }

  template <int direction>
  [[nodiscard, gnu::always_inline]] static LaneDual variable(const S& v) {
    LaneDual x(v);
    x.grad[direction] = math::constant<S>(1);
    x.moves[direction] = true;
    return x;
  }

  // f(x) from f's value and slope at x.value.
  [[nodiscard, gnu::always_inline]] LaneDual chain(const S& f, const S& slope) const {
    LaneDual y(f);
    y.set_from(*this, [&](auto n) { return slope * grad[n]; });
    return y;
  }

  [[nodiscard, gnu::always_inline]] friend LaneDual operator+(const LaneDual& a) { return a; }
  [[nodiscard, gnu::always_inline]] friend LaneDual operator-(const LaneDual& a) {
    LaneDual y(S(-a.value));
    y.set_from(a, [&](auto n) { return -a.grad[n]; });
    return y;
  }
  [[nodiscard, gnu::always_inline]] friend LaneDual operator+(const LaneDual& a,
                                                              const LaneDual& b) {
    LaneDual y(S(a.value + b.value));
    y.set_from(
        a, b, [&](auto n) { return a.grad[n] + b.grad[n]; }, [&](auto n) { return a.grad[n]; },
        [&](auto n) { return b.grad[n]; });
    return y;
  }
  [[nodiscard, gnu::always_inline]] friend LaneDual operator-(const LaneDual& a,
                                                              const LaneDual& b) {
    LaneDual y(S(a.value - b.value));
    y.set_from(
        a, b, [&](auto n) { return a.grad[n] - b.grad[n]; }, [&](auto n) { return a.grad[n]; },
        [&](auto n) { return -b.grad[n]; });
    return y;
  }
  [[nodiscard, gnu::always_inline]] friend LaneDual operator*(const LaneDual& a,
                                                              const LaneDual& b) {
    LaneDual y(S(a.value * b.value));
    y.set_from(
        a, b, [&](auto n) { return a.value * b.grad[n] + b.value * a.grad[n]; },
        [&](auto n) { return b.value * a.grad[n]; }, [&](auto n) { return a.value * b.grad[n]; });
    return y;
  }
  [[nodiscard, gnu::always_inline]] friend LaneDual operator/(const LaneDual& a,
                                                              const LaneDual& b) {
    const S inverse = math::constant<S>(1) / b.value;
    LaneDual y(S(a.value / b.value));
    y.set_from(
        a, b, [&](auto n) { return (a.grad[n] - y.value * b.grad[n]) * inverse; },
        [&](auto n) { return a.grad[n] * inverse; },
        [&](auto n) { return -(y.value * inverse) * b.grad[n]; });
    return y;
  }
  LaneDual& operator+=(const LaneDual& b) { return *this = *this + b; }
  LaneDual& operator-=(const LaneDual& b) { return *this = *this - b; }
  LaneDual& operator*=(const LaneDual& b) { return *this = *this * b; }
  LaneDual& operator/=(const LaneDual& b) { return *this = *this / b; }

  // Compares values only, lane by lane, for math::select().
  [[nodiscard, gnu::always_inline]] friend auto operator<(const LaneDual& a, const LaneDual& b) {
    return a.value < b.value;
  }
  [[nodiscard, gnu::always_inline]] friend auto operator<=(const LaneDual& a, const LaneDual& b) {
    return a.value <= b.value;
  }
  [[nodiscard, gnu::always_inline]] friend auto operator>(const LaneDual& a, const LaneDual& b) {
    return a.value > b.value;
  }
  [[nodiscard, gnu::always_inline]] friend auto operator>=(const LaneDual& a, const LaneDual& b) {
    return a.value >= b.value;
  }

  [[nodiscard, gnu::always_inline]] friend auto operator==(const LaneDual& a, const LaneDual& b) {
    return a.value == b.value;
  }
  [[nodiscard, gnu::always_inline]] friend auto operator!=(const LaneDual& a, const LaneDual& b) {
    return a.value != b.value;
  }

  // Sets the derivatives from those of the operands: along direction n by f(n) or both(n) where every operand depends
  // on it, by first(n) or second(n) where that operand alone does.
  template <class F>
  [[gnu::always_inline]] void set_from(const LaneDual& a, F&& f) {
    detail::for_directions<Count>([&](auto n) {
      moves[n] = a.moves[n];
      if (moves[n]) grad[n] = f(n);
    });
  }
  template <class Both, class First, class Second>
  [[gnu::always_inline]] void set_from(const LaneDual& a, const LaneDual& b, Both&& both,
                                       First&& first, Second&& second) {
    detail::for_directions<Count>([&](auto n) {
      moves[n] = a.moves[n] || b.moves[n];
      if (a.moves[n] && b.moves[n])
        grad[n] = both(n);
      else if (a.moves[n])
        grad[n] = first(n);
      else if (b.moves[n])
        grad[n] = second(n);
    });
  }
};

// Formulas that are defined after this header call these overloads directly, not through those of scalar.hpp. So they
// are inlined: GCC 12 does not flatten calls within calls.
namespace math {

// The plain value inside a dual over duals.
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline auto value_of(const LaneDual<S, Count>& x) {
  if constexpr (requires { x.value.moves; })
    return value_of(x.value);
  else
    return x.value;
}
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline auto value_of(const LaneDual<S, Count>& x, Lookup) {
  return value_of(x);
}

template <class Mask, class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> select(const Mask& mask,
                                                                   const LaneDual<S, Count>& a,
                                                                   const LaneDual<S, Count>& b,
                                                                   Lookup) {
  const S zero = constant<S>(0);
  LaneDual<S, Count> y(select(mask, a.value, b.value));
  y.set_from(
      a, b, [&](auto n) { return select(mask, a.grad[n], b.grad[n]); },
      [&](auto n) { return select(mask, a.grad[n], zero); },
      [&](auto n) { return select(mask, zero, b.grad[n]); });
  return y;
}
template <class Mask, class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> select(
    const Mask& mask, const LaneDual<S, Count>& a,
    const std::type_identity_t<LaneDual<S, Count>>& b) {
  return select(mask, a, b, Lookup{});
}
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> maximum(
    const LaneDual<S, Count>& a, const std::type_identity_t<LaneDual<S, Count>>& b) {
  return select((a.value < b.value) | (b.value != b.value), b, a, Lookup{});
}
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> absolute(const LaneDual<S, Count>& x) {
  return select(x.value < constant<S>(0), -x, x, Lookup{});
}

template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> exp(const LaneDual<S, Count>& x) {
  const S y = exp(x.value);
  return x.chain(y, y);
}
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> log(const LaneDual<S, Count>& x) {
  return x.chain(log(x.value), S(constant<S>(1) / x.value));
}
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> sqrt(const LaneDual<S, Count>& x) {
  const S y = sqrt(x.value);
  return x.chain(y, S(constant<S>(0.5) / y));
}
// The slope is 1 - y^2. In the tails, where y is 1 or almost, the absolute error of the slope is at most an ulp of 1.
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> tanh(const LaneDual<S, Count>& x) {
  const S y = tanh(x.value);
  return x.chain(y, S((constant<S>(1) - y) * (constant<S>(1) + y)));
}
// The slope is r - r^2, with the same error.
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> sigmoid(const LaneDual<S, Count>& x) {
  const S r = sigmoid(x.value);
  return x.chain(r, S(r - r * r));
}
template <class S, int Count>
[[nodiscard, gnu::always_inline]] inline LaneDual<S, Count> falling_sigmoid(
    const LaneDual<S, Count>& x) {
  const S r = falling_sigmoid(x.value);
  return x.chain(r, S(r * r - r));
}

// The same functions for formulas that are defined before this header, which call them through scalar.hpp.
template <class S, int Count>
[[nodiscard]] LaneDual<S, Count> exp(const LaneDual<S, Count>& x, Lookup) {
  return exp(x);
}
template <class S, int Count>
[[nodiscard]] LaneDual<S, Count> log(const LaneDual<S, Count>& x, Lookup) {
  return log(x);
}
template <class S, int Count>
[[nodiscard]] LaneDual<S, Count> sqrt(const LaneDual<S, Count>& x, Lookup) {
  return sqrt(x);
}
template <class S, int Count>
[[nodiscard]] LaneDual<S, Count> tanh(const LaneDual<S, Count>& x, Lookup) {
  return tanh(x);
}
template <class S, int Count>
[[nodiscard]] LaneDual<S, Count> sigmoid(const LaneDual<S, Count>& x, Lookup) {
  return sigmoid(x);
}
template <class S, int Count>
[[nodiscard]] LaneDual<S, Count> falling_sigmoid(const LaneDual<S, Count>& x, Lookup) {
  return falling_sigmoid(x);
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
