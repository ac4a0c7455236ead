// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numbers that the formula of a row normaliser is made of (plug/row_formula.hpp), and their derivatives. A RowTerm is one
// number per query, or one per pair of a query and a key. Formulas combine them by + - * /, comparisons, and the words of
// heed::math.
//
// In the engine a term is an expression over packs of queries. + - * / and select wait until the expression is summed up or
// kept; then one loop over the keys computes all of it. Results of exp, log and the like are kept
// in a column, so that each is computed once. A RowTape records these loops. write_gradients() runs
// them from the last to the first, each with the slopes of its expression:
//
//   y_j = f(a_j, b_j, ..., r)      da_j += dy_j df/da_j     dr += sum_j dy_j df/dr       r: one number per query
//   r = sum_j f(a_j, ...)          da_j += dr df/da_j
//
// So a formula costs a few loops over its row in either direction, and memory for the columns that it keeps.
//
// Bounds  a gradient of 0 passes nothing on, not even 0 * inf. Sums over keys leave hidden pairs out in both directions, so
//         that the value of a term at a hidden pair, even NaN, has no effect.

#include <heed/core/error.hpp>
#include <heed/plug/row_kit.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class RowTape;

// A number per query, for the current pack of queries.
template <class Real>
struct RowNumber {
  RowTape<Real>* tape;
  Pack<Real> value, adjoint;
};

// g times a slope; 0 where g is 0, whatever the slope is.
template <class Real>
[[nodiscard, gnu::always_inline]] inline Pack<Real> along(Pack<Real> g, Pack<Real> slope) {
  return zero_where(g == Pack<Real>(Real(0)), g * slope);
}

// The length of what is made of terms of lengths a and b; 0: one number for all.
[[nodiscard]] inline Index same_length(Index a, Index b) {
  require(a == b || a == 0 || b == 0, "heed: forward(row) puts together columns of ", a, " and ", b,
          " numbers; a row's columns have dim_qk or dim_v of them (plug/readout_formula.hpp)");
  return std::max(a, b);
}

// Expressions. value(j) computes the value of key j; push(j, g), called directly behind value(j),
// passes on the gradient g of that value. begin() comes before a run of keys, finish() behind it.

// length() is the number of keys, 0 where an expression is one number for all of them.

// Numbers in memory, `stride` apart from key to key, and their gradients, `pitch` apart, a pack per key.
template <class Real_>
struct MemoryNode {
  using Real = Real_;
  using P = Pack<Real>;
  RowTape<Real>* of;
  const Real* values;
  Index stride, count;
  Real* adjoints;
  Index pitch = kLanes<Real>;

  [[nodiscard]] RowTape<Real>* tape() const { return of; }
  [[nodiscard]] Index length() const { return count; }
  [[gnu::always_inline]] void begin() {}
  [[gnu::always_inline]] void push(Index j, P g) {
    Real* cell = adjoints + j * pitch;
    (P::load(cell) + g).store(cell);
  }
  [[gnu::always_inline]] void finish() {}
};

// A column, a pack per key.
template <class Real_>
struct ColumnNode : MemoryNode<Real_> {
  using P = Pack<Real_>;
  int map;  // map of these scores; -1 for other columns

  [[nodiscard, gnu::always_inline]] P value(Index j) { return last(j); }
  [[nodiscard, gnu::always_inline]] P last(Index j) const {
    return P::load(this->values + j * this->stride);
  }
};

// A number of each key's token, the same for all queries; the tape adds up its gradients over the queries.
template <class Real_>
struct TokenNode : MemoryNode<Real_> {
  using P = Pack<Real_>;

  [[nodiscard, gnu::always_inline]] P value(Index j) { return last(j); }
  [[nodiscard, gnu::always_inline]] P last(Index j) const { return this->values[j * this->stride]; }
};

template <class Real_>
struct NumberNode {
  using Real = Real_;
  using P = Pack<Real>;
  RowNumber<Real>* of;
  P held{}, sum{};

  [[nodiscard]] RowTape<Real>* tape() const { return of->tape; }
  [[nodiscard]] Index length() const { return 0; }
  [[gnu::always_inline]] void begin() {
    held = of->value;
    sum = Real(0);
  }
  [[nodiscard, gnu::always_inline]] P value(Index) { return held; }
  [[nodiscard, gnu::always_inline]] P last(Index) const { return held; }
  [[gnu::always_inline]] void push(Index, P g) { sum += g; }
  [[gnu::always_inline]] void finish() { of->adjoint += sum; }
};

// A number of the formula.
template <class Real_>
struct ConstantNode {
  using Real = Real_;
  using P = Pack<Real>;
  P held;

  [[nodiscard]] RowTape<Real>* tape() const { return nullptr; }
  [[nodiscard]] Index length() const { return 0; }
  [[gnu::always_inline]] void begin() {}
  [[nodiscard, gnu::always_inline]] P value(Index) { return held; }
  [[nodiscard, gnu::always_inline]] P last(Index) const { return held; }
  [[gnu::always_inline]] void push(Index, P) {}
  [[gnu::always_inline]] void finish() {}
};

// The positions of keys.
template <class Real_>
struct PositionNode {
  using Real = Real_;
  using P = Pack<Real>;
  RowTape<Real>* of;
  Index first, count;

