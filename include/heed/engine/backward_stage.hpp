// SPDX-License-Identifier: Apache-2.0
#pragma once

// One stage of a backward call that shares compute one after the other, each going on where the one before has ended: for
// each head of a family, from the last share of the queries to the first. What the last stage leaves has the bits of backward() of
// the whole call.

#include <heed/engine/doors.hpp>

#include <algorithm>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// grads: zeros before the first stage; the gradients of keys, values and bias are handed on. Gradients of the parameters,
// and what side values owe to the keys, come with the last stage.
template <class Real>
void run_stage(BackwardPass<Real>& pass, HandedOn<Real>& on, bool last, OpGradient<Real>* grad_op,
               const Options& options) {
  using Worker = typename BackwardPass<Real>::Worker;
  pass.take_over(on);
  const Families families(pass.order());
  const int workers = worker_count(options, pass.flops(), std::max<Index>(1, pass.units()),
                                   pass.elements() * Index(sizeof(Real)));
  OrderedSums sums(families, std::max<Index>(1, families.size()), pass.numbers());
  sums.go_on(on.sums);
  pass.build_keys(workers);
  if (pass.units() > 0)
    run_visits<Real>(
        families, workers, pass.elements(),
        [&](Index, Scratch<Real>& scratch) { return pass.engage(scratch); },
        [&](Worker& worker, const VisitingOrder::Visit& visit) { worker.run(visit, sums); },
        [&] {
          pass.abandon();
          sums.abandon();
        });
  on.sums = sums.kept();
  pass.hand_over(on);
  if (!last) return;
  if (grad_op) pass.add_parameter_gradients(sums.total_of_kept(), *grad_op);
  pass.finish(grad_op ? grad_op->score.get() : nullptr, workers);
}

// backward() of a share, as such a stage.
template <class Real>
void Driver<Real>::backward_stage(const OpTiles<Real>& op, const OpVjps<Real>& vjps,
                                  const Inputs<Real>& in, const Mask<Real>& mask,
                                  const Saved<Real>& saved, const StoredView<const Real>& out,
                                  const OutputGradients<Real>& output, const Gradients<Real>& grads,
                                  HandedOn<Real>& on, bool last, OpGradient<Real>* grad_op,
                                  const Options& options) {
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  require_share(op, g, options, where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  check_backward(op, g, in, mask, out, output, grads, where);
  check_saved(op, saved, CallStamp::of(op.type, g, mask, scale_of(op, g, options), options), where);
  BackwardCall<Real> call(op, vjps, g, in, bound, saved, out, output, grads, options,
                          resolve_threads(options.threads));
  run_stage(*call.pass(), on, last, grad_op, options);
  call.finish();
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
