// SPDX-License-Identifier: Apache-2.0
#pragma once

// Backward of checked calls, as forward_pass.hpp runs forward: one call, or several of one op that share the workers. The rows of
// each call are added to in its own order, with the bits of a call by itself; what all calls add to the parameters is added up
// call by call, from the longest on.

#include <heed/engine/backward_walk.hpp>
#include <heed/engine/forward_pass.hpp>
#include <heed/engine/held_rows.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// What the shares of one backward call hand on to each other, beside the gradients of keys, values and bias: so that all that
// several queries add to is added to in the order of one process.
template <class Real>
struct HandedOn {
  Index member = 0;          // the head of each family that is visited
  std::vector<Real> rows;    // gradients of the keys' side values
  std::vector<double> sums;  // of parameters, [family][numbers]
};

// A checked call, prepared.
template <class Real>
class BackwardPass {
 public:
  using Worker = BackwardWorker<Real>;

  BackwardPass(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const Geometry& g,
               const Operands<Real>& in, const BoundMask<Real>& bound, const Saved<Real>& saved,
               const OutputGradientOperands<Real>& output, const GradientOperands<Real>& grads,
               const Options& options)
      : keys_(op, g, in.key, nullptr, {}, in.key_inputs),
        c_{op,
           g,
           bound,
           in,
           plan_call<Real>(op, g, bound, options, 0, true),
           Real(scale_of(op, g, options)),
           keys_,
           options.dropout,
           options.precision.products()},
        shared_(c_, vjps, saved, output, grads),
        units_(g.batch * g.heads * shared_.order.groups),
        elements_(scratch_elements<Real>([&](Scratch<Real>& scratch) { return engage(scratch); })) {
  }
  BackwardPass(const BackwardPass&) = delete;  // c_ refers to keys_

  [[nodiscard]] double flops() const { return product_flops(c_.geometry); }
  [[nodiscard]] Index elements() const { return elements_; }
  [[nodiscard]] Index units() const { return units_; }
  // Numbers that all calls add up, and the gradients that these sums are.
  [[nodiscard]] Index numbers() const { return shared_.numbers(); }
  void add_parameter_gradients(const std::vector<double>& sums, OpGradient<Real>& to) const {
    shared_.add_parameter_gradients(c_, sums, to);
  }
  [[nodiscard]] std::unique_ptr<PartGradient<Real>> score_gradient() const {
    return shared_.vjps.score.gradient();
  }
  // Do side values of keys add to the score's parameters?
  [[nodiscard]] bool keys_reach_parameters() const {
    return KeySide<Real>::reaches_parameters(c_.op.score.traits);
  }
  [[nodiscard]] const VisitingOrder& order() const { return shared_.order; }

  // Ahead of the first visit: side values of keys, and zeros in what visits add to; in the gradient of a bias, too, where
  // it is the call's own. Once, by the first worker that comes where nobody has before: what one call works on then
  // stands in cache.
  void begin(bool zero_bias, int threads) {
    begun_.run([&] {
      keys_.build(threads);
      const GradientOperands<Real>& grads = shared_.grads;
      const Share& share = c_.geometry.share;
      set_zero<Real>(
          {held_rows(grads.key, share.keys_before), held_rows(grads.value, share.keys_before),
           zero_bias ? grads.bias : TensorView<Real>(),
           shared_.sums_queries ? held_rows(grads.query, share.queries_before)
                                : TensorView<Real>()},
          threads);
    });
  }
  [[nodiscard, gnu::noinline]] std::unique_ptr<Worker> engage(Scratch<Real>& scratch) {
    return std::make_unique<Worker>(c_, shared_, scratch);
  }
  void abandon() { shared_.tiles.abandon(); }
  // A visit has ended. True of the one with which all have.
  [[nodiscard]] bool leave() { return left_.fetch_add(1, std::memory_order_acq_rel) + 1 == units_; }

  void build_keys(int threads) { keys_.build(threads); }
  // Visits one head of each family alone, and goes on where another share has ended; and the other way. Not for ops that read
  // numbers of tokens.
  void take_over(const HandedOn<Real>& on) {
    shared_.order.first_member = on.member;
    shared_.order.members = 1;
    if (on.rows.empty()) return;
    const auto features = on.rows.begin() + std::ptrdiff_t(shared_.dfeatures.size());
    std::copy(on.rows.begin(), features, shared_.dfeatures.begin());
    std::copy(features, on.rows.end(), shared_.drows.begin());
  }
  void hand_over(HandedOn<Real>& on) const {
    on.rows = shared_.dfeatures;
    on.rows.insert(on.rows.end(), shared_.drows.begin(), shared_.drows.end());
  }

