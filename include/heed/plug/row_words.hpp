// SPDX-License-Identifier: Apache-2.0
#pragma once

// The operations of formulas of rows: + - * /, comparisons, and the words of heed::math (plug/row_terms.hpp). Each is a
// small struct with its value, of(), and the gradients of its operands from that of its value, pull().

#include <heed/autodiff/lane_dual.hpp>
#include <heed/plug/row_tape.hpp>
#include <heed/simd/functions.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// The word `Of` of a formula, as an operation. Where no slope is written down, dual numbers give it.
template <class Of>
struct Word : Of {
  template <class Real>
  [[nodiscard, gnu::always_inline]] static Pack<Real> pull(Pack<Real> g, Pack<Real> x,
                                                           [[maybe_unused]] Pack<Real> y) {
    if constexpr (requires { Of::slope(x, y); })
      return along(g, Pack<Real>(Of::slope(x, y)));
    else
      return along(g, Pack<Real>(Of::of(LaneDual<Pack<Real>, 1>::template variable<0>(x)).grad[0]));
  }
};
// -x: the gradient is exact without a guard, as are those of sums.
struct Negated {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& x) {
    return S(-x);
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull(P g, P, P) {
    return -g;
  }
};
struct Exponential {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::exp(x); }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P slope(P, P y) {
    return y;
  }
};
struct Sigmoidal {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::sigmoid(x); }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P slope(P, P y) {
    return y - y * y;
  }
};
struct HyperbolicTangent {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::tanh(x); }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P slope(P, P y) {
    return (P(1) - y) * (P(1) + y);
  }
};
struct Logarithm {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::log(x); }
};
struct SquareRoot {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::sqrt(x); }
};
struct Sine {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::sin(x); }
};
struct Cosine {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::cos(x); }
};
struct ErrorFunction {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::erf(x); }
};
struct ExponentialLessOne {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::expm1(x); }
};
struct LogarithmOfOneMore {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::log1p(x); }
};
struct Softplus {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& x) { return math::softplus(x); }
};

