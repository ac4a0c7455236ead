// SPDX-License-Identifier: Apache-2.0
#pragma once

// The doors for packed sequences: each is checked, prepared and computed as a call of its own, all of them run together.

#include <heed/engine/doors.hpp>
#include <heed/engine/packed.hpp>

#include <deque>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// One of the calls that packed sequences are, with all that it refers to.
template <class Op>
struct PackedCall {
  using Real = typename Op::Scalar;
  std::string where;
  Inputs<Real> in;
  Mask<Real> mask;
  Options options;
  Geometry geometry;
};
template <class Op, class Real>
[[nodiscard]] PackedCall<Op> call_of(const Op& op, const PackedCalls<Real>& packed, Index n,
                                     const Options& options) {
  PackedCall<Op> call{
      packed.where(n), packed.inputs(n), packed.mask(n), packed.options(n, options), {}};
  call.geometry = geometry_of(op, call.in, call.where);
  return call;
}
template <class Op, class Real>
[[nodiscard]] std::vector<PackedCall<Op>> calls_of(const Op& op, const PackedCalls<Real>& packed,
                                                   const Options& options) {
  std::vector<PackedCall<Op>> calls;
  calls.reserve(std::size_t(packed.size()));
  for (Index n = 0; n < packed.size(); ++n) calls.push_back(call_of(op, packed, n, options));
  return calls;
}
// The sizes of the packed tensors.
template <class Real>
[[nodiscard]] Geometry packed_geometry(Geometry g, const PackedCalls<Real>& packed,
                                       Index first_query) {
  g.batch = 1;
  g.len_q = packed.total_queries();
  g.len_kv = packed.total_keys();
  g.first_query = first_query;
  return g;
}
template <class Op, class Real>
[[nodiscard]] CallStamp packed_stamp(const Op& op, const Geometry& g, const Mask<Real>& mask,
                                     const Options& options, const PackedCalls<Real>& packed) {
  CallStamp stamp = CallStamp::of<Op>(g, mask, scale_of(op, g, options), options);
  stamp.sequences = packed.sequences();
  return stamp;
}

// Is `saved` of packed sequences such as these? The sizes of each are asked for by its own call.
template <class Op, class Real>
void require_packed_saved(const Op& op, const Saved<Real>& saved, const Geometry& whole,
                          const Mask<Real>& mask, const Options& options,
                          const PackedCalls<Real>& packed, const std::string& where) {
  const std::string difference =
      saved.stamp.difference(packed_stamp(op, whole, mask, options, packed));
  require(difference.empty(), where, ": saved ", difference);
  require(Index(saved.sequences.size()) == packed.size(), where, ": saved is of sequences with ",
          saved.sequences.size(), " neighbours of different lengths, these have ", packed.size());
}

// May neighbours of one length be one call? Not where rows depend on all rows of a call.
template <class Op>
inline constexpr bool joins_sequences = !Op::ReadoutType::rehearses;

// A call that is so small a part of all is one item of work: it is prepared, computed and forgotten by one worker, in whose
// cache it stays. Larger ones are prepared ahead, and their panels spread over all workers.
inline constexpr double kSmallPart = 1.0 / 16;  // of a worker's share

