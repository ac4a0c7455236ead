// SPDX-License-Identifier: Apache-2.0
#pragma once

// The calls of the engine, declared: each is a template of the scalar alone, and takes an op as tiles.hpp, vjps.hpp, jvps.hpp and hvps.hpp see it. A
// program that links heed::engine compiles none of them (heed/compiled_engine.hpp).

#include <heed/engine/call.hpp>
#include <heed/engine/vjps.hpp>
#include <heed/mask/mask.hpp>

namespace heed {
inline namespace HEED_ABI {

struct Explanation;
enum class Pass : int;
template <class Real>
struct OpJvps;
template <class Real>
class ScoreHvps;
template <class Real>
struct Tangents;

namespace detail {

template <class Real>
struct HandedOn;

// A class, so that one line instantiates all of them. Gradients of parameters are added to `grad_op`, if it is given.
template <class Real>
struct Driver {
  // doors.hpp
  static void forward(const OpTiles<Real>& op, const Inputs<Real>& in, const Mask<Real>& mask,
                      const Outputs<Real>& outputs, Saved<Real>* saved, const Options& options);
  static void backward(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const Inputs<Real>& in,
                       const Mask<Real>& mask, const Saved<Real>& saved,
                       const StoredView<const Real>& out, const OutputGradients<Real>& output,
                       const Gradients<Real>& grads, OpGradient<Real>* grad_op,
                       const Options& options);
  [[nodiscard]] static Index share_step(const OpTiles<Real>& op, const Geometry& g,
                                        const Options& options);
  // May a call of the op on these keys take the features that are kept?
  [[nodiscard]] static bool features_fit(const KeyFeatures<Real>& kept, const OpTiles<Real>& op,
                                         const Geometry& g, const StoredView<const Real>& key);
  // packed_doors.hpp
  static void forward_packed(const OpTiles<Real>& op, const PackedInputs<Real>& in,
                             const Mask<Real>& mask, const Outputs<Real>& outputs,
                             Saved<Real>* saved, const Options& options);
  static void backward_packed(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                              const PackedInputs<Real>& in, const Mask<Real>& mask,
                              const Saved<Real>& saved, const StoredView<const Real>& out,
                              const OutputGradients<Real>& output, const Gradients<Real>& grads,
                              OpGradient<Real>* grad_op, const Options& options);
  // backward_stage.hpp
  static void backward_stage(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                             const Inputs<Real>& in, const Mask<Real>& mask,
                             const Saved<Real>& saved, const StoredView<const Real>& out,
                             const OutputGradients<Real>& output, const Gradients<Real>& grads,
                             HandedOn<Real>& on, bool last, OpGradient<Real>* grad_op,
                             const Options& options);
  // jvp.hpp. known_out: out of the forward that filled `saved`; written: where out goes without it.
  static void jvp(const OpTiles<Real>& op, const OpJvps<Real>& jvps, const Inputs<Real>& in,
                  const Mask<Real>& mask, const Saved<Real>* saved,
                  const StoredView<const Real>& known_out, const Outputs<Real>* written,
                  const Tangents<Real>& d, const Outputs<Real>& tangent, const Options& options);
  static void jvp_packed(const OpTiles<Real>& op, const OpJvps<Real>& jvps, const Inputs<Real>& in,
                         const Mask<Real>& mask, const Saved<Real>* saved,
                         const StoredView<const Real>& known_out, const Outputs<Real>* written,
                         const Tangents<Real>& d, const Outputs<Real>& tangent,
                         const Options& options, const std::string& where);
  // hvp.hpp
  static void hvp(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const OpJvps<Real>& jvps,
                  const ScoreHvps<Real>& hvps, const Inputs<Real>& in, const Mask<Real>& mask,
                  const Saved<Real>& saved, const StoredView<const Real>& out,
                  const StoredView<const Real>& grad_out, const Tangents<Real>& tangents,
                  const StoredView<const Real>& grad_out_tangent, const Gradients<Real>& to,
                  OpGradient<Real>* grad_op, const Options& options);
  // explain.hpp
  [[nodiscard]] static Explanation explain(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                           const Geometry& g, const Mask<Real>& mask, Pass pass,
                                           const Options& options);
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
