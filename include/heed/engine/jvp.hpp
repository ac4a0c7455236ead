// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward mode: how out moves when inputs and parameters move in one direction, out. = J x., without a row of J.
//
//   jvp(op, in, mask, {query_tangent, key_tangent, value_tangent}, out, out_tangent);
//   forward(op, in, mask, out, &saved);
//   jvp(op, in, mask, saved, out, {query_tangent}, out_tangent, &op_tangent);      // with what forward has found
//
// It is the transpose of backward: for every u, <u, J x.> = <J^T u, x.>.
//
// Ops     all. Scores by their score_vjp, or by dual numbers through the formula, fused, in vectors, and likewise row
//         transforms, once per row; streaming normalisers by their dscore and vjp; row normalisers by their jvp(). Row
//         normalisers without it, and readouts, by dual numbers through reference(), a number at a time and in double:
//         exact, and slower than the rest of the pass.
// Cost    of softmax ops 2.5 times forward's flops with `saved`, 3 without; a tangent that is not given costs nothing.
// Memory  O(len).

#include <heed/engine/jvp_walk.hpp>
#include <heed/engine/op_jvps.hpp>
#include <heed/engine/packed_doors.hpp>
#include <heed/engine/value_map.hpp>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Parts with a form over dual numbers, which jvp() runs where they have no derivative of their own.
template <class Score, class Real>
concept HasDualTransform = requires(const Rebound<Score, DualPack<Real>> score,
                                    const DualRowInPlace<Real>& x) {
  score.transform(RowSide::key, Index(0), x);
};
template <class Normaliser>
concept HasDualReference = requires(const Rebound<Normaliser, DualNumber> normaliser,
                                    const LongHandRow<DualNumber>& row) {
  { normaliser.reference(row) } -> std::convertible_to<std::vector<DualNumber>>;
};
template <class Op>
concept HasDualReadout = requires(const Rebound<Op, DualNumber> op,
                                  ReadoutContext<DualNumber>& context) {
  op.read_out_reference(context);
};

// Which parts of an op jvp() can run.
struct JvpParts {
  bool transform = true, normaliser = true, readout = true;
  [[nodiscard]] constexpr bool all() const { return transform && normaliser && readout; }
};
template <class Op>
[[nodiscard]] consteval JvpParts jvp_parts() {
  using Real = typename Op::Scalar;
  using Normaliser = typename Op::NormaliserType;
  JvpParts can;
  if constexpr (Op::ScoreType::has_transform)
    can.transform = HasDualTransform<typename Op::ScoreType, Real>;
  if constexpr (!Normaliser::streams && !HasRowJvp<Normaliser, Real> && HasRowVjp<Normaliser, Real>)
    can.normaliser = HasDualReference<Normaliser>;
  if constexpr (!Op::ReadoutType::identity) can.readout = HasDualReadout<Op>;
  return can;
}

// Fails to compile, with one sentence, where a part of the op has no form over dual numbers.
template <class Op>
consteval bool check_jvp_op() {
  constexpr JvpParts can = jvp_parts<Op>();
  static_assert(
      can.transform,
      "heed: jvp() runs transform() of rows over dual numbers; this one does not take them "
      "(plug/transform.hpp)");
  static_assert(
      can.normaliser,
      "heed: jvp() runs reference() of a row normaliser over dual numbers; this one has none "
      "that takes them (plug/normaliser.hpp)");
  static_assert(
      can.readout,
      "heed: jvp() runs reference() of a readout over dual numbers; this one has none that takes "
      "them (plug/readout.hpp)");
  return true;
}

// The arguments of both doors. known_out: out of the forward that filled `saved`; written: where out goes without it.
template <class Real>
struct JvpArguments : CallArguments<Real> {
  const Saved<Real>* saved;
  const StoredView<const Real>& known_out;
  const Outputs<Real>* written;
  const Tangents<Real>& d;
  const Outputs<Real>& tangent;
};

// Throws where outputs and tangents do not fit the call, or each other.
template <class Real>
void check_jvp(const OpenCall<Real>& call, const JvpArguments<Real>& given) {
  const std::string& where = call.where;
  const auto tangents = memory_of("the tangent of ", given.d, given.d.bias);
  const auto moved = memory_of("the tangent of ", given.tangent);
  check_tangents(tangents, call.in, call.mask, where);
  call.check(given.tangent);
  for (const NamedMemory& out : moved) require_apart(out, tangents, where);
  require(!given.tangent.lse.given() || call.op.normaliser.traits.differentiates_lse, where,
          ": the tangent of lse was asked for, the op's normaliser has no derivative of lse "
          "(plug/normaliser.hpp)");
  if (given.written) {
    call.check(*given.written);
    for (const NamedMemory& out : memory_of("", *given.written)) {
      require_apart(out, tangents, where);
      require_apart(out, moved, where);
    }
  } else {
    const Geometry& g = call.geometry;
    require_shape(given.known_out, {g.batch, g.heads, g.len_q, g.dim_v}, "out", where);
    require_apart(moved[0], named_memory("out", given.known_out), where);
  }
}

