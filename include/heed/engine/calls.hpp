// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checked calls: the memory and the views that a call needs beside the caller's, and the passes that it then runs, by itself or
// together with others.

#include <heed/engine/backward_pass.hpp>
#include <heed/engine/fold_heads.hpp>
#include <heed/engine/forward_pass.hpp>
#include <heed/engine/held_rows.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

// Puts what the call reads of its tokens into `operands`. Returns the memory of their sums; null for ops that read none.
template <class Real>
[[nodiscard]] std::unique_ptr<SummedInputs<Real>> take_inputs(
    const OpTiles<Real>& op, const Geometry& g, const Inputs<Real>& in,
    WidenedTensors<Real>& copies, int threads, Operands<Real>& operands) {
  const TokenColumns& columns = op.columns;
  if (!columns.any()) return nullptr;
  const auto query = rows_of_call(copies.read(in.query_inputs), g.share.queries_before),
             key = rows_of_call(copies.read(in.key_inputs), g.share.keys_before);
  operands.part_inputs = part_inputs_of(columns, query, key);
  auto inputs =
      std::make_unique<SummedInputs<Real>>(op.score, g, columns_of(query, columns.score_query),
                                           columns_of(key, columns.score_key), threads);
  operands.query_inputs = inputs->query();
  operands.key_inputs = inputs->key();
  return inputs;
}
// Where backward writes what it adds up, in `grads`, which arrive as the caller's.
template <class Real>
void take_input_gradients(const TokenColumns& columns, SummedInputs<Real>& sums,
                          GradientOperands<Real>& grads) {
  grads.part_inputs = part_inputs_of(columns, grads.query_inputs, grads.key_inputs);
  grads.query_inputs = columns_of(grads.query_inputs, columns.score_query);
  grads.key_inputs = columns_of(grads.key_inputs, columns.score_key);
  sums.take_gradients(grads.query_inputs, grads.key_inputs);
}

// A checked call of forward: what it reads and writes, and the passes that it runs.
template <class Real>
class ForwardCall {
 public:
  // threads: that may prepare it. Op, mask, options and `where` must outlive it.
  ForwardCall(const OpTiles<Real>& op, const Geometry& g, const Inputs<Real>& in,
              const Mask<Real>& mask, const Outputs<Real>& outputs, Saved<Real>* saved,
              const Options& options, const std::string& where, int threads)
      : op_(op),
        g_(g),
        mask_(mask),
        options_(options),
        saved_(saved),
        bound_(mask, g, where.c_str(), threads),
        copies_(threads),
        operands_{of_queries(copies_.read(in.query)), in.key, in.value,
                  of_queries(copies_.read(in.extra))} {
    const bool own_rows = op.readout.traits.uses_own_rows;
    // Own rows need not lie in the tile at hand, and tiles count keys from those elsewhere on.
    if (own_rows || g.share.keys_before > 0) {
      operands_.key = rows_of_call(copies_.read(in.key), g.share.keys_before);
      operands_.value = rows_of_call(copies_.read(in.value), g.share.keys_before);
    }
    inputs_ = take_inputs(op, g, in, copies_, threads, operands_);
    to_ = {of_queries(copies_.write(outputs.out)), of_queries(copies_.write(outputs.lse)),
           of_queries(copies_.write(outputs.steps))};
    const bool folds = heads_fold(op, g, mask, bound_, options.dropout);
    // Copied keys, shards and folded heads bypass the feature cache.
    const bool others = own_rows || g.held_keys() != g.len_kv ||
                        (folds && in.key_features && SideNeeds<Real>(op, g).per_query_head);
    kept_ = others ? nullptr : in.key_features;
    if (!folds) return;
    folded_.emplace(fold_heads(g), fold_heads(mask, bound_, g), fold_heads(options));
    folded_->bound.emplace(folded_->mask, folded_->geometry, where.c_str());
    operands_.query = fold_heads(operands_.query, g);
    operands_.extra = fold_heads(operands_.extra, g);
    to_ = {fold_heads(to_.out, g), fold_heads(to_.lse, g), fold_heads(to_.steps, g)};
  }
  ForwardCall(const ForwardCall&) = delete;  // its parts refer to each other

