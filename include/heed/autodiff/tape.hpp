// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reverse-mode derivatives: the gradient of one number with respect to all inputs at once.
//
//   Tape<double> tape;
//   const auto x = tape.variable(3.0), y = tape.variable(5.0);
//   const auto adjoint = tape.gradient(x * y);
//   adjoint[x.index];                  // 5
//
// A tape is a list of operations in the order in which they ran. Each has at most two operands, or is a dot product of any
// length. Tapes share nothing, so each thread may have its own. A Var must not outlive its tape.
//
// Cost: 32 bytes an operation on double (20 on float), and 8 for each pair of a dot product.
// Bounds: NaN and infinity pass from the root back to the variables. A node whose adjoint is 0
// passes nothing on, not even 0 * inf: a branch dropped by select cannot leave a NaN behind.

#include <heed/core/error.hpp>
#include <heed/core/scalar.hpp>

#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <std::floating_point Real>
class Tape;

// A number on a tape, or a constant (no tape, index -1).
template <std::floating_point Real>
struct Var {
  Tape<Real>* tape = nullptr;
  Index index = -1;  // number of its node on the tape; -1: none
  Real value{};

  Var() = default;
  template <class C>
  requires std::is_arithmetic_v<C> Var(C constant) : value(static_cast<Real>(constant)) {}
  Var(Tape<Real>* t, Index i, Real v) : tape(t), index(i), value(v) {}

  [[nodiscard]] bool is_constant() const { return index < 0; }

  // f(x) from f's value and slope at x.value.
  [[nodiscard]] Var chain(Real f, Real slope) const {
    return is_constant() ? Var(f) : tape->record(f, *this, slope, Var(), Real(0));
  }

  [[nodiscard]] friend Var operator+(const Var& a) { return a; }
  [[nodiscard]] friend Var operator-(const Var& a) { return a.chain(-a.value, Real(-1)); }

  [[nodiscard]] friend Var operator+(const Var& a, const Var& b) {
    return join(a.value + b.value, a, Real(1), b, Real(1));
  }
  [[nodiscard]] friend Var operator-(const Var& a, const Var& b) {
    return join(a.value - b.value, a, Real(1), b, Real(-1));
  }
  [[nodiscard]] friend Var operator*(const Var& a, const Var& b) {
    return join(a.value * b.value, a, b.value, b, a.value);
  }
  [[nodiscard]] friend Var operator/(const Var& a, const Var& b) {
    const Real quotient = a.value / b.value;
    return join(quotient, a, Real(1) / b.value, b, -quotient / b.value);
  }

  Var& operator+=(const Var& b) { return *this = *this + b; }
  Var& operator-=(const Var& b) { return *this = *this - b; }
  Var& operator*=(const Var& b) { return *this = *this * b; }
  Var& operator/=(const Var& b) { return *this = *this / b; }

  // Compares values only.
  [[nodiscard]] friend bool operator==(const Var& a, const Var& b) { return a.value == b.value; }
  [[nodiscard]] friend std::partial_ordering operator<=>(const Var& a, const Var& b) {
    return a.value <=> b.value;
  }

 private:
  // f(a, b), from its value and its two partial derivatives.
  [[nodiscard]] static Var join(Real f, const Var& a, Real slope_a, const Var& b, Real slope_b) {
    if (a.is_constant()) return b.chain(f, slope_b);
    if (b.is_constant()) return a.chain(f, slope_a);
    return a.tape->record(f, a, slope_a, b, slope_b);
  }
};

template <std::floating_point Real>
class Tape {
 public:
  Tape() = default;
  Tape(const Tape&) = delete;  // every Var points at its tape
  Tape& operator=(const Tape&) = delete;

  // A new independent variable.
  [[nodiscard]] Var<Real> variable(Real value) {
    return record(value, Var<Real>(), Real(0), Var<Real>(), Real(0));
  }

  // A node f(a, b); a constant stands for "no parent". Throws when a or b lies on another tape.
  [[nodiscard]] Var<Real> record(Real f, const Var<Real>& a, Real slope_a, const Var<Real>& b,
                                 Real slope_b) {
    const Index index = checked_count(size());
    nodes_.push_back({{slot(a), slot(b)}, f, {slope_a, slope_b}});
    return Var<Real>(this, index, f);
  }

  // The sum of a(i) * b(i), i = 0 ... n-1, as one node. The accessors return Var<Real> or Real.
  template <class A, class B>
  [[nodiscard]] Var<Real> dot(Index n, const A& a, const B& b) {
    const Index begin = Index(pairs_.size());
    Real sum(0);
    for (Index i = 0; i < n; ++i) {
      const Var<Real> x(a(i)), y(b(i));
      sum += x.value * y.value;
      if (!x.is_constant() || !y.is_constant()) pairs_.push_back({factor(x), factor(y)});
    }
    const Var<Real> result = record(sum, Var<Real>(), Real(0), Var<Real>(), Real(0));
    dots_.push_back({result.index, begin, Index(pairs_.size())});
    return result;
  }

