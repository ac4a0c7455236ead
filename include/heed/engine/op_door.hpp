// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a call of one op compiles: the op as tiles.hpp, vjps.hpp, jvps.hpp and hvps.hpp see it, handed to the engine's calls. These
// are declared here, templates of the scalar alone; a program that links heed::engine compiles none of them
// (heed/compiled_engine.hpp).

#include <heed/engine/door.hpp>
#include <heed/engine/op_vjps.hpp>

namespace heed {
inline namespace HEED_ABI {

struct Explanation;
enum class Pass : int;
template <class Real>
struct OpJvps;
template <class Real>
class ScoreHvps;

namespace detail {

template <class Real>
struct HandedOn;
template <class Real>
struct JvpArguments;
template <class Real>
struct HvpArguments;

// A class, so that one line instantiates all of them. Gradients of parameters are added to `grad_op`, if it is given.
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

// May a call of the op on these keys take the features that are kept?
template <class Op, class Real = typename Op::Scalar>
[[nodiscard]] bool key_features_fit(const KeyFeatures<Real>& kept, const Op& op, const Geometry& g,
                                    const StoredView<const Real>& key) {
  const OpTilesOf<Op> of(op);
  return Driver<Real>::features_fit(kept, of.tiles(), g, key);
}

// run(vjps, gradient) for an op whose gradients go to grad_op, if it is given.
template <class Op, class Run>
void with_gradient(const Op& op, Op* grad_op, Run&& run) {
  using Real = typename Op::Scalar;
  const OpVjpsOf<Op> of(op);
  const OpVjps<Real> vjps = of.vjps();
  if (!grad_op) return run(vjps, static_cast<OpGradient<Real>*>(nullptr));
  OpGradient<Real> gradient(vjps);
  run(vjps, &gradient);
  *grad_op = OpVjpsOf<Op>::typed(op, gradient);
}

template <class Op>
void Door<Op>::forward(const Op& op, const ForwardArguments<Real>& given) {
  const OpTilesOf<Op> of(op);
  Driver<Real>::forward(of.tiles(), given);
}
template <class Op>
void Door<Op>::forward_packed(const Op& op, const ForwardArguments<Real>& given) {
  const OpTilesOf<Op> of(op);
  Driver<Real>::forward_packed(of.tiles(), given);
}
template <class Op>
void Door<Op>::backward(const Op& op, const BackwardArguments<Real>& given, Op* grad_op) {
  const OpTilesOf<Op> of(op);
  with_gradient(op, grad_op, [&](const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
    Driver<Real>::backward(of.tiles(), vjps, given, gradient);
  });
}
template <class Op>
void Door<Op>::backward_packed(const Op& op, const BackwardArguments<Real>& given, Op* grad_op) {
  const OpTilesOf<Op> of(op);
  with_gradient(op, grad_op, [&](const OpVjps<Real>& vjps, OpGradient<Real>* gradient) {
    Driver<Real>::backward_packed(of.tiles(), vjps, given, gradient);
  });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