struct Plus {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return a + b;
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_first(P g, P, P, P) {
    return g;
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_second(P g, P, P, P) {
    return g;
  }
};
struct Minus {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return a - b;
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_first(P g, P, P, P) {
    return g;
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_second(P g, P, P, P) {
    return -g;
  }
};
struct Times {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return a * b;
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_first(P g, P, P b, P) {
    return along(g, b);
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_second(P g, P a, P, P) {
    return along(g, a);
  }
};
// y = a / b: da = dy / b, db = -dy y / b
struct Over {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return a / b;
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_first(P g, P, P b, P) {
    return along(g, P(P(1) / b));
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_second(P g, P, P b, P y) {
    return -along(g, P(y / b));
  }
};
struct Power {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return math::pow(a, b);
  }
  template <class Real>
  [[nodiscard, gnu::always_inline]] static Pack<Real> pull_first(Pack<Real> g, Pack<Real> a,
                                                                 Pack<Real> b, Pack<Real>) {
    return along(g, base_slope(a, b));
  }
  template <class Real>
  [[nodiscard, gnu::always_inline]] static Pack<Real> pull_second(Pack<Real> g, Pack<Real> a,
                                                                  Pack<Real> b, Pack<Real> y) {
    return along(g, exponent_slope(a, b, y));
  }
};
struct Larger {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return math::maximum(a, b);
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_first(P g, P a, P b, P) {
    return zero_where((a < b) | (b != b), g);
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_second(P g, P a, P b, P) {
    return select((a < b) | (b != b), g, P(0));
  }
};
struct Smaller {
  template <class S>
  [[nodiscard, gnu::always_inline]] static S of(const S& a, const S& b) {
    return math::minimum(a, b);
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_first(P g, P a, P b, P) {
    return zero_where((b < a) | (b != b), g);
  }
  template <class P>
  [[nodiscard, gnu::always_inline]] static P pull_second(P g, P a, P b, P) {
    return select((b < a) | (b != b), g, P(0));
  }
};

struct Below {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& a, const auto& b) {
    return math::value_of(a) < math::value_of(b);
  }
};
struct NotAbove {
  [[nodiscard, gnu::always_inline]] static auto of(const auto& a, const auto& b) {
    return math::value_of(a) <= math::value_of(b);
  }
};

// A term, or a plain number, as an expression of Like's kind.
template <class Like, class X>
[[nodiscard]] auto node_of(const X& x) {
  if constexpr (is_row_term<X>) {
    return x.e;
  } else if constexpr (is_long_hand<Like>) {
    using S = typename Like::Scalar;
    if constexpr (std::is_same_v<X, S>)
      return LongHandNode<S>{{x}, true};
    else
      return LongHandNode<S>{{math::constant<S>(x)}, true};
  } else {
    using Real = typename Like::Real;
    return ConstantNode<Real>{Pack<Real>(Real(x))};
  }
}
// Operands that may stand beside a term: another term, or a number.
template <class X, class E>
concept OperandOf = is_row_term<X> || std::is_arithmetic_v<X> || requires {
  requires std::is_same_v<X, typename E::Scalar>;
};
template <class E>
inline constexpr bool is_single = is_number<E>;
template <class Real>
inline constexpr bool is_single<ConstantNode<Real>> = true;

// The numbers f(n) for each key, or one for all if the operands are single numbers.
template <class S, class F, class... Nodes>
[[nodiscard]] RowTerm<LongHandNode<S>> in_long_hand(const F& f, const Nodes&... nodes) {
  LongHandNode<S> result;
  result.one = (nodes.one && ...);
  std::size_t count = 1;
  ((count = nodes.one ? count : nodes.x.size()), ...);
  for (std::size_t n = 0; n < count; ++n) result.x.push_back(f(nodes.at(n)...));
  return {result};
}

template <class F, class E>
[[nodiscard]] auto apply_word(const RowTerm<E>& x) {
  if constexpr (is_long_hand<E>) {
    using S = typename E::Scalar;
    return in_long_hand<S>([](const S& a) { return S(F::of(a)); }, x.e);
  } else {
    using Node = UnaryNode<F, E>;
    if constexpr (is_number<E>)
      return x.e.tape()->number(Node{x.e});
    else if constexpr (std::is_same_v<F, Negated>)
      return RowTerm<Node>{Node{x.e}};
    else
      return x.e.tape()->keep(Node{x.e});
  }
}

template <class F, class Like, class A, class B>
[[nodiscard]] auto combine(const A& a, const B& b) {
  const auto x = node_of<Like>(a);
  const auto y = node_of<Like>(b);
  using X = std::remove_const_t<decltype(x)>;
  using Y = std::remove_const_t<decltype(y)>;
  if constexpr (is_long_hand<Like>) {
    using S = typename Like::Scalar;
    return in_long_hand<S>([](const S& p, const S& q) { return S(F::of(p, q)); }, x, y);
  } else {
    using Node = BinaryNode<F, X, Y>;
    const Node node{x, y};
    if constexpr (is_single<X> && is_single<Y>)
      return node.tape()->number(node);
    else
      return RowTerm<Node>{node};
  }
}

}  // namespace detail

template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator+(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Plus, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator+(
    const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Plus, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator-(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Minus, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator-(
    const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Minus, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator*(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Times, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator*(
    const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Times, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator/(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Over, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator/(
    const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Over, E>(a, b);
}
template <class E>
[[nodiscard]] auto operator-(const RowTerm<E>& a) {
  return detail::apply_word<detail::Negated>(a);
}

namespace detail {

template <class Compare, class Like, class A, class B>
[[nodiscard]] auto compare(const A& a, const B& b) {
  const auto x = node_of<Like>(a);
  const auto y = node_of<Like>(b);
  return RowMask<Compare, std::remove_const_t<decltype(x)>, std::remove_const_t<decltype(y)>>{x, y};
}

}  // namespace detail

template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator<(const RowTerm<E>& a, const B& b) {
  return detail::compare<detail::Below, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator<(
    const A& a, const RowTerm<E>& b) {
  return detail::compare<detail::Below, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator<=(const RowTerm<E>& a, const B& b) {
  return detail::compare<detail::NotAbove, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator<=(
    const A& a, const RowTerm<E>& b) {
  return detail::compare<detail::NotAbove, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator>(const RowTerm<E>& a, const B& b) {
  return detail::compare<detail::Below, E>(b, a);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator>(
    const A& a, const RowTerm<E>& b) {
  return detail::compare<detail::Below, E>(b, a);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto operator>=(const RowTerm<E>& a, const B& b) {
  return detail::compare<detail::NotAbove, E>(b, a);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>) [[nodiscard]] auto operator>=(
    const A& a, const RowTerm<E>& b) {
  return detail::compare<detail::NotAbove, E>(b, a);
}

namespace math {

template <class E>
[[nodiscard]] auto exp(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::Exponential>>(x);
}
template <class E>
[[nodiscard]] auto expm1(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::ExponentialLessOne>>(x);
}
template <class E>
[[nodiscard]] auto log(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::Logarithm>>(x);
}
template <class E>
[[nodiscard]] auto log1p(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::LogarithmOfOneMore>>(x);
}
template <class E>
[[nodiscard]] auto sqrt(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::SquareRoot>>(x);
}
template <class E>
[[nodiscard]] auto sin(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::Sine>>(x);
}
template <class E>
[[nodiscard]] auto cos(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::Cosine>>(x);
}
template <class E>
[[nodiscard]] auto tanh(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::HyperbolicTangent>>(x);
}
template <class E>
[[nodiscard]] auto erf(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::ErrorFunction>>(x);
}
template <class E>
[[nodiscard]] auto sigmoid(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::Sigmoidal>>(x);
}
template <class E>
[[nodiscard]] auto softplus(const RowTerm<E>& x) {
  return detail::apply_word<detail::Word<detail::Softplus>>(x);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto maximum(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Larger, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>)
    [[nodiscard]] auto maximum(const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Larger, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto minimum(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Smaller, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>)
    [[nodiscard]] auto minimum(const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Smaller, E>(a, b);
}
template <class E, class B>
requires detail::OperandOf<B, E>
[[nodiscard]] auto pow(const RowTerm<E>& a, const B& b) {
  return detail::combine<detail::Power, E>(a, b);
}
template <class A, class E>
requires(!detail::is_row_term<A> && detail::OperandOf<A, E>)
    [[nodiscard]] auto pow(const A& a, const RowTerm<E>& b) {
  return detail::combine<detail::Power, E>(a, b);
}

template <class Compare, class A, class B, class X, class Y>
[[nodiscard]] auto select(const RowMask<Compare, A, B>& mask, const X& x, const Y& y) {
  const auto u = detail::node_of<A>(x);
  const auto v = detail::node_of<A>(y);
  using U = std::remove_const_t<decltype(u)>;
  using V = std::remove_const_t<decltype(v)>;
  if constexpr (detail::is_long_hand<A>) {
    using S = typename A::Scalar;
    return detail::in_long_hand<S>([](const S& a, const S& b, const S& p,
                                      const S& q) { return math::select(Compare::of(a, b), p, q); },
                                   mask.a, mask.b, u, v);
  } else {
    using Node = detail::SelectNode<Compare, A, B, U, V>;
    const Node node{mask.a, mask.b, u, v};
    if constexpr (detail::is_single<A> && detail::is_single<B> && detail::is_single<U> &&
                  detail::is_single<V>)
      return node.tape()->number(node);
    else
      return RowTerm<Node>{node};
  }
}
template <class E>
[[nodiscard]] auto absolute(const RowTerm<E>& x) {
  return select(x < 0, -x, x);
}

}  // namespace math
}  // namespace HEED_ABI
}  // namespace heed
