// SPDX-License-Identifier: Apache-2.0
#pragma once

// forward() and backward() of the engine for packed sequences: each is checked, prepared and computed as a call of its own, all of them run together.

#include <heed/engine/doors.hpp>
#include <heed/engine/packed.hpp>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
[[nodiscard]] auto geometry_setter(const OpTiles<Real>& op) {
  return [&op](PackedCall<Real>& call) { call.geometry = geometry_of(op, call.in, call.where); };
}

template <class Real>
[[nodiscard]] CallStamp packed_stamp(const OpTiles<Real>& op, const Geometry& g,
                                     const Mask<Real>& mask, const Options& options,
                                     const PackedCalls<Real>& packed) {
  CallStamp stamp = CallStamp::of(op.type, g, mask, scale_of(op, g, options), options);
  stamp.sequences = packed.sequences();
  return stamp;
}
// Is `saved` of packed sequences such as these? The sizes of each are asked for by its own call.
template <class Real>
void require_packed_saved(const OpTiles<Real>& op, const Saved<Real>& saved, const Geometry& whole,
                          const Mask<Real>& mask, const Options& options,
                          const PackedCalls<Real>& packed, const std::string& where) {
  const std::string difference =
      saved.stamp.difference(packed_stamp(op, whole, mask, options, packed));
  require(difference.empty(), where, ": saved ", difference);
  require(Index(saved.sequences.size()) == packed.size(), where, ": saved is of sequences with ",
          saved.sequences.size(), " neighbours of different lengths, these have ", packed.size());
}

// May neighbours of one length be one call? Not where rows depend on all rows of a call.
template <class Real>
[[nodiscard]] bool joins_sequences(const OpTiles<Real>& op) {
  return !op.readout.traits.rehearses;
}

template <class Real>
void Driver<Real>::forward_packed(const OpTiles<Real>& op, const PackedInputs<Real>& in,
                                  const Mask<Real>& mask, const Outputs<Real>& outputs,
                                  Saved<Real>* saved, const Options& options) {
  if (!in.packed) return forward(op, in, mask, outputs, saved, options);
  const std::string where = door_name("heed::forward", options.name);
  if (saved) saved->stamp = {};
  require_options<Real>(options, where);
  const PackedCalls<Real> packed(in, mask, joins_sequences(op), where);
  const auto set_geometry = geometry_setter(op);
  const PackedPlan<Real> plan = packed.plan(outputs, options, set_geometry);
  check_outputs(op, outputs, plan.whole, in, mask, where);
  if (saved) saved->sequences.resize(std::size_t(packed.size()));
  const auto make = [&](const PackedCall<Real>& call, int threads) {
    return std::make_unique<ForwardCall<Real>>(
        op, call.geometry, call.in, call.mask, packed.outputs(outputs, call.number),
        saved ? &saved->sequences[std::size_t(call.number)] : nullptr, call.options, call.where,
        threads);
  };
  const auto large = Index(plan.large.size());
  const Preparation preparation(large, resolve_threads(options.threads));
  std::vector<std::unique_ptr<ForwardCall<Real>>> made(plan.large.size());
  preparation.run(large, [&](Index n, int threads) {
    made[std::size_t(n)] = make(plan.large[std::size_t(n)], threads);
  });
  std::vector<ForwardCall<Real>*> all;
  for (const auto& call : made) all.push_back(call.get());
  if (!all.empty()) run_forward_calls<Real>(op, all, preparation, options);
  parallel_for(Index(plan.small.size()), plan.threads, [&](Index i) {
    const PackedCall<Real> call = packed.call(plan.small[std::size_t(i)], options, set_geometry);
    make(call, 1)->run_alone();
  });
  if (!saved) return;
  packed.gather(*saved, op.maps(), plan.whole);
  saved->stamp = packed_stamp(op, plan.whole, mask, options, packed);
}

template <class Real>
void Driver<Real>::backward_packed(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                   const PackedInputs<Real>& in, const Mask<Real>& mask,
                                   const Saved<Real>& saved, const StoredView<const Real>& out,
                                   const OutputGradients<Real>& output,
                                   const Gradients<Real>& grads, OpGradient<Real>* grad_op,
                                   const Options& options) {
  if (!in.packed) return backward(op, vjps, in, mask, saved, out, output, grads, grad_op, options);
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  const PackedCalls<Real> packed(in, mask, joins_sequences(op), where);
  require(!packed.with_caches(), where, ": packed.caches has ", packed.sequences(),
          " sequences, forward() alone reads keys and values of caches; give them as tensors");
  const std::vector<PackedCall<Real>> calls = packed.calls(options, geometry_setter(op));
  const Geometry whole = packed.whole(calls[0].geometry);
  check_backward(op, whole, in, mask, out, output, grads, where);
  require_packed_saved(op, saved, whole, mask, options, packed, where);
  std::deque<BoundMask<Real>> bounds;
  for (std::size_t n = 0; n < calls.size(); ++n) {
    const PackedCall<Real>& call = calls[n];
    check_saved(op, saved.sequences[n],
                CallStamp::of(op.type, call.geometry, call.mask,
                              scale_of(op, call.geometry, call.options), call.options),
                call.where);
    bounds.emplace_back(call.mask, call.geometry, call.where.c_str(), options.threads);
  }
  // One gradient of bias, of which each sequence adds to its corner.
  WidenedTensors<Real> copies(options.threads);
  const TensorView<Real> bias = copies.write(grads.bias);
  set_zero<Real>({bias}, resolve_threads(options.threads));
  const Preparation preparation(packed.size(), resolve_threads(options.threads));
  std::vector<std::unique_ptr<BackwardCall<Real>>> made(calls.size());
  preparation.run(packed.size(), [&](Index n, int threads) {
    const PackedCall<Real>& call = calls[std::size_t(n)];
    made[std::size_t(n)] = std::make_unique<BackwardCall<Real>>(
        op, vjps, call.geometry, call.in, bounds[std::size_t(n)], saved.sequences[std::size_t(n)],
        packed.of_queries(out, n), packed.output_gradients(output, n),
        packed.gradients(grads, bias, n), call.options, threads);
  });
  std::vector<BackwardCall<Real>*> all;
  for (const auto& call : made) all.push_back(call.get());
  run_backward_calls<Real>(all, bias.given() && bias.shape().batch == 1, grad_op, preparation,
                           options);
  copies.round();
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
