// SPDX-License-Identifier: Apache-2.0
#pragma once

// An attention variant: score, normaliser and readout put together. Every named op is an alias of
// this template, and so is a combination that nobody has named yet:
//
//   template <class Real> using Dar = Attention<Real, DarScore<Real>, Softmax<Real>, Identity<Real>>;
//   Attention<float, DarScore<float>, Softmax<float>, IntentGate<float>> gated_resonance;
//
// The gradient of an op's parameters is an object of the op's own type.

#include <heed/plug/normaliser.hpp>
#include <heed/plug/readout_calls.hpp>
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
  using rebind = Attention<U, Rebound<Score, U>, Rebound<Normaliser, U>, Rebound<Readout, U>>;

  Score score;
  Normaliser normaliser;
  Readout readout;

  // Calls f(name, Param<Real>&) for every learnable parameter; empty ones are not in use.
  template <class F>
  void visit(F&& f) {
    visit_parts(*this, f);
  }
  template <class F>
  void visit(F&& f) const {
    visit_parts(*this, f);
  }

  // Throws std::invalid_argument, its sentence starting with `where`, when a hyper-parameter is out of
  // range or a parameter does not fit the sizes.
  void validate(const Geometry& g, const char* where) const {
    heed::validate(score, g, where);
    if constexpr (Score::has_positions) require_positions(score, g, where);
    heed::validate(normaliser, g, where);
    if constexpr (Readout::uses_score)
      heed::validate(readout, g, where, score);
    else
      heed::validate(readout, g, where);
  }

  // Moves parameters that a step of an optimiser has carried out of their range back into it, so
  // that validate() accepts them again. Other parameters do not change.
  void keep_in_range() {
    heed::keep_in_range(score);
    heed::keep_in_range(normaliser);
    heed::keep_in_range(readout);
  }

  static_assert(
      requires { Normaliser::uses_extra; },
      "heed: a normaliser inherits PlainRows (plug/normaliser.hpp)");
  static_assert(
      requires { Readout::uses_extra; },
      "heed: a readout inherits PlainReadout (plug/readout.hpp)");
  static constexpr bool uses_extra = Normaliser::uses_extra || Readout::uses_extra;
  static_assert(
      !(Normaliser::uses_extra && Readout::uses_extra),
      "heed: an op has one extra input; here normaliser and readout both ask for one; further "
      "inputs of a row are query_inputs (plug/token_inputs.hpp)");

  // Width of the extra input (batch, heads, len_q, width); 0 for none. The other numbers that a row
  // may read come with its token (plug/token_inputs.hpp).
  [[nodiscard]] Index extra_dim(const Geometry& g) const {
    if constexpr (Normaliser::uses_extra) return 1;
    return readout.extra_dim(g);
  }

  // The readout's reference, by hand or derived from its formula; one that works on the score's parameters gets the score.
  template <class S>
  requires detail::knows_readout_formulas<Readout, S> ||
      requires(const Readout& r, ReadoutContext<S>& all) {
    r.reference(all);
  } || requires(const Readout& r, ReadoutContext<S>& all, const Score& s) {
    r.reference(all, s);
  }
  void read_out_reference(ReadoutContext<S>& context) const {
    if constexpr (Readout::uses_score)
      readout.reference(context, score);
    else if constexpr (requires { readout.reference(context); })
      readout.reference(context);
    else
      detail::ReadoutFormula<Readout, S>::reference(readout, context);
  }

 private:
  template <class Self, class F>
  static void visit_parts(Self& self, F& f) {
    visit_parameters(self.score, f);
    visit_parameters(self.normaliser, f);
    visit_parameters(self.readout, f);
  }
};

// An op, for the public calls: any type that names its scalar. check_attention_op<Op>() (plug/check.hpp) checks all other
// members, with one sentence for each that is missing; a stricter concept would end in "no matching function".
template <class Op>
concept AttentionOp = requires {
  typename Op::Scalar;
};

// Calls f(name, parameter) for the parameters that are in use, read-only.
template <class Op, class F>
void for_each_param(const Op& op, F&& f) {
  op.visit([&](const char* name, const auto& param) {
    if (param.given()) f(name, param);
  });
}

// A gradient object for `op`: same type, same shapes, zeros.
template <class Op>
[[nodiscard]] Op zeros_like(const Op& op) {
  Op zeros = op;
  zeros.visit([](const char*, auto& param) { param.set_zero(); });
  return zeros;
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