// Sequence after sequence, each on all threads.
template <class Real>
void jvp_packed(OpenCall<Real>& all, const OpJvps<Real>& jvps, const JvpArguments<Real>& given) {
  const PackedCalls<Real> packed(all);
  const std::deque<PackedCall<Real>> calls = packed.calls();
  all.geometry = packed.whole(calls[0].open.geometry);
  check_jvp(all, given);
  if (given.saved) require_packed_saved(all, *given.saved, packed.size());
  for (const PackedCall<Real>& call : calls) {
    const Index n = call.number;
    std::optional<Outputs<Real>> written;
    if (given.written) written = packed.outputs(*given.written, n);
    Driver<Real>::jvp(all.op, jvps,
                      {{call.in, call.mask, call.options},
                       given.saved ? &given.saved->sequences[std::size_t(n)] : nullptr,
                       packed.part(given.known_out, TokensOf::queries, n),
                       written ? &*written : nullptr,
                       packed.tensors(given.d, n),
                       packed.outputs(given.tangent, n)});
  }
}

template <class Real>
void Driver<Real>::jvp(const OpTiles<Real>& op, const OpJvps<Real>& jvps,
                       const JvpArguments<Real>& given) {
  constexpr DoorRules door{.name = "heed::jvp", .as_stored = "tangents"};
  OpenCall<Real> open(op, given, door);
  if (given.in.packed) return jvp_packed(open, jvps, given);
  open.measure(door);
  const BoundMask<Real> bound = open.bound_mask(given.options.threads);
  check_jvp(open, given);
  if (!given.written) open.check(*given.saved);

  WidenedTensors<Real> copies(given.options.threads);
  auto operands = copies.template read_all<Operands<Real>>(given.in);
  const auto inputs = take_inputs(op, open.geometry, open.threads(), operands);
  auto tangents = copies.template read_all<TangentOperands<Real>>(given.d);
  if (inputs) {
    split_inputs(op.columns, tangents);
    inputs->take_tangents(tangents.query_inputs, tangents.key_inputs);
  }
  const MappedValues<Real> mapped(op, copies, given.in.value, true);
  if (mapped.values.given()) {
    operands.value = TensorView<const Real>(mapped.values);
    if (tangents.value.given()) {
      const TensorView<Real> moved = copies.copy(tangents.value);
      mapped.chain(copies, moved);
      tangents.value = moved;
    }
  }
  JvpOutputs<Real> to{.saved = given.saved, .tangent = copies.write_outputs(given.tangent)};
  if (given.written)
    to.written = copies.write_outputs(*given.written);
  else
    to.known_out = copies.read(given.known_out);
  DerivedKeys<Real> keys(op, open.geometry, operands.key, nullptr, {}, operands.key_inputs,
                         {&jvps.score, tangents.key, tangents.key_inputs});
  const Index row_tiles = op.streams() ? 0 : 2 * op.maps() + op.normaliser.work_tiles(false);
  const CallContext<Real> c =
      make_context(op, open.geometry, bound, operands, keys, given.options,
                   make_plan<Real>(open.geometry, bound, given.options, row_tiles, 0, true));
  walk_jvp(c, jvps, keys, tangents, to, given.options);
  copies.round();
}

// run(OpJvpsOf) for an op and a direction of its parameters; none is a direction of zeros.
template <class Op, class Run>
void with_direction(const Op& op, const Op* op_tangent, const std::string& where, Run&& run) {
  const Op direction = op_tangent ? *op_tangent : zeros_like(op);
  require_direction(op, direction, where);
  const OpJvpsOf<Op> of(op, direction);
  run(of);
}

template <class Op, class Real>
void open_jvp(const Op& op, const Op* op_tangent, const JvpArguments<Real>& given) {
  static_assert(check_jvp_op<Op>());
  with_direction(
      op, op_tangent, door_name("heed::jvp", given.options.name), [&](const OpJvpsOf<Op>& jvps) {
        Door<Op>::with_tiles(
            op, [&](const OpTiles<Real>& tiles) { Driver<Real>::jvp(tiles, jvps.jvps(), given); });
      });
}

