// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the compiler says where an argument of a public call is not what the call takes: one sentence that names the
// argument, and no list of candidates.
//
// Beside each door stands an overload of Given<Op, ...>s, which are made of anything, braces included. Where a call fits, the
// door is taken: its conversions are no worse, and it alone deduces a type of Inputs<Real>, by which it is the more specialised
// of both. Where it does not, the overload is what remains, and the conversion of the argument that does not fit is a
// static_assert. These overloads have no definition: nothing runs. A second one, of fewer arguments, says which are asked for.

#include <heed/engine/call.hpp>
#include <heed/mask/mask.hpp>
#include <heed/plug/check.hpp>

#include <concepts>
#include <initializer_list>
#include <type_traits>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// An argument: its type, and that of the tensors in its braces. `fits` is false where something else was given.
template <class Type, class View = Type>
struct ArgumentOf {
  using Whole = Type;
  using Part = View;
};
template <class Op, bool fits>
struct OpArgument {
  static_assert(fits, "heed: the first argument must be an op, such as heed::ScaledDot<float>{}");
};
template <class Real>
struct PartOfInputs : StoredView<const Real> {
  using StoredView<const Real>::StoredView;
  PartOfInputs(KeyFeatures<Real>*);
};
template <class Real, bool fits>
struct InputsArgument : ArgumentOf<Inputs<Real>, PartOfInputs<Real>> {
  static_assert(fits,
                "heed: query, key, value and other inputs must be views {pointer, shape} of "
                "numbers of the op's type (core/view.hpp)");
};
template <class Real, bool fits>
struct MaskArgument : ArgumentOf<Mask<Real>> {
  static_assert(fits,
                "heed: the mask, behind the inputs, must be a Mask for numbers of the op's type, "
                "or {} for none (mask/mask.hpp)");
};
template <class Real, bool fits>
struct OutArgument : ArgumentOf<Outputs<Real>, StoredView<Real>> {
  static_assert(fits,
                "heed: out must be a view {pointer, shape} of numbers of the op's type that are "
                "not const, or {out, lse, steps} (core/view.hpp)");
};
template <class Real, bool fits>
struct SavedPointerArgument : ArgumentOf<Saved<Real>*> {
  static_assert(fits,
                "heed: saved, behind out, must be &saved, of a Saved for numbers of the op's type, "
                "or nullptr (engine/call.hpp)");
};
template <class Real, bool fits>
struct SavedArgument : ArgumentOf<Saved<Real>> {
  static_assert(fits,
                "heed: saved, behind the mask, must be the Saved for numbers of the op's type that "
                "forward() filled (engine/call.hpp)");
};
template <class Real, bool fits>
struct KnownOutArgument : ArgumentOf<StoredView<const Real>> {
  static_assert(fits,
                "heed: out, behind saved, must be the view {pointer, shape} that forward() wrote, "
                "of numbers of the op's type (core/view.hpp)");
};
template <class Real, bool fits>
struct GradOutArgument : ArgumentOf<OutputGradients<Real>, StoredView<const Real>> {
  static_assert(fits,
                "heed: grad_out, behind out, must be a view {pointer, shape} of numbers of the "
                "op's type (core/view.hpp)");
};
template <class Real, bool fits>
struct GradientsArgument : ArgumentOf<Gradients<Real>, StoredView<Real>> {
  static_assert(fits,
                "heed: gradients must be views {pointer, shape} of numbers of the op's type that "
                "are not const (core/view.hpp)");
};
// For arguments of which nothing is asked.
struct Whatever {
  template <class... From>
  Whatever(const From&...) {}
};
template <class, bool>
struct AnyArgument : ArgumentOf<Whatever> {};

template <class Op>
struct NumbersOf {
  using Scalar = float;
};
template <AttentionOp Op>
struct NumbersOf<Op> {
  using Scalar = typename Op::Scalar;
};

// What was given for an argument, or for a part of it, where a Wanted was asked for.
template <class Op, template <class, bool> class Argument, class Wanted>
class GivenFor {
 public:
  GivenFor() { [[maybe_unused]] const Sentence<std::default_initializable<Wanted>> sentence; }
  template <class From>
  requires(!std::same_as<std::remove_cvref_t<From>, Shape>)  // {pointer, shape} is one view
      GivenFor(From&&) {
    [[maybe_unused]] const Sentence<std::convertible_to<From, Wanted>> sentence;
  }
  template <class Data>
  GivenFor(Data&&, const Shape&, const Strides& = {}) {
    [[maybe_unused]] const Sentence<std::constructible_from<Wanted, Data, const Shape&>> sentence;
  }

 private:
  template <bool fits>
  using Sentence =
      std::conditional_t<AttentionOp<Op>, Argument<typename NumbersOf<Op>::Scalar, fits>,
                         OpArgument<Op, false>>;
};
template <class Op, template <class, bool> class Argument,
          class Types = Argument<typename NumbersOf<Op>::Scalar, true>>
struct GivenAs : GivenFor<Op, Argument, typename Types::Whole> {
  using GivenFor<Op, Argument, typename Types::Whole>::GivenFor;
  GivenAs() = default;
  GivenAs(std::initializer_list<GivenFor<Op, Argument, typename Types::Part>>) {}
};

// The parameter of such an overload; no type is deduced from it.
template <class Op, template <class, bool> class Argument>
using Given = std::type_identity_t<GivenAs<Op, Argument>>;
using GivenAny = GivenAs<NumbersOf<void>, AnyArgument>;

// False, and known only where a call of too few arguments is compiled.
template <class Op>
inline constexpr bool is_complete_call = false;

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