  // An op whose rows depend on each other is first run as a rehearsal; afterwards it is settled with what all rows of the
  // call have said.
  void rehearse() {
    take_readout(op_.readout.rehearsal());
    ready(*settled_, &reports_);
  }
  void settle() {
    pass_.reset();
    take_readout(op_.readout.settled(reports_));
    ready(*settled_, saved_);
  }
  void ready() { ready(op_, saved_); }
  [[nodiscard]] ForwardPass<Real>* pass() { return &*pass_; }
  // All of the call, by the worker that asks for it.
  void run_alone() {
    if (op_.readout.needs_rehearsal()) {
      rehearse();
      pass_->run_alone();
      settle();
    } else {
      ready();
    }
    pass_->run_alone();
    finish();
  }
  void finish() {
    copies_.round();
    if (saved_)
      saved_->stamp = CallStamp::of(op_.type, g_, mask_, scale_of(op_, g_, options_), options_);
  }

 private:
  // The call when its heads are taken for queries of one head.
  struct Folded {
    Geometry geometry;
    Mask<Real> mask;
    Options options;
    std::optional<BoundMask<Real>> bound = {};
    Folded(const Geometry& g, Mask<Real> of, const Options& own)
        : geometry(g), mask(std::move(of)), options(own) {}
  };
  template <class Element>
  [[nodiscard]] TensorView<Element> of_queries(const TensorView<Element>& held) const {
    return rows_of_call(held, g_.share.queries_before);
  }
  void take_readout(std::unique_ptr<ReadoutTiles<Real>> readout) {
    own_readout_ = std::move(readout);
    settled_.emplace(
        OpTiles<Real>{op_.score, op_.normaliser, *own_readout_, op_.columns, op_.type});
  }
  void ready(const OpTiles<Real>& op, Saved<Real>* to) {
    pass_.emplace(op, folded_ ? folded_->geometry : g_, operands_,
                  folded_ ? *folded_->bound : bound_, to_, to,
                  folded_ ? folded_->options : options_, kept_);
  }

  const OpTiles<Real>& op_;
  Geometry g_;
  const Mask<Real>& mask_;
  const Options& options_;
  Saved<Real>* saved_;
  BoundMask<Real> bound_;
  WidenedTensors<Real> copies_;
  Operands<Real> operands_;
  std::unique_ptr<SummedInputs<Real>> inputs_;
  OutputOperands<Real> to_;
  KeyFeatures<Real>* kept_ = nullptr;
  std::optional<Folded> folded_;
  std::unique_ptr<ReadoutTiles<Real>> own_readout_;  // of settled_
  std::optional<OpTiles<Real>> settled_;
  Saved<Real> reports_;  // of the rehearsal
  std::optional<ForwardPass<Real>> pass_;
};

// Calls are prepared side by side where they are many; few leave the threads to what each of them prepares.
class Preparation {
 public:
  Preparation(Index calls, int threads)
      : workers_(int(std::min<Index>(threads, 1 + calls / 8))),
        threads_(workers_ > 1 ? 1 : threads) {}

  // body(n, threads) for each call.
  template <class Body>
  void run(Index calls, Body&& body) const {
    parallel_for(calls, workers_, [&](Index n) { body(n, threads_); });
  }

 private:
  int workers_, threads_;
};

// Runs calls of one op together.
template <class Real>
void run_forward_calls(const OpTiles<Real>& op, std::span<ForwardCall<Real>* const> calls,
                       const Preparation& preparation, const Options& options) {
  const auto run = [&](void (*prepare)(ForwardCall<Real>&)) {
    preparation.run(Index(calls.size()), [&](Index n, int) { prepare(*calls[std::size_t(n)]); });
    FixedList<ForwardPass<Real>*> passes(Index(calls.size()));
    take_longest_first(calls, passes);
    run_forward(passes, options);
  };
  if (op.readout.needs_rehearsal()) {
    run([](ForwardCall<Real>& call) { call.rehearse(); });
    run([](ForwardCall<Real>& call) { call.settle(); });
  } else {
    run([](ForwardCall<Real>& call) { call.ready(); });
  }
  for (ForwardCall<Real>* call : calls) call->finish();
}