template <class Op>
void Door<Op>::forward_packed(const Op& op, const PackedInputs<Real>& in, const Mask<Real>& mask,
                              const Outputs<Real>& outputs, Saved<Real>* saved,
                              const Options& options) {
  if (!in.packed) return forward(op, in, mask, outputs, saved, options);
  const std::string where = door_name("heed::forward", options.name);
  if (saved) saved->stamp = {};
  require_options<Real>(options, where);
  const PackedCalls<Real> packed(in, mask, joins_sequences<Op>, where);
  // Whatever does not fit is told before any of them runs.
  std::vector<double> flops;
  Geometry whole;
  for (Index n = 0; n < packed.size(); ++n) {
    const PackedCall<Op> call = call_of(op, packed, n, options);
    if (mask.rules.empty()) (void)BoundMask<Real>(call.mask, call.geometry, call.where.c_str());
    if (packed.with_caches())
      for (const auto& [out, name] :
           {std::pair{&outputs.out, "out"}, {&outputs.lse, "lse"}, {&outputs.steps, "steps"}}) {
        require_apart(*out, call.in.key, name, "key", call.where);
        require_apart(*out, call.in.value, name, "value", call.where);
      }
    whole = packed_geometry(call.geometry, packed, in.first_query);
    flops.push_back(product_flops(call.geometry));
  }
  check_outputs(op, outputs, whole, in, mask, where);
  if (saved) saved->sequences.resize(std::size_t(packed.size()));
  const auto make = [&](const PackedCall<Op>& call, Index n, int threads) {
    const Outputs<Real> to{packed.of_queries(outputs.out, n), packed.of_queries(outputs.lse, n),
                           packed.of_queries(outputs.steps, n)};
    return std::make_unique<ForwardCall<Op>>(op, call.geometry, call.in, call.mask, to,
                                             saved ? &saved->sequences[std::size_t(n)] : nullptr,
                                             call.options, call.where, threads);
  };
  double all_flops = 0;
  for (const double of_call : flops) all_flops += of_call;
  const int threads = worker_count(options, all_flops, std::numeric_limits<Index>::max(), 1);
  std::vector<Index> large, small;
  for (Index n = 0; n < packed.size(); ++n) {
    const bool part = mask.rules.empty() && !packed.with_caches() &&
                      flops[std::size_t(n)] * threads <= all_flops * kSmallPart;
    (part ? small : large).push_back(n);
  }
  std::vector<PackedCall<Op>> calls;
  calls.reserve(large.size());
  for (const Index n : large) calls.push_back(call_of(op, packed, n, options));
  const Preparation preparation(Index(large.size()), resolve_threads(options.threads));
  std::vector<std::unique_ptr<ForwardCall<Op>>> made(large.size());
  preparation.run(Index(large.size()), [&](Index i, int own_threads) {
    made[std::size_t(i)] = make(calls[std::size_t(i)], large[std::size_t(i)], own_threads);
  });
  std::vector<ForwardCall<Op>*> all;
  for (const auto& call : made) all.push_back(call.get());
  if (!all.empty()) run_forward_calls<Op>(op, all, preparation, options);
  parallel_for(Index(small.size()), threads, [&](Index i) {
    const Index n = small[std::size_t(i)];
    const PackedCall<Op> call = call_of(op, packed, n, options);
    make(call, n, 1)->run_alone();
  });
  if (!saved) return;
  // Rows as the caller packs them, beside what backward() reads.
  constexpr Index maps = Op::NormaliserType::maps;
  const std::size_t rows = std::size_t(whole.query_rows());
  saved->lse.assign(std::size_t(maps) * rows, Real(0));
  saved->state.clear();
  saved->mixed.clear();
  saved->diagnostic_names = saved->sequences[0].diagnostic_names;
  saved->diagnostics.assign(saved->diagnostic_names.size(), std::vector<Real>(rows));
  for (Index n = 0; n < packed.size(); ++n) {
    const Saved<Real>& own = saved->sequences[std::size_t(n)];
    packed.gather(own.lse, maps, whole.heads, n, saved->lse);
    for (std::size_t d = 0; d < saved->diagnostics.size(); ++d)
      packed.gather(own.diagnostics[d], 1, whole.heads, n, saved->diagnostics[d]);
  }
  saved->stamp = packed_stamp(op, whole, mask, options, packed);
}

template <class Op>
void Door<Op>::backward_packed(const Op& op, const PackedInputs<Real>& in, const Mask<Real>& mask,
                               const Saved<Real>& saved, const StoredView<const Real>& out,
                               const OutputGradients<Real>& output, const Gradients<Real>& grads,
                               Op* grad_op, const Options& options) {
  if (!in.packed) return backward(op, in, mask, saved, out, output, grads, grad_op, options);
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  const PackedCalls<Real> packed(in, mask, joins_sequences<Op>, where);
  require(!packed.with_caches(), where, ": packed.caches has ", packed.sequences(),
          " sequences, forward() alone reads keys and values of caches; give them as tensors");
  const std::vector<PackedCall<Op>> calls = calls_of(op, packed, options);
  const Geometry whole = packed_geometry(calls[0].geometry, packed, in.first_query);
  check_backward(op, whole, in, mask, out, output, grads, where);
  require_packed_saved(op, saved, whole, mask, options, packed, where);
  std::deque<BoundMask<Real>> bounds;
  for (std::size_t n = 0; n < calls.size(); ++n) {
    const PackedCall<Op>& call = calls[n];
    check_saved<Op>(saved.sequences[n],
                    CallStamp::of<Op>(call.geometry, call.mask,
                                      scale_of(op, call.geometry, call.options), call.options),
                    call.where);
    bounds.emplace_back(call.mask, call.geometry, call.where.c_str(), options.threads);
  }
  // One gradient of bias, of which each sequence adds to its corner.
  WidenedTensors<Real> copies(options.threads);
  const TensorView<Real> bias = copies.write(grads.bias);
  set_zero<Real>({bias}, resolve_threads(options.threads));
  const Preparation preparation(packed.size(), resolve_threads(options.threads));
  std::vector<std::unique_ptr<BackwardCall<Op>>> made(calls.size());
  preparation.run(packed.size(), [&](Index n, int threads) {
    const PackedCall<Op>& call = calls[std::size_t(n)];
    const Gradients<Real> to{
        packed.of_queries(grads.query, n),  packed.of_keys(grads.key, n),
        packed.of_keys(grads.value, n),     packed.of_queries(grads.extra, n),
        corner_of(bias, packed.run(n)),     packed.of_queries(grads.query_inputs, n),
        packed.of_keys(grads.key_inputs, n)};
    made[std::size_t(n)] = std::make_unique<BackwardCall<Op>>(
        op, call.geometry, call.in, bounds[std::size_t(n)], saved.sequences[std::size_t(n)],
        packed.of_queries(out, n),
        OutputGradients<Real>{packed.of_queries(output.out, n), packed.of_queries(output.lse, n),
                              packed.of_queries(output.steps, n)},
        to, call.options, threads);
  });
  std::vector<BackwardCall<Op>*> all;
  for (const auto& call : made) all.push_back(call.get());
  run_backward_calls<Op>(all, bias.given() && bias.shape().batch == 1, grad_op, preparation,
                         options);
  copies.round();
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
