// SPDX-License-Identifier: Apache-2.0
#pragma once

// Backward of checked calls, as forward_pass.hpp runs forward: one call, or several of one op that share the workers. The rows of
// each call are added to in its own order, with the bits of a call by itself; what all calls add to the parameters is added up
// call by call, from the longest on.

#include <heed/engine/backward_walk.hpp>
#include <heed/engine/forward_pass.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// What the shares of one backward call hand on to each other, beside the gradients of keys, values and bias: so that all that
// several queries add to is added to in the order of one process.
template <class Real>
struct HandedOn {
  Index member = 0;          // the head of each family that is visited
  std::vector<Real> rows;    // gradients of the keys' derived values
  std::vector<double> sums;  // of parameters, [family][numbers]
};

// Gradients of a call that are set to 0 ahead of it: not those that arrive from other calls.
enum class Zeros { none, but_bias, all };

// What a call of backward reads and writes beside the caller's memory, prepared.
template <class Real>
class BackwardCall {
 public:
  using Worker = BackwardWorker<Real>;

  // threads: that may prepare it. The call that was opened and its arguments must outlive it.
  BackwardCall(const OpenCall<Real>& call, const OpVjps<Real>& vjps, const BoundMask<Real>& bound,
               const BackwardArguments<Real>& given, int threads)
      : copies_(threads),
        values_(call.op, copies_, call.in.value, true),
        in_(read_inputs(call)),
        inputs_(take_inputs(call.op, call.geometry, threads, in_)),
        grads_(
            copies_.template write_all<GradientOperands<Real>>(given.grads, call.geometry.share)),
        settles_(call.op.readout.needs_rehearsal()),
        readout_(settles_ ? call.op.readout.settled(given.saved) : nullptr),
        readout_vjps_(settles_ ? vjps.readout.settled(given.saved) : nullptr),
        op_{call.op.score, call.op.normaliser, settles_ ? *readout_ : call.op.readout,
            call.op.columns, call.op.type},
        vjps_{vjps.score, vjps.normaliser, settles_ ? *readout_vjps_ : vjps.readout},
        keys_(op_, call.geometry, in_.key, nullptr, {}, in_.key_inputs),
        c_(make_context(op_, call.geometry, bound, in_, keys_, call.options,
                        plan_call<Real>(op_, call.geometry, bound, call.options, 0, true))),
        shared_(c_, vjps_, given.saved, read(given, call.geometry.share), take_gradients(),
                resolve_threads(call.options.threads)),
        units_(c_.geometry.batch * c_.geometry.heads * shared_.order.groups),
        elements_(scratch_elements<Real>([&](Scratch<Real>& scratch) { return engage(scratch); })) {
  }
  BackwardCall(const BackwardCall&) = delete;  // its parts refer to each other

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
  // Do derived values of keys add to the score's parameters?
  [[nodiscard]] bool keys_reach_parameters() const {
    return DerivedKeys<Real>::reaches_parameters(c_.op.score.traits);
  }
  [[nodiscard]] const VisitingOrder& order() const { return shared_.order; }

  // Ahead of the first visit: derived values of keys, and zeros in what visits add to. Once, by the first worker that comes
  // where nobody has before: what one call works on then stands in cache.
  void begin(Zeros zeros, int threads) {
    begun_.run([&] {
      keys_.build(threads);
      if (zeros == Zeros::none) return;
      const GradientOperands<Real>& grads = shared_.grads;
      const Share& share = c_.geometry.share;
      set_zero<Real>(
          {held_rows(grads.key, share.keys_before), held_rows(grads.value, share.keys_before),
           zeros == Zeros::all ? grads.bias : TensorView<Real>(),
           shared_.sums_queries ? held_rows(grads.query, share.queries_before)
                                : TensorView<Real>()},
          threads);
    });
  }
  [[nodiscard, gnu::noinline]] std::unique_ptr<Worker> engage(Scratch<Real>& scratch) {
    return std::make_unique<Worker>(c_, shared_, scratch);
  }
  void abandon() { shared_.gates.abandon(); }
  // A visit has ended. True of the one with which all have.
  [[nodiscard]] bool leave() { return left_.fetch_add(1, std::memory_order_acq_rel) + 1 == units_; }

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

  // Behind the last visit: what derived values and inputs of tokens owe; adds to `parameters`, if it is given.
  void chain(PartGradient<Real>* parameters, int threads) {
    const GradientOperands<Real>& grads = shared_.grads;
    if (units_ > 0)
      keys_.template chain<LaneTile<Real>>(
          {shared_.vjps.score, {&shared_}, grads.key, parameters, grads.key_inputs.given()},
          threads);
    if (!c_.op.columns.any()) return;
    const Share& share = c_.geometry.share;
    const auto sum = [&](const std::vector<Real>& from, const TensorView<Real>& to, Index before,
                         Index maps) {
      sum_over_readers(from, c_.geometry.heads, maps, held_rows(to, before), threads);
    };
    sum(shared_.dnormaliser_query, grads.normaliser_query, share.queries_before, 1);
    sum(shared_.dnormaliser_key, grads.normaliser_key, share.keys_before, 1);
    sum(shared_.dreadout_query, grads.readout_query, share.queries_before, 1);
    sum(shared_.dquery_inputs, grads.query_inputs, share.queries_before, 1);
    sum(shared_.dkey_inputs, grads.key_inputs, share.keys_before, c_.op.maps());
  }

  // After all: what the caller reads.
  void finish() {
    if (inputs_) inputs_->chain();
    if (values_.slopes.given() && grads_.value.given())
      values_.chain(copies_, held_rows(grads_.value, c_.geometry.share.keys_before));
    copies_.round();
  }