// A checked call of backward, and its pass.
template <class Real>
class BackwardCall {
 public:
  // As ForwardCall.
  BackwardCall(const OpTiles<Real>& op, const OpVjps<Real>& vjps, const Geometry& g,
               const Inputs<Real>& in, const BoundMask<Real>& bound, const Saved<Real>& saved,
               const StoredView<const Real>& out, const OutputGradients<Real>& output,
               const Gradients<Real>& grads, const Options& options, int threads)
      : share_(g.share),
        copies_(threads),
        operands_{of_queries(in.query), of_keys(in.key), of_keys(in.value), of_queries(in.extra)},
        inputs_(take_inputs(op, g, in, copies_, threads, operands_)),
        output_{of_queries(out), of_queries(output.out), of_queries(output.lse),
                of_queries(output.steps)},
        grads_{to_queries(grads.query),  to_keys(grads.key),        to_keys(grads.value),
               to_queries(grads.extra),  copies_.write(grads.bias), to_queries(grads.query_inputs),
               to_keys(grads.key_inputs)} {
    if (inputs_) take_input_gradients(op.columns, *inputs_, grads_);
    if (op.readout.needs_rehearsal()) {
      readout_ = op.readout.settled(saved);
      readout_vjps_ = vjps.readout.settled(saved);
    }
    op_.emplace(OpTiles<Real>{op.score, op.normaliser, readout_ ? *readout_ : op.readout,
                              op.columns, op.type});
    vjps_.emplace(
        OpVjps<Real>{vjps.score, vjps.normaliser, readout_vjps_ ? *readout_vjps_ : vjps.readout});
    pass_.emplace(*op_, *vjps_, g, operands_, bound, saved, output_, grads_, options);
  }
  BackwardCall(const BackwardCall&) = delete;  // its parts refer to each other

  [[nodiscard]] BackwardPass<Real>* pass() { return &*pass_; }
  void finish() {
    if (inputs_) inputs_->chain();
    copies_.round();
  }

 private:
  using Read = StoredView<const Real>;
  using Written = StoredView<Real>;
  [[nodiscard]] TensorView<const Real> of_queries(const Read& held) {
    return rows_of_call(copies_.read(held), share_.queries_before);
  }
  [[nodiscard]] TensorView<const Real> of_keys(const Read& held) {
    return rows_of_call(copies_.read(held), share_.keys_before);
  }
  [[nodiscard]] TensorView<Real> to_queries(const Written& held) {
    return rows_of_call(copies_.write(held), share_.queries_before);
  }
  [[nodiscard]] TensorView<Real> to_keys(const Written& held) {
    return rows_of_call(copies_.write(held), share_.keys_before);
  }

  Share share_;
  WidenedTensors<Real> copies_;
  Operands<Real> operands_;
  std::unique_ptr<SummedInputs<Real>> inputs_;
  OutputGradientOperands<Real> output_;
  GradientOperands<Real> grads_;
  std::unique_ptr<ReadoutTiles<Real>> readout_;  // settled, where rows depend on each other
  std::unique_ptr<ReadoutVjps<Real>> readout_vjps_;
  std::optional<OpTiles<Real>> op_;  // with that readout
  std::optional<OpVjps<Real>> vjps_;
  std::optional<BackwardPass<Real>> pass_;
};

// Runs calls of one op together.
template <class Real>
void run_backward_calls(std::span<BackwardCall<Real>* const> calls, bool one_bias,
                        OpGradient<Real>* grad_op, const Preparation& preparation,
                        const Options& options) {
  FixedList<BackwardPass<Real>*> passes(Index(calls.size()));
  take_longest_first(calls, passes);
  run_backward(passes, one_bias, grad_op, options);
  preparation.run(Index(calls.size()), [&](Index n, int) { calls[std::size_t(n)]->finish(); });
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
