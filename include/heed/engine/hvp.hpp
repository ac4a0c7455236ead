// SPDX-License-Identifier: Apache-2.0
#pragma once

// Hessian-vector products: how the gradients that backward() gives move when inputs, parameters and grad_out move in one
// direction. Without the Hessian, in O(len) memory.
//
//   forward(op, in, mask, out, &saved);
//   hvp(op, in, mask, saved, out, grad_out, {query_tangent, key_tangent}, {}, {to_query, to_key, to_value}, &to_op);
//
// For a loss L of out with dL/dout = grad_out and its Hessian H: grad_out_tangent = H out., with out. from jvp(), makes the
// results the products of the whole loss's Hessian; without it grad_out is held still.
//
// Ops     one softmax without a further readout: plain attention, adaptive resonance, own scores with all that these may read,
//         but no table of categories and no projection. A score's second derivatives come from dual numbers through its
//         score_vjp, or, where it has none, of dual numbers of dual numbers through the formula; those of features, row
//         transforms and sums over tokens from dual numbers through their own vjp, once per row.
// Cost    with jvp(), 8.5 times the flops of forward, 3.4 times those of backward, and the second derivatives of the score:
//         those of DAR take longer than all products (8 to 10 times the time of backward, AVX2, width 64). Rows that are
//         transformed take two products more, relative rows ten between queries and table.
// Memory  O(len): out., lse., what derived values and transformed rows of keys gather, and numbers of tokens.

#include <heed/engine/hvp_walk.hpp>
#include <heed/engine/jvp.hpp>
#include <heed/engine/op_hvps.hpp>

#include <string>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// Which parts of an op hvp() can run.
struct HvpParts {
  bool kind = true, table = true, transform = true;
  [[nodiscard]] constexpr bool all() const { return kind && table && transform; }
};
template <class Op>
[[nodiscard]] consteval HvpParts hvp_parts() {
  using Real = typename Op::Scalar;
  using Score = typename Op::ScoreType;
  using Normaliser = typename Op::NormaliserType;
  HvpParts can;
  can.kind = mergeable<Normaliser> && !has_learnt_keys<Normaliser> && !reads_inputs<Normaliser> &&
             Op::ReadoutType::identity;
  can.table = !Score::has_table || table_by_distance<Score>;
  if constexpr (Score::has_transform)
    can.transform =
        requires(const Rebound<Score, DualPack<Real>> score, const DualRowInPlace<Real>& x,
                 const LaneSum<Real, DualPack<Real>>& sum, Rebound<Score, DualPack<Real>>& grad) {
      score.transform_vjp(RowSide::key, Index(0), x, x, sum, grad);
    };
  return can;
}

// Fails to compile, with one sentence, where the op is not among those that hvp() carries.
template <class Op>
consteval bool check_hvp_op() {
  constexpr HvpParts can = hvp_parts<Op>();
  static_assert(can.kind,
                "heed: hvp() carries ops whose weights are one softmax and whose rows are not read "
                "out further; this op is of another kind (engine/hvp.hpp)");
  static_assert(
      can.table,
      "heed: hvp() carries tables of positions and of distances; this score reads a table "
      "of categories (engine/hvp.hpp)");
  static_assert(
      can.transform,
      "heed: hvp() runs transform_vjp() of rows over dual numbers; this one does not take them "
      "(plug/transform.hpp)");
  return true;
}

template <class Real>
struct HvpArguments : CallArguments<Real> {
  const Saved<Real>& saved;
  const StoredView<const Real>&out, &grad_out;
  const Tangents<Real>& d;
  const StoredView<const Real>& grad_out_tangent;
  const Gradients<Real>& to;
};

// Throws where outputs, tangents and gradients do not fit the call, or each other.
template <class Real>
void check_hvp(const OpenCall<Real>& call, const HvpArguments<Real>& given) {
  const Geometry& g = call.geometry;
  const std::string& where = call.where;
  const Shape out_shape{g.batch, g.heads, g.len_q, g.dim_v};
  require_shape(given.out, out_shape, "out", where);
  require_shape(given.grad_out, out_shape, "grad_out", where);
  if (given.grad_out_tangent.given())
    require_shape(given.grad_out_tangent, out_shape, "the tangent of grad_out", where);
  const auto tangents = memory_of("the tangent of ", given.d, given.d.bias);
  check_tangents(tangents, call.in, call.mask, where);
  check_gradients(given.to, call.in, call.mask, given.out, OutputGradients<Real>(given.grad_out),
                  where);
  for (const NamedMemory& grad : memory_of("grad_", given.to, given.to.bias)) {
    require_apart(grad, tangents, where);
    require_apart(grad, named_memory("the tangent of grad_out", given.grad_out_tangent), where);
  }
  call.check(given.saved);
}