  // d root / d node for every node, to be read at Var::index; zeros for a constant root.
  [[nodiscard]] std::vector<Real> gradient(const Var<Real>& root) const {
    std::vector<Real> adjoint(nodes_.size(), Real(0));
    if (root.is_constant()) return adjoint;
    require(root.tape == this, "Tape::gradient: the root, node ", root.index,
            ", belongs to another tape than this one of ", size(), " nodes");
    adjoint[std::size_t(root.index)] = Real(1);
    std::size_t dot = dots_.size();  // dots_[dot] and later ones have nodes behind `node`
    for (Index node = root.index; node >= 0; --node) {
      while (dot > 0 && dots_[dot - 1].node > node) --dot;
      const Real outer = adjoint[std::size_t(node)];
      if (outer == Real(0)) continue;
      spread(nodes_[std::size_t(node)], outer, adjoint);
      if (dot > 0 && dots_[dot - 1].node == node) spread(dots_[dot - 1], outer, adjoint);
    }
    return adjoint;
  }

  [[nodiscard]] Index size() const { return Index(nodes_.size()); }

  // Bytes that the records fill, without memory that the vectors hold in reserve.
  [[nodiscard]] Index bytes() const {
    return Index(nodes_.size() * sizeof(Node) + constants_.size() * sizeof(Real) +
                 pairs_.size() * sizeof(Pair) + dots_.size() * sizeof(Dot));
  }

  // Forgets all nodes and keeps the memory; every Var of this tape becomes invalid.
  void clear() {
    nodes_.clear();
    constants_.clear();
    pairs_.clear();
    dots_.clear();
  }

 private:
  using Slot = std::int32_t;  // >= 0: a node; in a Pair, -1-k: constants_[k]; in a Node, -1: none

  struct Node {
    Slot parent[2];
    Real value;
    Real slope[2];
  };
  struct Pair {
    Slot a, b;
  };
  struct Dot {
    Index node, begin, end;  // pairs_[begin, end)
  };

  [[nodiscard]] static Index checked_count(Index count) {
    require(count < std::numeric_limits<Slot>::max(), "Tape: ", count,
            " nodes or constants are more than a 31-bit index can name");
    return count;
  }

  [[nodiscard]] Slot slot(const Var<Real>& x) const {
    if (x.is_constant()) return -1;
    require(x.tape == this, "Tape: an operand, node ", x.index,
            ", belongs to another tape than this one of ", size(), " nodes");
    return Slot(x.index);
  }

  [[nodiscard]] Slot factor(const Var<Real>& x) {
    if (!x.is_constant()) return slot(x);
    constants_.push_back(x.value);
    return Slot(-checked_count(Index(constants_.size())));
  }

  [[nodiscard]] Real factor_value(Slot s) const {
    return s >= 0 ? nodes_[std::size_t(s)].value : constants_[std::size_t(-1 - s)];
  }

  static void spread(const Node& node, Real outer, std::vector<Real>& adjoint) {
    for (int i = 0; i < 2; ++i)
      if (node.parent[i] >= 0) adjoint[std::size_t(node.parent[i])] += outer * node.slope[i];
  }

  void spread(const Dot& dot, Real outer, std::vector<Real>& adjoint) const {
    for (Index i = dot.begin; i < dot.end; ++i) {
      const Pair& pair = pairs_[std::size_t(i)];
      if (pair.a >= 0) adjoint[std::size_t(pair.a)] += outer * factor_value(pair.b);
      if (pair.b >= 0) adjoint[std::size_t(pair.b)] += outer * factor_value(pair.a);
    }
  }

  std::vector<Node> nodes_;
  std::vector<Real> constants_;
  std::vector<Pair> pairs_;
  std::vector<Dot> dots_;
};

namespace math {

template <class Real>
[[nodiscard]] Real value_of(const Var<Real>& x, Lookup) {
  return x.value;
}

template <class Real>
[[nodiscard]] Var<Real> exp(const Var<Real>& x, Lookup) {
  const Real y = exp(x.value);
  return x.chain(y, y);
}

template <class Real>
[[nodiscard]] Var<Real> log(const Var<Real>& x, Lookup) {
  return x.chain(log(x.value), Real(1) / x.value);
}

template <class Real>
[[nodiscard]] Var<Real> sqrt(const Var<Real>& x, Lookup) {
  const Real y = sqrt(x.value);
  return x.chain(y, Real(0.5) / y);
}

template <class Real>
[[nodiscard]] Var<Real> tanh(const Var<Real>& x, Lookup) {
  return x.chain(tanh(x.value), tanh_slope(x.value));
}

template <class Real>
[[nodiscard]] Var<Real> sigmoid(const Var<Real>& x, Lookup) {
  return x.chain(sigmoid(x.value), sigmoid_slope(x.value));
}

// One node for the whole sum; a constant when no factor is a variable.
template <class Real, class A, class B>
[[nodiscard]] Var<Real> dot_product(std::type_identity<Var<Real>>, Index n, const A& a, const B& b,
                                    Lookup) {
  Real sum(0);
  for (Index i = 0; i < n; ++i) {
    const Var<Real> x(a(i)), y(b(i));
    if (!x.is_constant()) return x.tape->dot(n, a, b);
    if (!y.is_constant()) return y.tape->dot(n, a, b);
    sum += x.value * y.value;
  }
  return Var<Real>(sum);
}

}  // namespace math

// The dot product of two strided runs of n numbers, on Var a single node; strides in elements.
template <class S>
[[nodiscard]] S dot(const S* a, Index stride_a, const S* b, Index stride_b, Index n) {
  return math::dot_product(
      n, [=](Index i) { return a[i * stride_a]; }, [=](Index i) { return b[i * stride_b]; });
}

}  // namespace HEED_ABI
}  // namespace heed