  // Behind the last visit: what side values and inputs of tokens owe; adds to `parameters`, if it is given.
  void finish(PartGradient<Real>* parameters, int threads) {
    const GradientOperands<Real>& grads = shared_.grads;
    if (units_ > 0)
      keys_.template chain<LaneTile<Real>>(
          {shared_.vjps.score, {&shared_}, grads.key, parameters, grads.key_inputs.given()},
          threads);
    if (!c_.op.columns.any()) return;
    const PartInputs<Real>& parts = grads.part_inputs;
    const Share& share = c_.geometry.share;
    const auto sum = [&](const std::vector<Real>& from, const TensorView<Real>& to, Index before,
                         Index maps) {
      sum_over_readers(from, c_.geometry.heads, maps, held_rows(to, before), threads);
    };
    sum(shared_.dnormaliser_query, parts.normaliser_query, share.queries_before, 1);
    sum(shared_.dnormaliser_key, parts.normaliser_key, share.keys_before, 1);
    sum(shared_.dreadout_query, parts.readout_query, share.queries_before, 1);
    sum(shared_.dquery_inputs, grads.query_inputs, share.queries_before, 1);
    sum(shared_.dkey_inputs, grads.key_inputs, share.keys_before, c_.op.maps());
  }

 private:
  KeySide<Real> keys_;
  CallContext<Real> c_;
  BackwardShared<Real> shared_;
  Index units_, elements_;
  std::atomic<Index> left_ = 0;  // visits that have ended
  Once begun_;
};

// Runs calls of one op together, at least one, the longest first. one_bias: do all of several calls add to the same gradient of a
// bias? They then take turns at it, head by head, in their order; that of several calls arrives as zeros.
template <class Real>
void run_backward(const FixedList<BackwardPass<Real>*>& passes, bool one_bias,
                  OpGradient<Real>* grad_op, const Options& options) {
  using Pass = BackwardPass<Real>;
  using Worker = typename Pass::Worker;
  const bool alone = passes.size() == 1;
  Index units = 0, elements = 0;
  double flops = 0;
  Families families;
  FixedList<Pass*> visited(Index(passes.size()));  // those with visits
  for (Pass* pass : passes) {
    flops += pass->flops();
    if (pass->units() == 0) continue;
    units += pass->units();
    elements = std::max(elements, pass->elements());
    families.add(pass->order(), pass->flops() / double(pass->units()));
    visited.emplace(pass);
  }
  const int workers = worker_count(options, flops, units, elements * Index(sizeof(Real)));
  OrderedSums sums(families, BackwardShared<Real>::places_for(workers, families.size()),
                   passes[0]->numbers());
  // What side values of keys add to the parameters, of each of several calls.
  std::vector<std::unique_ptr<PartGradient<Real>>> parts;
  if (grad_op && !alone && passes[0]->keys_reach_parameters())
    for (std::size_t n = 0; n < visited.size(); ++n) parts.push_back(passes[0]->score_gradient());
  for (Pass* pass : passes)
    if (alone || pass->units() == 0) pass->begin(alone, workers);
  if (units > 0) {
    const bool takes_turns = one_bias && visited.size() > 1;
    Turnstiles bias(takes_turns ? visited[0]->order().families() : 0);  // [family]
    const auto run = [&](Worker& worker, const VisitingOrder::Visit& visit) {
      if (takes_turns) bias.wait(visit.family, visit.call);
      worker.run(visit, sums);
      // The last visitor passes all tiles behind the others of its family.
      if (takes_turns && visit.rank + 1 == families.ranks(visit.turn)) bias.pass(visit.family);
      // Where several calls run together, each is finished while its keys stand in cache.
      Pass& pass = *visited[std::size_t(visit.call)];
      if (!alone && pass.leave())
        pass.finish(parts.empty() ? nullptr : parts[std::size_t(visit.call)].get(), 1);
    };
    run_visits<Real>(
        families, workers, elements,
        [&](Index call, Scratch<Real>& scratch) {
          visited[std::size_t(call)]->begin(alone, 1);
          return visited[std::size_t(call)]->engage(scratch);
        },
        run,
        [&] {
          for (Pass* pass : visited) pass->abandon();
          sums.abandon();
          bias.abandon();
        });
  }
  if (grad_op) passes[0]->add_parameter_gradients(sums.total(), *grad_op);
  if (alone) return passes[0]->finish(grad_op ? grad_op->score.get() : nullptr, workers);
  for (Pass* pass : passes)
    if (pass->units() == 0) pass->finish(nullptr, workers);
  if (grad_op) KeySide<Real>::add_in_order(parts, *grad_op->score);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
