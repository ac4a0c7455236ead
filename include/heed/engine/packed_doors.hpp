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

template <class Call>
[[nodiscard]] std::vector<Call*> pointers_to(const std::vector<std::unique_ptr<Call>>& made) {
  std::vector<Call*> all;
  for (const auto& call : made) all.push_back(call.get());
  return all;
}

// Is `saved` of packed sequences such as these? The sizes of each are asked for by its own call.
template <class Real>
void require_packed_saved(const OpenCall<Real>& all, const Saved<Real>& saved, Index calls) {
  const std::string difference = saved.stamp.difference(all.stamp());
  require(difference.empty(), all.where, ": saved ", difference);
  require(Index(saved.sequences.size()) == calls, all.where, ": saved is of sequences with ",
          saved.sequences.size(), " neighbours of different lengths, these have ", calls);
}

template <class Real>
void Driver<Real>::forward_packed(const OpTiles<Real>& op, const ForwardArguments<Real>& given) {
  if (!given.in.packed) return forward(op, given);
  Saved<Real>* const saved = given.saved;
  if (saved) saved->stamp = {};
  OpenCall<Real> all(op, given, kForwardDoor);
  const PackedCalls<Real> packed(all);
  const PackedPlan<Real> plan = packed.plan(given.out);
  all.geometry = plan.whole;
  all.check(given.out);
  if (saved) saved->sequences.resize(std::size_t(packed.size()));
  const auto make = [&](const PackedCall<Real>& call, int threads) {
    return std::make_unique<ForwardCall<Real>>(
        call.open, packed.outputs(given.out, call.number),
        saved ? &saved->sequences[std::size_t(call.number)] : nullptr, threads);
  };
  const auto large = Index(plan.large.size());
  const Preparation preparation(large, all.threads());
  std::vector<std::unique_ptr<ForwardCall<Real>>> made(plan.large.size());
  preparation.run(large, [&](Index n, int threads) {
    made[std::size_t(n)] = make(plan.large[std::size_t(n)], threads);
  });
  if (!made.empty()) run_forward<Real>(pointers_to(made), op, preparation, given.options);
  parallel_for(Index(plan.small.size()), plan.threads, [&](Index i) {
    const PackedCall<Real> call(packed, plan.small[std::size_t(i)]);
    make(call, 1)->run_alone();
  });
  if (!saved) return;
  packed.gather(*saved, op.maps(), plan.whole);
  saved->stamp = all.stamp();
}

template <class Real>
void Driver<Real>::backward_packed(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                   const BackwardArguments<Real>& given,
                                   OpGradient<Real>* grad_op) {
  if (!given.in.packed) return backward(op, vjps, given, grad_op);
  OpenCall<Real> all(op, given, kBackwardDoor);
  const PackedCalls<Real> packed(all);
  const std::deque<PackedCall<Real>> calls = packed.calls();
  all.geometry = packed.whole(calls[0].open.geometry);
  all.check(given);
  require_packed_saved(all, given.saved, packed.size());
  std::deque<BoundMask<Real>> bounds;
  for (std::size_t n = 0; n < calls.size(); ++n) {
    calls[n].open.check(given.saved.sequences[n]);
    bounds.push_back(calls[n].open.bound_mask(given.options.threads));
  }
  // One gradient of bias, of which each sequence adds to its corner.
  WidenedTensors<Real> copies(given.options.threads);
  Gradients<Real> grads = given.grads;
  const TensorView<Real> bias = copies.write(grads.bias);
  grads.bias = bias;
  set_zero<Real>({bias}, all.threads());
  const Preparation preparation(packed.size(), all.threads());
  std::vector<std::unique_ptr<BackwardCall<Real>>> made(calls.size());
  preparation.run(packed.size(), [&](Index n, int threads) {
    const OpenCall<Real>& call = calls[std::size_t(n)].open;
    made[std::size_t(n)] = std::make_unique<BackwardCall<Real>>(
        call, vjps, bounds[std::size_t(n)],
        BackwardArguments<Real>{{call.in, call.mask, call.options},
                                given.saved.sequences[std::size_t(n)],
                                packed.part(given.out, TokensOf::queries, n),
                                packed.outputs(given.grad_out, n),
                                packed.tensors(grads, n)},
        threads);
  });
  run_backward<Real>(pointers_to(made), bias.given() && bias.shape().batch == 1, grad_op,
                     given.options);
  preparation.run(packed.size(), [&](Index n, int) { made[std::size_t(n)]->finish(); });
  copies.round();
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
