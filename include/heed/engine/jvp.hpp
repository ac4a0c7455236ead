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

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Parts with a form over dual numbers, which jvp() runs where they have no derivative of their own.
template <class Score, class Real>
concept HasMovingTransform = requires(const Rebound<Score, MovingPack<Real>> score,
                                      const MovingRowInPlace<Real>& x) {
  score.transform(RowSide::key, Index(0), x);
};
template <class Normaliser>
concept HasMovingReference = requires(const Rebound<Normaliser, Moving> normaliser,
                                      const LongHandRow<Moving>& row) {
  { normaliser.reference(row) } -> std::convertible_to<std::vector<Moving>>;
};
template <class Op>
concept HasMovingReadout = requires(const typename Op::template rebind<Moving> op,
                                    ReadoutContext<Moving>& context) {
  op.read_out_reference(context);
};

// Which parts of an op jvp() can run.
struct MovingParts {
  bool transform = true, normaliser = true, readout = true;
  [[nodiscard]] constexpr bool all() const { return transform && normaliser && readout; }
};
template <class Op>
[[nodiscard]] consteval MovingParts moving_parts() {
  using Real = typename Op::Scalar;
  using Normaliser = typename Op::NormaliserType;
  MovingParts can;
  if constexpr (Op::ScoreType::has_transform)
    can.transform = HasMovingTransform<typename Op::ScoreType, Real>;
  if constexpr (!Normaliser::streams && !HasRowJvp<Normaliser, Real> && HasRowVjp<Normaliser, Real>)
    can.normaliser = HasMovingReference<Normaliser>;
  if constexpr (!Op::ReadoutType::identity) can.readout = HasMovingReadout<Op>;
  return can;
}