  [[nodiscard]] RowTape<Real>* tape() const { return of; }
  [[nodiscard]] Index length() const { return count; }
  [[gnu::always_inline]] void begin() {}
  [[nodiscard, gnu::always_inline]] P value(Index j) { return last(j); }
  [[nodiscard, gnu::always_inline]] P last(Index j) const { return Real(first + j); }
  [[gnu::always_inline]] void push(Index, P) {}
  [[gnu::always_inline]] void finish() {}
};

template <class F, class A>
struct UnaryNode {
  using Real = typename A::Real;
  using P = Pack<Real>;
  A a;
  P y{};

  [[nodiscard]] RowTape<Real>* tape() const { return a.tape(); }
  [[nodiscard]] Index length() const { return a.length(); }
  [[gnu::always_inline]] void begin() { a.begin(); }
  [[nodiscard, gnu::always_inline]] P value(Index j) { return y = F::of(a.value(j)); }
  [[nodiscard, gnu::always_inline]] P last(Index) const { return y; }
  [[gnu::always_inline]] void push(Index j, P g) { a.push(j, F::pull(g, a.last(j), y)); }
  [[gnu::always_inline]] void finish() { a.finish(); }
};

template <class F, class A, class B>
struct BinaryNode {
  using Real = typename A::Real;
  using P = Pack<Real>;
  A a;
  B b;
  P y{};

  [[nodiscard]] RowTape<Real>* tape() const { return a.tape() ? a.tape() : b.tape(); }
  [[nodiscard]] Index length() const { return same_length(a.length(), b.length()); }
  [[gnu::always_inline]] void begin() {
    a.begin();
    b.begin();
  }
  [[nodiscard, gnu::always_inline]] P value(Index j) { return y = F::of(a.value(j), b.value(j)); }
  [[nodiscard, gnu::always_inline]] P last(Index) const { return y; }
  [[gnu::always_inline]] void push(Index j, P g) {
    const P x = a.last(j), z = b.last(j);
    a.push(j, F::pull_first(g, x, z, y));
    b.push(j, F::pull_second(g, x, z, y));
  }
  [[gnu::always_inline]] void finish() {
    a.finish();
    b.finish();
  }
};

// x where Compare holds for a and b, else y. The side not taken has gradient 0.
template <class Compare, class A, class B, class X, class Y>
struct SelectNode {
  using Real = typename A::Real;
  using P = Pack<Real>;
  A a;
  B b;
  X x;
  Y y;
  P chosen{};

  [[nodiscard]] RowTape<Real>* tape() const { return a.tape() ? a.tape() : b.tape(); }
  [[nodiscard]] Index length() const {
    return same_length(same_length(a.length(), b.length()), same_length(x.length(), y.length()));
  }
  [[gnu::always_inline]] void begin() {
    a.begin();
    b.begin();
    x.begin();
    y.begin();
  }
  [[nodiscard, gnu::always_inline]] P value(Index j) {
    const P u = x.value(j), v = y.value(j);
    return chosen = heed::select(Compare::of(a.value(j), b.value(j)), u, v);
  }
  [[nodiscard, gnu::always_inline]] P last(Index) const { return chosen; }
  [[gnu::always_inline]] void push(Index j, P g) {
    const auto mask = Compare::of(a.last(j), b.last(j));
    x.push(j, heed::select(mask, g, P(Real(0))));
    y.push(j, zero_where(mask, g));
  }
  [[gnu::always_inline]] void finish() {
    x.finish();
    y.finish();
  }
};

// The reference's form of an expression: the numbers themselves, one per key that the query sees.
template <class S>
struct LongHandNode {
  using Scalar = S;
  std::vector<S> x;
  bool one = false;  // true: one number for all keys
  [[nodiscard]] const S& at(std::size_t n) const { return x[one ? 0 : n]; }
};

template <class E>
inline constexpr bool is_long_hand = false;
template <class S>
inline constexpr bool is_long_hand<LongHandNode<S>> = true;
template <class E>
inline constexpr bool is_number = false;
template <class Real>
inline constexpr bool is_number<NumberNode<Real>> = true;

}  // namespace detail

// A term of a formula, as the head of the file has it. E is one of the expressions.
template <class E>
struct RowTerm {
  E e;

  // Functions of <cmath> convert a term to long double.
  template <std::same_as<long double> Number>
  operator Number() const {
    static_assert(
        sizeof(E) == 0,
        "heed: forward(row) of a normaliser without vjp() cannot be differentiated: std::exp and "
        "its like do "
        "not take its values, which are vectors of rows; use heed::math::exp and its like "
        "(plug/row_formula.hpp)");
    return 0;
  }
};

// A comparison of two terms, for math::select().
template <class Compare, class A, class B>
struct RowMask {
  A a;
  B b;
  operator bool() const {
    static_assert(
        sizeof(A) == 0,
        "heed: forward(row) of a normaliser without vjp() cannot be differentiated: it branches on "
        "its values, "
        "which are vectors of rows; use heed::math::select(condition, a, b), maximum or minimum "
        "(plug/row_formula.hpp)");
    return false;
  }
};

namespace detail {

template <class X>
inline constexpr bool is_row_term = false;
template <class E>
inline constexpr bool is_row_term<RowTerm<E>> = true;

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
