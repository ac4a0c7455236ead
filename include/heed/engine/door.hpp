// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two calls, declared. doors.hpp defines them for any op; compiled.hpp promises
// them for heed's own.

#include <heed/core/function_ref.hpp>
#include <heed/engine/mistakes.hpp>

#include <concepts>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct SharedOp;
template <class Real>
struct OpGradient;

namespace detail {

// Both calls of one op: a class, so that one line instantiates both.
template <class Op>
struct Door {
  using Real = typename Op::Scalar;

  static void forward(const Op& op, const ForwardArguments<Real>& given);
  static void backward(const Op& op, const BackwardArguments<Real>& given, Op* grad_op);
  // For packed sequences, defined in packed_doors.hpp.
  static void forward_packed(const Op& op, const ForwardArguments<Real>& given);
  static void backward_packed(const Op& op, const BackwardArguments<Real>& given, Op* grad_op);
  // Calls run(op, gradient), which adds to the gradient of `grad_op`, if it is given; defined in shared_op.hpp.
  using Sharer = FunctionRef<const SharedOp<Real>&, OpGradient<Real>*>;
  static void share(const Op& op, Op* grad_op, const Sharer& run);
};

}  // namespace detail

// out = op(query, key, value), shape (batch, heads, len_q, dim_v). `out` is a view, or {out, lse, steps}, where lse (batch,
// heads, len_q, maps) receives the log sum exp of the scores, and steps what the steps of each row come to, such as the
// time that it takes, each if it is given (engine/call.hpp); none may overlap an input. `saved` receives what
// backward() needs; after an exception it is of no use.
//
// Tensors may be stored as bfloat16 or half, and those that are read as int8 with a scale per row, each for itself. The
// call computes with the numbers that they stand for, as it does with Reals, and rounds its results once, to the nearest:
// out and gradients have the bits that a call on widened copies has after rounding.
//
// A row that sees no key mixes to 0, with lse -infinity. Nothing that a mask hides reaches a row, be it NaN or infinite.
// Among visible pairs
//   a score of -infinity has weight 0 beside a larger one, and is no part of the gradients of the scores;
//   where all scores of a row are -infinity, or one is NaN or +infinity, the row of out and its lse are NaN, and
//   so are the gradients of its query, of the keys and values that it sees, and of the parameters that it used;
//   a value that is NaN or infinite shows in out, also at weight 0: 0 times infinity is NaN.
// Throws std::invalid_argument on arguments that do not fit, std::bad_alloc; inputs are never changed.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void forward(const Op& op, const Inputs<Real>& in, const Mask<typename Op::Scalar>& mask,
             const Outputs<typename Op::Scalar>& out, Saved<typename Op::Scalar>* saved = nullptr,
             const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  detail::Door<Op>::forward(op, {{in, mask, options}, out, saved});
}
// The same for inputs that may be packed sequences (Packed in engine/call.hpp): each of them has the bits of a call of its own.
// heed/packed.hpp and heed/kv_pool.hpp bring it.
template <AttentionOp Op, std::same_as<PackedInputs<typename Op::Scalar>> In>
void forward(const Op& op, const In& in, const Mask<typename Op::Scalar>& mask,
             const Outputs<typename Op::Scalar>& out, Saved<typename Op::Scalar>* saved = nullptr,
             const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  detail::Door<Op>::forward_packed(op, {{in, mask, options}, out, saved});
}
// For calls that do not fit (engine/mistakes.hpp).
template <class Op>
void forward(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
             const detail::Given<Op, detail::MaskArgument>& mask,
             const detail::Given<Op, detail::OutArgument>& out,
             const detail::Given<Op, detail::SavedPointerArgument>& saved = nullptr,
             const Options& options = {});
template <class Op>
void forward(const Op&, const detail::GivenAny&, const detail::GivenAny& = {},
             Saved<typename detail::NumbersOf<Op>::Scalar>* = nullptr, const Options& = {}) {
  static_assert(detail::is_complete_call<Op>,
                "heed: an argument of forward(op, inputs, mask, out) is missing; a mask may be {}");
}

// Gradients of sum(out o grad_out) for inputs, bias and parameters; of sum(out o grad_out) + sum(lse o grad_lse)
// + sum(steps o grad_steps) where `grad_out` is {grad_out, grad_lse, grad_steps}. `saved` and `out` are those of
// forward() with the same op, inputs, mask, scale, dropout and precision; a mask that was made anew, of equal values, is the
// same (mask/mask_stamp.hpp). Views in `grads` are overwritten; empty
// ones are skipped. `grad_op`, if given, becomes an object of the op's type that holds parameter gradients.
// Throws as forward() does.
template <AttentionOp Op, std::same_as<typename Op::Scalar> Real = typename Op::Scalar>
void backward(const Op& op, const Inputs<Real>& in, const Mask<typename Op::Scalar>& mask,
              const Saved<typename Op::Scalar>& saved,
              const StoredView<const typename Op::Scalar>& out,
              const OutputGradients<typename Op::Scalar>& grad_out,
              const Gradients<typename Op::Scalar>& grads,
              std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  detail::Door<Op>::backward(op, {{in, mask, options}, saved, out, grad_out, grads}, grad_op);
}
template <AttentionOp Op, std::same_as<PackedInputs<typename Op::Scalar>> In>
void backward(const Op& op, const In& in, const Mask<typename Op::Scalar>& mask,
              const Saved<typename Op::Scalar>& saved,
              const StoredView<const typename Op::Scalar>& out,
              const OutputGradients<typename Op::Scalar>& grad_out,
              const Gradients<typename Op::Scalar>& grads,
              std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  detail::Door<Op>::backward_packed(op, {{in, mask, options}, saved, out, grad_out, grads},
                                    grad_op);
}
template <class Op>
void backward(const Op& op, const detail::Given<Op, detail::InputsArgument>& in,
              const detail::Given<Op, detail::MaskArgument>& mask,
              const detail::Given<Op, detail::SavedArgument>& saved,
              const detail::Given<Op, detail::KnownOutArgument>& out,
              const detail::Given<Op, detail::GradOutArgument>& grad_out,
              const detail::Given<Op, detail::GradientsArgument>& grads,
              std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {});
template <class Op>
void backward(const Op&, const detail::GivenAny&, const detail::GivenAny& = {},
              const detail::GivenAny& = {}, const detail::GivenAny& = {},
              const detail::GivenAny& = {}) {
  static_assert(detail::is_complete_call<Op>,
                "heed: an argument of backward(op, inputs, mask, saved, out, grad_out, gradients) "
                "is missing");
}

}  // namespace HEED_ABI
}  // namespace heed
