// SPDX-License-Identifier: Apache-2.0
#pragma once

// The two calls, and what they consist of: the engine's own, which knows no op (Driver), and the op as the engine takes it (Door).
// doors.hpp and op_door.hpp define these; a program that links heed::compiled compiles neither.

#include <heed/core/function_ref.hpp>
#include <heed/engine/mistakes.hpp>

#include <concepts>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
struct OpTiles;
template <class Real>
struct OpVjps;
template <class Real>
struct OpJvps;
template <class Real>
class ScoreHvps;
template <class Real>
struct OpGradient;
struct Explanation;
enum class Pass : int;

namespace detail {

template <class Real>
struct HandedOn;
template <class Real>
struct JvpArguments;
template <class Real>
struct HvpArguments;

// The engine's calls: a class, so that one line instantiates all of them (compiled_engine.hpp). Gradients of parameters are
// added to `grad_op`, if it is given.
template <class Real>
struct Driver {
  // doors.hpp. on: of a call that shares compute one after the other, what the share before has left (HandedOn).
  static void forward(const OpTiles<Real>& op, const ForwardArguments<Real>& given);
  static void backward(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                       const BackwardArguments<Real>& given, OpGradient<Real>* grad_op,
                       HandedOn<Real>* on = nullptr, bool last = true);
  [[nodiscard]] static Index share_step(const OpTiles<Real>& op, const Geometry& g,
                                        const Options& options);
  // May a call of the op on these keys take the features that are kept?
  [[nodiscard]] static bool features_fit(const KeyFeatures<Real>& kept, const OpTiles<Real>& op,
                                         const Geometry& g, const StoredView<const Real>& key);
  // packed_doors.hpp
  static void forward_packed(const OpTiles<Real>& op, const ForwardArguments<Real>& given);
  static void backward_packed(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                              const BackwardArguments<Real>& given, OpGradient<Real>* grad_op);
  // jvp.hpp
  static void jvp(const OpTiles<Real>& op, const OpJvps<Real>& jvps,
                  const JvpArguments<Real>& given);
  // hvp.hpp
  static void hvp(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const OpJvps<Real>& jvps,
                  const ScoreHvps<Real>& hvps, const HvpArguments<Real>& given,
                  OpGradient<Real>* grad_op);
  // explain.hpp
  [[nodiscard]] static Explanation explain(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                           const Geometry& g, const Mask<Real>& mask, Pass pass,
                                           const Options& options);
};

// An op as those calls take it: all that another op costs a compiler (compiled.hpp).
template <class Op>
struct Door {
  using Real = typename Op::Scalar;

  // run(tiles)
  using WithTiles = FunctionRef<const OpTiles<Real>&>;
  static void with_tiles(const Op& op, const WithTiles& run);
  // run(tiles, vjps, gradient): what is added to `gradient` goes to `grad_op`. Without a grad_op the gradient is null.
  using WithGradient = FunctionRef<const OpTiles<Real>&, const OpVjps<Real>&, OpGradient<Real>*>;
  static void with_gradient(const Op& op, Op* grad_op, const WithGradient& run);
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
  detail::Door<Op>::with_tiles(op, [&](const OpTiles<Real>& tiles) {
    detail::Driver<Real>::forward(tiles, {{in, mask, options}, out, saved});
  });
}
// The same for inputs that may be packed sequences (Packed in engine/call.hpp): each of them has the bits of a call of its own.
// heed/packed.hpp and heed/kv_pool.hpp bring it.
template <AttentionOp Op, std::same_as<PackedInputs<typename Op::Scalar>> In>
void forward(const Op& op, const In& in, const Mask<typename Op::Scalar>& mask,
             const Outputs<typename Op::Scalar>& out, Saved<typename Op::Scalar>* saved = nullptr,
             const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  using Real = typename Op::Scalar;
  detail::Door<Op>::with_tiles(op, [&](const OpTiles<Real>& tiles) {
    detail::Driver<Real>::forward_packed(tiles, {{in, mask, options}, out, saved});
  });
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
  detail::Door<Op>::with_gradient(
      op, grad_op,
      [&](const OpTiles<Real>& tiles, const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
        detail::Driver<Real>::backward(
            tiles, vjps, {{in, mask, options}, saved, out, grad_out, grads}, gradient);
      });
}
template <AttentionOp Op, std::same_as<PackedInputs<typename Op::Scalar>> In>
void backward(const Op& op, const In& in, const Mask<typename Op::Scalar>& mask,
              const Saved<typename Op::Scalar>& saved,
              const StoredView<const typename Op::Scalar>& out,
              const OutputGradients<typename Op::Scalar>& grad_out,
              const Gradients<typename Op::Scalar>& grads,
              std::type_identity_t<Op>* grad_op = nullptr, const Options& options = {}) {
  static_assert(check_attention_op<Op>());
  using Real = typename Op::Scalar;
  detail::Door<Op>::with_gradient(
      op, grad_op,
      [&](const OpTiles<Real>& tiles, const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
        detail::Driver<Real>::backward_packed(
            tiles, vjps, {{in, mask, options}, saved, out, grad_out, grads}, gradient);
      });
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