 private:
  [[nodiscard]] Operands<Real> read_inputs(const OpenCall<Real>& call) {
    const Share& share = call.geometry.share;
    auto in = copies_.template read_all<Operands<Real>>(call.in, share);
    if (values_.values.given())
      in.value = rows_of_call<const Real>(values_.values, share, TokensOf::keys);
    return in;
  }
  [[nodiscard]] OutputGradientOperands<Real> read(const BackwardArguments<Real>& given,
                                                  const Share& share) {
    const auto grad = copies_.read_outputs(given.grad_out, share.queries_before);
    return {rows_of_call(copies_.read(given.out), share, TokensOf::queries), grad.out, grad.lse,
            grad.steps};
  }
  // Where workers write, in place of the caller's memory.
  [[nodiscard]] const GradientOperands<Real>& take_gradients() {
    if (inputs_) {
      split_inputs(op_.columns, grads_);
      inputs_->take_gradients(grads_.query_inputs, grads_.key_inputs);
    }
    return grads_;
  }

  WidenedTensors<Real> copies_;
  MappedValues<Real> values_;
  Operands<Real> in_;
  std::unique_ptr<SummedInputs<Real>> inputs_;
  GradientOperands<Real> grads_;
  bool settles_;  // do rows depend on each other, by what the readout has found in forward?
  std::unique_ptr<ReadoutTiles<Real>> readout_;
  std::unique_ptr<ReadoutVjps<Real>> readout_vjps_;
  OpTiles<Real> op_;
  OpVjps<Real> vjps_;
  DerivedKeys<Real> keys_;
  CallContext<Real> c_;
  BackwardShared<Real> shared_;
  Index units_, elements_;
  std::atomic<Index> left_ = 0;  // visits that have ended
  Once begun_;
};

// Workers for all of these calls, each with room for `elements` numbers.
template <class Real>
[[nodiscard]] int workers_for(std::span<BackwardCall<Real>* const> calls, Index elements,
                              const Options& options) {
  Index units = 0;
  double flops = 0;
  for (const BackwardCall<Real>* call : calls) units += call->units(), flops += call->flops();
  return worker_count(options, flops, units, elements * Index(sizeof(Real)));
}

// Runs calls of one op together, at least one, the longest first. one_bias: do all of several calls add to the same gradient of a
// bias? They then take turns at it, head by head, in their order; that of several calls arrives as zeros.
// on: null, or what the share before has left of the one call, whose gradients of keys, values and bias arrive as it left
// them. Gradients of the parameters, and what derived values owe to the keys, come with the last share.
template <class Real>
void run_backward(std::span<BackwardCall<Real>* const> calls, bool one_bias,
                  OpGradient<Real>* grad_op, const Options& options, HandedOn<Real>* on = nullptr,
                  bool last = true) {
  using Call = BackwardCall<Real>;
  const bool alone = calls.size() == 1;
  if (on) calls[0]->take_over(*on);
  const std::vector<Call*> ordered = longest_first(calls);
  std::vector<Call*> visited = ordered;  // those with visits; shares without queries hand sums on
  if (!on) std::erase_if(visited, [](const Call* call) { return call->units() == 0; });
  Families families;
  Index elements = 0;
  for (const Call* call : visited) {
    families.add(call->order(), call->flops() / double(std::max<Index>(1, call->units())));
    elements = std::max(elements, call->elements());
  }
  const int workers = workers_for<Real>(ordered, elements, options);
  OrderedSums sums(families,
                   on ? std::max<Index>(1, families.size())
                      : BackwardShared<Real>::places_for(workers, families.size()),
                   OrderedSums::early_for(workers), ordered[0]->numbers());
  if (on) sums.go_on(on->sums);
  // What derived values of keys add to the parameters, of each of several calls.
  std::vector<std::unique_ptr<PartGradient<Real>>> parts;
  if (grad_op && !alone && ordered[0]->keys_reach_parameters())
    for (std::size_t n = 0; n < visited.size(); ++n) parts.push_back(ordered[0]->score_gradient());
  const Zeros zeros = on ? Zeros::none : alone ? Zeros::all : Zeros::but_bias;
  for (Call* call : ordered)
    if (alone || call->units() == 0) call->begin(zeros, workers);
  const bool takes_turns = one_bias && visited.size() > 1;
  Turnstiles bias(takes_turns ? visited[0]->order().families() : 0);  // [family]
  run_visits<Real>(
      families, workers, elements, sums,
      [&](Index n, Scratch<Real>& scratch) {
        visited[std::size_t(n)]->begin(zeros, 1);
        return visited[std::size_t(n)]->engage(scratch);
      },
      [&](typename Call::Worker& worker, const VisitingOrder::Visit& visit) {
        if (takes_turns) bias.wait(visit.family, visit.call);
        worker.run(visit, sums);
        if (takes_turns && sums.last_has_added(visit)) bias.pass(visit.family);
        // Where several calls run together, each is finished while its keys stand in cache.
        Call& call = *visited[std::size_t(visit.call)];
        if (!alone && call.leave())
          call.chain(parts.empty() ? nullptr : parts[std::size_t(visit.call)].get(), 1);
      },
      [&] {
        for (Call* call : visited) call->abandon();
        bias.abandon();
      });
  if (on) on->sums = sums.kept();
  if (on) calls[0]->hand_over(*on);
  if (on && !last) return;
  if (grad_op)
    ordered[0]->add_parameter_gradients(on ? sums.total_of_kept() : sums.total(), *grad_op);
  if (alone) return calls[0]->chain(grad_op ? grad_op->score.get() : nullptr, workers);
  for (Call* call : ordered)
    if (call->units() == 0) call->chain(nullptr, workers);
  if (grad_op) DerivedKeys<Real>::add_in_order(parts, *grad_op->score);
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