template <class Real, bool fits>
struct TangentsArgument : ArgumentOf<Tangents<Real>, StoredView<const Real>> {
  static_assert(fits,
                "heed: tangents must be views {pointer, shape} of numbers of the op's type, one "
                "for each input that moves (core/view.hpp)");
};
template <class Real, bool fits>
struct OutTangentArgument : ArgumentOf<Outputs<Real>, StoredView<Real>> {
  static_assert(fits,
                "heed: out_tangent must be a view {pointer, shape} of numbers of the op's type "
                "that are not const (core/view.hpp)");
};
template <class, bool fits>
struct OpTangentArgument {
  static_assert(fits,
                "heed: op_tangent, behind out_tangent, must be a pointer to an op of the op's "
                "type, or nullptr; options come behind it (engine/jvp.hpp)");
};
template <class Op>
using GivenOpTangent = std::type_identity_t<GivenFor<Op, OpTangentArgument, const Op*>>;

}  // namespace detail

// out_tangent = the derivative of forward()'s out along `tangents` and, if given, along `op_tangent`, an object of the
// op's type whose learnt parameters are the direction. `out_tangent` is a view, or {out_tangent, lse_tangent,
// steps_tangent}, where lse_tangent (batch, heads, len_q, maps) is asked of normalisers that differentiate lse alone, and
// steps_tangent, of the shape of steps, of readouts that count them. `saved` and `out` are
// those of forward() with the same op, inputs, mask, scale and dropout.
//
// What a mask hides leaves no trace, neither the input nor its tangent. A row that sees no key has tangent 0; a row that
// is NaN has tangent NaN. A bias of -infinity does not move. Choices that a formula makes (the branch of a select, the
// category of a key, the step at which a recursion stops) are kept.
// Throws std::invalid_argument on arguments that do not fit, std::bad_alloc.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void jvp(const Op& op, const Inputs<Real>& in, const Mask<typename Op::Scalar>& mask,
         const Saved<typename Op::Scalar>& saved, const StoredView<const typename Op::Scalar>& out,
         const Tangents<typename Op::Scalar>& tangents,
         const Outputs<typename Op::Scalar>& out_tangent,
         const std::type_identity_t<Op>* op_tangent = nullptr, const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  detail::open_jvp<Op, Real>(op, op_tangent,
                             {{in, mask, options}, &saved, out, nullptr, tangents, out_tangent});
}

// The same without an earlier forward(): `out`, or {out, lse, steps}, is written as forward() does, up to rounding.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void jvp(const Op& op, const Inputs<Real>& in, const Mask<typename Op::Scalar>& mask,
         const Tangents<typename Op::Scalar>& tangents, const Outputs<typename Op::Scalar>& out,
         const Outputs<typename Op::Scalar>& out_tangent,
         const std::type_identity_t<Op>* op_tangent = nullptr, const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  using Normaliser = typename Op::NormaliserType;
  if constexpr (Normaliser::streams && !mergeable<Normaliser>) {
    // The normaliser's state is known behind the last key alone.
    Saved<Real> saved;
    forward(op, in, mask, out, &saved, options);
    jvp(op, in, mask, saved, StoredView<const Real>(out.out), tangents, out_tangent, op_tangent,
        options);
  } else {
    detail::open_jvp<Op, Real>(op, op_tangent,
                               {{in, mask, options}, nullptr, {}, &out, tangents, out_tangent});
  }
}

// For calls that do not fit (engine/mistakes.hpp).
template <class Op>
void jvp(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
         const detail::Given<Op, detail::MaskArgument>& mask,
         const detail::Given<Op, detail::SavedArgument>& saved,
         const detail::Given<Op, detail::KnownOutArgument>& out,
         const detail::Given<Op, detail::TangentsArgument>& tangents,
         const detail::Given<Op, detail::OutTangentArgument>& out_tangent,
         const detail::GivenOpTangent<Op>& op_tangent = {}, const Options& options = {});
template <class Op>
void jvp(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
         const detail::Given<Op, detail::MaskArgument>& mask,
         const detail::Given<Op, detail::TangentsArgument>& tangents,
         const detail::Given<Op, detail::OutArgument>& out,
         const detail::Given<Op, detail::OutTangentArgument>& out_tangent,
         const std::type_identity_t<Op>* op_tangent = nullptr, const Options& options = {});
template <class Op>
void jvp(const Op&, const detail::GivenAny&, const detail::GivenAny& = {},
         const detail::GivenAny& = {}, const detail::GivenAny& = {}) {
  static_assert(detail::is_complete_call<Op>,
                "heed: an argument of jvp(op, inputs, mask, saved, out, tangents, out_tangent), of "
                "which saved alone may be absent, is missing");
}

}  // namespace HEED_ABI
}  // namespace heed
