// SPDX-License-Identifier: Apache-2.0
#pragma once

// The calls of the engine, declared: each is a template of the scalar alone, and takes an op as tiles.hpp, vjps.hpp, jvps.hpp and hvps.hpp see it. A
// program that links heed::engine compiles none of them (heed/compiled_engine.hpp).

#include <heed/engine/call.hpp>
#include <heed/engine/hvps.hpp>
#include <heed/mask/mask.hpp>

namespace heed {
inline namespace HEED_ABI {

struct Explanation;
enum class Pass : int;

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
  // doors.hpp. on: of a call that shares compute one after the other, what the share before has left (backward_stage.hpp).
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

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