// Fails to compile, with one sentence, where a part of the op has no form over dual numbers.
template <class Op>
consteval bool check_moving_op() {
  constexpr MovingParts can = moving_parts<Op>();
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

// Throws unless each tangent that is given has the shape of its input.
template <class Real>
void check_tangents(const Tangents<Real>& d, const Inputs<Real>& in, const Mask<Real>& mask,
                    const std::string& where) {
  const auto check = [&](const StoredView<const Real>& tangent, const auto& like, const char* name,
                         const char* input) {
    if (!tangent.given()) return;
    require(like.given(), where, ": ", name, " was given, the call has no ", input);
    require_shape(tangent, like.shape(), name, where);
  };
  check(d.query, in.query, "the tangent of query", "query");
  check(d.key, in.key, "the tangent of key", "key");
  check(d.value, in.value, "the tangent of value", "value");
  check(d.extra, in.extra, "the tangent of extra", "extra input");
  check(d.bias, mask.bias, "the tangent of bias", "bias");
  check(d.query_inputs, in.query_inputs, "the tangent of query_inputs", "query_inputs");
  check(d.key_inputs, in.key_inputs, "the tangent of key_inputs", "key_inputs");
}
// Throws where what is written overlaps a tangent.
template <class Real, class Name>
void require_apart_from_tangents(const StoredView<Real>& out, Name name, const Tangents<Real>& d,
                                 const std::string& where) {
  for_each_operand(d, d.bias, [&](const char* input, const auto& tangent) {
    require_apart(out, tangent, name, NameOfInput{"the tangent of ", input}, where);
  });
}

// Throws where outputs and tangents do not fit the call, or each other; the arguments are those of open_jvp().
template <class Real>
void check_jvp_call(const OpTiles<Real>& op, const Geometry& g, const Inputs<Real>& in,
                    const Mask<Real>& mask, const StoredView<const Real>& known_out,
                    const Outputs<Real>* written, const Tangents<Real>& d,
                    const Outputs<Real>& tangent, const std::string& where) {
  check_tangents(d, in, mask, where);
  check_outputs(op, tangent, g, in, mask, where);
  require_apart_from_tangents(tangent.out, "the tangent of out", d, where);
  require_apart_from_tangents(tangent.lse, "the tangent of lse", d, where);
  require_apart_from_tangents(tangent.steps, "the tangent of steps", d, where);
  if (tangent.lse.given())
    require(op.normaliser.traits.differentiates_lse, where,
            ": the tangent of lse was asked for, the op's normaliser has no derivative of lse "
            "(plug/normaliser.hpp)");
  if (written) {
    check_outputs(op, *written, g, in, mask, where);
    for (const auto& [view, name] :
         {std::pair{&written->out, "out"}, {&written->lse, "lse"}, {&written->steps, "steps"}}) {
      require_apart_from_tangents(*view, name, d, where);
      require_apart(*view, tangent.out, name, "the tangent of out", where);
      require_apart(*view, tangent.lse, name, "the tangent of lse", where);
      require_apart(*view, tangent.steps, name, "the tangent of steps", where);
    }
  } else {
    require_shape(known_out, {g.batch, g.heads, g.len_q, g.dim_v}, "out", where);
    require_apart(tangent.out, known_out, "the tangent of out", "out", where);
  }
}

template <class Real>
void Driver<Real>::jvp(const OpTiles<Real>& op, const OpJvps<Real>& jvps, const Inputs<Real>& in,
                       const Mask<Real>& mask, const Saved<Real>* saved,
                       const StoredView<const Real>& known_out, const Outputs<Real>* written,
                       const Tangents<Real>& d, const Outputs<Real>& tangent,
                       const Options& options) {
  const std::string where = door_name("heed::jvp", options.name);
  require_options<Real>(options, where);
  require(!options.precision.mixes(), where,
          ": precision is mixed, it must be storage; tangents are computed as they are stored");
  refuse_share(in, where);
  if (in.packed)
    return jvp_packed(op, jvps, in, mask, saved, known_out, written, d, tangent, options, where);
  const Geometry g = geometry_of(op, in, where);
  require_one_piece(in.key, "key", where);
  require_one_piece(in.value, "value", where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  check_jvp_call(op, g, in, mask, known_out, written, d, tangent, where);
  if (!written)
    check_saved(op, *saved, CallStamp::of(op.type, g, mask, scale_of(op, g, options), options),
                where);

  WidenedTensors<Real> copies(options.threads);
  Operands<Real> operands{copies.read(in.query), copies.read(in.key), copies.read(in.value),
                          copies.read(in.extra)};
  const auto inputs = take_inputs(op, g, in, copies, resolve_threads(options.threads), operands);
  TangentOperands<Real> moving{copies.read(d.query),     copies.read(d.key),
                               copies.read(d.value),     copies.read(d.extra),
                               copies.read(d.bias),      copies.read(d.query_inputs),
                               copies.read(d.key_inputs)};
  if (inputs) {
    const TokenColumns& columns = op.columns;
    moving.part_inputs = part_inputs_of(columns, moving.query_inputs, moving.key_inputs);
    moving.query_inputs = columns_of(moving.query_inputs, columns.score_query);
    moving.key_inputs = columns_of(moving.key_inputs, columns.score_key);
    inputs->take_tangents(moving.query_inputs, moving.key_inputs);
  }
  JvpOutputs<Real> to;
  to.saved = saved;
  to.out_tangent = copies.write(tangent.out);
  to.lse_tangent = copies.write(tangent.lse);
  to.steps_tangent = copies.write(tangent.steps);
  if (written) {
    to.out = copies.write(written->out);
    to.lse = copies.write(written->lse);
    to.steps = copies.write(written->steps);
  } else {
    to.known_out = copies.read(known_out);
  }
  run_jvp(op, jvps, g, operands, bound, moving, to, options);
  copies.round();
}

// Sequence after sequence, each on all threads.
template <class Real>
void Driver<Real>::jvp_packed(const OpTiles<Real>& op, const OpJvps<Real>& jvps,
                              const Inputs<Real>& in, const Mask<Real>& mask,
                              const Saved<Real>* saved, const StoredView<const Real>& known_out,
                              const Outputs<Real>* written, const Tangents<Real>& d,
                              const Outputs<Real>& tangent, const Options& options,
                              const std::string& where) {
  const PackedCalls<Real> packed(in, mask, joins_sequences(op), where);
  require(!packed.with_caches(), where, ": packed.caches has ", packed.sequences(),
          " sequences, forward() alone reads keys and values of caches; give them as tensors");
  const std::vector<PackedCall<Real>> calls = packed.calls(options, geometry_setter(op));
  const Geometry whole = packed.whole(calls[0].geometry);
  check_jvp_call(op, whole, in, mask, known_out, written, d, tangent, where);
  if (saved) require_packed_saved(op, *saved, whole, mask, options, packed, where);
  for (Index n = 0; n < packed.size(); ++n) {
    const PackedCall<Real>& call = calls[std::size_t(n)];
    Tangents<Real> own;
    own.query = packed.of_queries(d.query, n);
    own.key = packed.of_keys(d.key, n);
    own.value = packed.of_keys(d.value, n);
    own.extra = packed.of_queries(d.extra, n);
    own.bias = corner_of(d.bias, packed.run(n));
    own.query_inputs = packed.of_queries(d.query_inputs, n);
    own.key_inputs = packed.of_keys(d.key_inputs, n);
    std::optional<Outputs<Real>> to;
    if (written) to = packed.outputs(*written, n);
    jvp(op, jvps, call.in, call.mask, saved ? &saved->sequences[std::size_t(n)] : nullptr,
        packed.of_queries(known_out, n), to ? &*to : nullptr, own, packed.outputs(tangent, n),
        call.options);
  }
}

// run(OpJvpsOf) for an op and a direction of its parameters; none is a direction of zeros.
template <class Op, class Run>
void with_direction(const Op& op, const Op* op_tangent, const std::string& where, Run&& run) {
  const Op direction = op_tangent ? *op_tangent : zeros_like(op);
  require_direction(op, direction, where);
  const OpJvpsOf<Op> of(op, direction);
  run(of);
}

// Both doors. `known_out`: out of the forward that filled `saved`; `written`: where out goes without it.
template <class Op, class Real>
void open_jvp(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
              const Saved<Real>* saved, const StoredView<const Real>& known_out,
              const Outputs<Real>* written, const Tangents<Real>& d, const Outputs<Real>& tangent,
              const Op* op_tangent, const Options& options) {
  static_assert(check_moving_op<Op>());
  const OpTilesOf<Op> of(op);
  with_direction(op, op_tangent, door_name("heed::jvp", options.name),
                 [&](const OpJvpsOf<Op>& jvps) {
                   Driver<Real>::jvp(of.tiles(), jvps.jvps(), in, mask, saved, known_out, written,
                                     d, tangent, options);
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
  detail::open_jvp<Op, Real>(op, in, mask, &saved, out, nullptr, tangents, out_tangent, op_tangent,
                             options);
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
    detail::open_jvp<Op, Real>(op, in, mask, nullptr, {}, &out, tangents, out_tangent, op_tangent,
                               options);
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
         const detail::GivenAny& op_tangent = {}, const Options& options = {});
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
