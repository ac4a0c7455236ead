// SPDX-License-Identifier: Apache-2.0
#pragma once

// An attention variant: score, normaliser and readout put together. Every named op is an alias of
// this template, and so is a combination that nobody has named yet:
//
//   template <class Real> using Dar = Attention<Real, DarScore<Real>, Softmax<Real>, Identity<Real>>;
//   Attention<float, DarScore<float>, Softmax<float>, IntentGate<float>> gated_resonance;
//
// The gradient of an op's parameters is an object of the op's own type.

#include <heed/core/interval.hpp>
#include <heed/plug/normaliser.hpp>
#include <heed/plug/readout.hpp>
#include <heed/plug/score.hpp>
#include <heed/plug/softmax.hpp>

#include <concepts>
#include <string>

namespace heed {
inline namespace HEED_ABI {

template <class Real, class Score, class Normaliser, class Readout>
struct Attention {
  using Scalar = Real;
  using ScoreType = Score;
  using NormaliserType = Normaliser;
  using ReadoutType = Readout;
  template <class U>
  using rebind =
      Attention<U, typename Score::template rebind<U>, typename Normaliser::template rebind<U>,
                typename Readout::template rebind<U>>;

  Score score;
  Normaliser normaliser;
  Readout readout;

  // f(name, Param<Real>&) for every learnable parameter; empty ones are not in use.
  template <class F>
  void visit(F&& f) {
    score.visit(f);
    normaliser.visit(f);
    readout.visit(f);
  }

  // Throws std::invalid_argument, its sentence starting with `where`, when a hyper-parameter is out of
  // range or a parameter does not fit the sizes.
  void validate(const Geometry& g, const char* where) const {
    score.validate(g, where);
    normaliser.validate(g, where);
    readout.validate(g, where);
  }

  // Brings parameters that a step of an optimiser has carried out of their range back inside
  // (core/interval.hpp): validate() accepts them again. Others stay as they are.
  void keep_in_range() {
    heed::keep_in_range(score);
    heed::keep_in_range(normaliser);
    heed::keep_in_range(readout);
  }

  static constexpr bool uses_extra = Normaliser::uses_extra || Readout::uses_extra;
  static_assert(!(Normaliser::uses_extra && Readout::uses_extra),
                "heed: an op has one extra input; here normaliser and readout both ask for one");

  // Width of the extra input (batch, heads, len_q, width); 0 for none.
  [[nodiscard]] Index extra_dim(const Geometry& g) const {
    if constexpr (Normaliser::uses_extra) return 1;
    return readout.extra_dim(g);
  }
};

// What the doors accept as an op. `check_attention_op<Op>()` says in a sentence what is missing.
template <class Op>
concept AttentionOp = requires(Op op, const Op& constant, const Geometry& g) {
  typename Op::Scalar;
  typename Op::ScoreType;
  typename Op::NormaliserType;
  typename Op::ReadoutType;
  constant.score;
  constant.normaliser;
  constant.readout;
  constant.validate(g, "");
  op.visit([](const char*, Param<typename Op::Scalar>&) {});
};

// Calls f(name, parameter) for the parameters that are in use, read-only.
template <class Op, class F>
void for_each_param(const Op& op, F&& f) {
  const_cast<Op&>(op).visit([&](const char* name, auto& param) {
    if (param.given()) f(name, std::as_const(param));
  });
}

// A gradient object for `op`: same type, same shapes, zeros.
template <class Op>
[[nodiscard]] Op zeros_like(const Op& op) {
  Op zeros = op;
  zeros.visit([](const char*, auto& param) { param.set_zero(); });
  return zeros;
}

// The same score, normaliser or readout over another scalar. A part with options names the struct that
// it inherits them from: `using Options = DarOptions;`, or has take_options(part).
// Tensors that are no learnable parameters are converted if the part shows them by visit_fixed(f).
template <class U, class Part>
[[nodiscard]] typename Part::template rebind<U> cast_part(const Part& part) {
  typename Part::template rebind<U> out;
  if constexpr (requires { typename Part::Options; })
    static_cast<typename Part::Options&>(out) = part;
  if constexpr (requires { out.take_options(part); }) out.take_options(part);
  std::vector<Param<U>> values;
  const auto read = [&](const char*, auto& param) { values.push_back(param.template cast<U>()); };
  std::size_t next = 0;
  const auto write = [&](const char*, Param<U>& param) { param = values[next++]; };
  const_cast<Part&>(part).visit(read);
  out.visit(write);
  if constexpr (requires { out.visit_fixed(write); }) {
    const_cast<Part&>(part).visit_fixed(read);
    out.visit_fixed(write);
  }
  return out;
}

// The same op over another scalar: options are kept, parameters converted.
template <class U, class Op>
[[nodiscard]] typename Op::template rebind<U> cast_op(const Op& op) {
  typename Op::template rebind<U> out;
  out.score = cast_part<U>(op.score);
  out.normaliser = cast_part<U>(op.normaliser);
  out.readout = cast_part<U>(op.readout);
  return out;
}

}  // namespace HEED_ABI
}  // namespace heed