template <class Real>
void Driver<Real>::hvp(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const OpJvps<Real>& jvps,
                       const ScoreHvps<Real>& hvps, const HvpArguments<Real>& given,
                       OpGradient<Real>* grad_op) {
  const OpenCall<Real> open =
      open_call({.name = "heed::hvp", .as_stored = "second derivatives"}, op, given);
  require(op.score.projection == nullptr, open.where,
          ": the score has a projection, second derivatives are for scores at full width");
  const BoundMask<Real> bound = open.bound_mask(given.options.threads);
  check_hvp(open, given);

  WidenedTensors<Real> copies(given.options.threads);
  auto operands = copies.template read_all<Operands<Real>>(given.in);
  const auto inputs = take_inputs(op, open.geometry, open.threads(), operands);
  auto tangents = copies.template read_all<TangentOperands<Real>>(given.d);
  auto to = copies.template write_all<GradientOperands<Real>>(given.to);
  const HvpOperands<Real> outputs{copies.read(given.out), copies.read(given.grad_out),
                                  copies.read(given.grad_out_tangent)};
  const auto run = [&](const InputGradients<Real>& input_gradients) {
    run_hvp(op, vjps, jvps, hvps, open.geometry, operands, bound, given.saved, outputs, tangents,
            to, input_gradients, grad_op, given.options);
  };
  if (inputs) {
    SummedInputProducts<Real> products(hvps, *inputs, tangents.key_inputs);
    inputs->take_tangents(tangents.query_inputs, tangents.key_inputs);
    run(products.take(to.query_inputs, to.key_inputs));
    products.chain();
  } else {
    run({});
  }
  copies.round();
}

template <class Real, bool fits>
struct GradOutTangentArgument : ArgumentOf<StoredView<const Real>> {
  static_assert(fits,
                "heed: grad_out_tangent, behind the tangents, must be a view {pointer, shape} of "
                "numbers of the op's type, or {} for none (core/view.hpp)");
};

}  // namespace detail

// `to` and `to_op` receive the derivatives, along the direction, of what backward() with the same arguments writes to
// `grads` and `grad_op`; tensors are overwritten, empty views skipped. The direction: `tangents` and `grad_out_tangent`,
// of the shapes of what they move (an empty one holds still), and `op_tangent`, an object of the op's type. `saved` and
// `out` are those of forward() with the same op, inputs, mask, scale and dropout.
//
// Masks, rows that see nothing and NaNs as in jvp() and backward(); the same bits for any number of threads.
// Throws std::invalid_argument on arguments that do not fit, std::bad_alloc.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void hvp(const Op& op, const Inputs<Real>& in, const Mask<typename Op::Scalar>& mask,
         const Saved<typename Op::Scalar>& saved, const StoredView<const typename Op::Scalar>& out,
         const StoredView<const typename Op::Scalar>& grad_out,
         const Tangents<typename Op::Scalar>& tangents,
         const StoredView<const typename Op::Scalar>& grad_out_tangent,
         const Gradients<typename Op::Scalar>& to, std::type_identity_t<Op>* to_op = nullptr,
         const std::type_identity_t<Op>* op_tangent = nullptr, const Options& options = {}) {
  using namespace detail;
  static_assert(check_attention_op<Op>());
  static_assert(check_jvp_op<Op>() && check_hvp_op<Op>());
  with_direction(
      op, op_tangent, door_name("heed::hvp", options.name), [&](const OpJvpsOf<Op>& jvps) {
        const ScoreHvpsOf<typename Op::ScoreType, Real> hvps(op.score, jvps.direction().score,
                                                             jvps.score());
        Door<Op>::with_gradient(
            op, to_op,
            [&](const OpTiles<Real>& tiles, const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
              Driver<Real>::hvp(
                  tiles, vjps, jvps.jvps(), hvps,
                  {{in, mask, options}, saved, out, grad_out, tangents, grad_out_tangent, to},
                  gradient);
            });
      });
}

// For calls that do not fit (engine/mistakes.hpp).
template <class Op>
void hvp(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
         const detail::Given<Op, detail::MaskArgument>& mask,
         const detail::Given<Op, detail::SavedArgument>& saved,
         const detail::Given<Op, detail::KnownOutArgument>& out,
         const detail::Given<Op, detail::GradOutArgument>& grad_out,
         const detail::Given<Op, detail::TangentsArgument>& tangents,
         const detail::Given<Op, detail::GradOutTangentArgument>& grad_out_tangent,
         const detail::Given<Op, detail::GradientsArgument>& to,
         std::type_identity_t<Op>* to_op = nullptr,
         const std::type_identity_t<Op>* op_tangent = nullptr, const Options& options = {});
template <class Op>
void hvp(const Op&, const detail::GivenAny&, const detail::GivenAny& = {},
         const detail::GivenAny& = {}, const detail::GivenAny& = {}, const detail::GivenAny& = {},
         const detail::GivenAny& = {}, const detail::GivenAny& = {}) {
  static_assert(detail::is_complete_call<Op>,
                "heed: an argument of hvp(op, inputs, mask, saved, out, grad_out, tangents, "
                "grad_out_tangent, gradients) is missing");
}

}  // namespace HEED_ABI
}  // namespace heed
