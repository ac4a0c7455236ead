// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward of checked calls: what a call prepares, and the workers that take its groups of panels through the keys. Several
// calls of one op, such as packed sequences, may share the workers: each is prepared, planned and computed as by itself, so that
// it has the bits of a call of its own, and all their groups are handed out together, those of the longest call first.

#include <heed/engine/forward_walk.hpp>
#include <heed/engine/open.hpp>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

template <class Real>
void name_diagnostics(const OpTiles<Real>& op, Saved<Real>& saved) {
  saved.diagnostic_names.clear();
  for (int d = 0; d < op.normaliser.traits.diagnostics; ++d)
    saved.diagnostic_names.push_back(op.normaliser.diagnostic_name(d));
  for (int d = 0; d < op.readout.traits.diagnostics; ++d)
    saved.diagnostic_names.push_back(op.readout.diagnostic_name(d));
}

template <class Real>
void prepare_saved(const OpTiles<Real>& op, const Geometry& g, Saved<Real>& saved) {
  const NormaliserTraits& normaliser = op.normaliser.traits;
  const ReadoutTraits& readout = op.readout.traits;
  const std::size_t rows = std::size_t(g.query_rows());
  saved.lse.assign(std::size_t(normaliser.maps) * rows, -kInfinity<Real>);
  saved.state.assign(normaliser.streams ? std::size_t(normaliser.state_numbers) * rows : 0,
                     Real(0));
  saved.mixed.assign(readout.saves_mixed ? rows * std::size_t(g.dim_v) : 0, Real(0));
  saved.diagnostics.assign(std::size_t(normaliser.diagnostics + readout.diagnostics),
                           std::vector<Real>(rows, Real(0)));
  name_diagnostics(op, saved);
}

// Unit `unit` of a call: a group of panels of a key-value head. Longest groups first: under a causal mask the last one.
struct GroupPlace {
  Index batch, kv_head, group;
};
template <class Real>
[[nodiscard]] GroupPlace group_at(const CallContext<Real>& c, Index unit) {
  const Index heads = c.geometry.kv_heads, groups = c.groups_of(c.geometry.group());
  const Index head = unit / groups;
  return {head / heads, head % heads, groups - 1 - unit % groups};
}

// Work that must be done once, ahead of what several workers do.
class Once {
 public:
  // Returns when some worker's body() has; where it throws, the next worker tries.
  template <class Body>
  void run(Body&& body) {
    const std::lock_guard lock(guard_);
    if (!done_) body();
    done_ = true;
  }

 private:
  std::mutex guard_;
  bool done_ = false;
};

// A checked call, prepared. The folded heads of one query come here as a call of their own.
template <class Real>
class ForwardPass {
 public:
  using Worker = ForwardWorker<Real>;

  ForwardPass(const OpTiles<Real>& op, const Geometry& g, const Operands<Real>& in,
              const BoundMask<Real>& mask, const OutputSet<TensorView<Real>>& out,
              Saved<Real>* saved, const Options& options, KeyFeatures<Real>* kept)
      : keys_(op, g, in.key, kept, door_name("heed::forward", options.name), in.key_inputs),
        c_(make_context(
            op, g, mask, in, keys_, options,
            plan_call<Real>(op, g, mask, options,
                            std::gcd(in.key.page_rows(), in.value.page_rows()), false))),
        out_(out),
        saved_(saved),
        units_(g.held_queries() > 0 ? g.batch * g.kv_heads * c_.groups_of(g.group()) : 0) {
    if (saved) prepare_saved(op, g, *saved);
    // Where one unit reads all keys of a head, side values are computed while their tile is in cache.
    const bool one_group = c_.groups_of(g.group()) == 1;
    if (one_group && !keys_.keeps()) lazy_keys_ = &keys_;
    if (op.normaliser.traits.mergeable && one_group && units_ > 0)
      parts_ = parts_of_keys(units_, g.len_kv);
    if (parts_ > 1) left_.resize(std::size_t(units_ * parts_ * Worker::part_elements(c_)));
    if (units_ > 0)
      elements_ = scratch_elements<Real>(
          [&](Scratch<Real>& scratch) { return Worker(c_, out_, saved_, lazy_keys_, scratch); });
  }
  ForwardPass(const ForwardPass&) = delete;  // c_ refers to keys_

  [[nodiscard]] double flops() const { return product_flops(c_.geometry); }
  // Numbers of scratch that a worker takes.
  [[nodiscard]] Index elements() const { return elements_; }
  // Items of work: first all of work(), and when they are done, all of join().
  [[nodiscard]] Index items() const { return units_ * parts_; }
  [[nodiscard]] Index joins() const { return parts_ > 1 ? units_ : 0; }
  [[nodiscard]] Index count(bool joining) const { return joining ? joins() : items(); }

  // Side values of keys that are computed ahead of the first item: by the first worker that comes, unless they are.
  void build_keys(int threads) {
    built_.run([&] {
      if (units_ > 0 && !lazy_keys_) keys_.build(threads);
    });
  }
  [[gnu::noinline]] void engage(std::optional<Worker>& worker, Scratch<Real>& scratch) {
    build_keys(1);
    worker.emplace(c_, out_, saved_, lazy_keys_, scratch);
  }
  void work(Worker& worker, Index item) {
    if (parts_ > 1) {
      const Index unit = item / parts_, n = item % parts_;
      return worker.mix_part(unit / kv_heads(), unit % kv_heads(), n, parts_, left(unit, n));
    }
    const auto [b, kv_head, group] = group_at(c_, item);
    if (!holds(group)) return;
    worker.mix(b, kv_head, group);
    worker.write_out();
  }
  void join(Worker& worker, Index unit) {
    worker.join_parts(unit / kv_heads(), unit % kv_heads(), parts_, left(unit, 0));
    worker.write_out();
  }

  // All items, by the worker that asks for it.
  void run_alone() {
    if (units_ == 0) return;
    Scratch<Real> scratch(elements_);
    std::optional<Worker> worker;
    engage(worker, scratch);
    for (Index item = 0; item < items(); ++item) work(*worker, item);
    for (Index unit = 0; unit < joins(); ++unit) join(*worker, unit);
  }

 private:
  // Is a panel of the group at hand?
  [[nodiscard]] bool holds(Index group) const {
    const Index first = group * c_.plan.group;
    bool any = false;
    for (Index i = 0; i < c_.plan.group && !any; ++i) any = c_.holds((first + i) % c_.plan.panels);
    return any;
  }
  [[nodiscard]] Index kv_heads() const { return c_.geometry.kv_heads; }
  [[nodiscard]] Real* left(Index unit, Index part) {
    return left_.data() + (unit * parts_ + part) * Worker::part_elements(c_);
  }

  KeySide<Real> keys_;
  CallContext<Real> c_;
  OutputSet<TensorView<Real>> out_;
  Saved<Real>* saved_;
  KeySide<Real>* lazy_keys_ = nullptr;
  Index units_, parts_ = 1, elements_ = 0;
  std::vector<Real> left_;  // what the parts of each unit leave for join()
  Once built_;
};

// The order of numbers from the largest to the least, equal ones as they stand. (std::stable_sort would go on without memory
// that it asks for.)
[[nodiscard]] inline std::vector<Index> largest_first(const std::vector<double>& numbers) {
  std::vector<Index> order(numbers.size());
  std::iota(order.begin(), order.end(), Index(0));
  std::sort(order.begin(), order.end(), [&](Index a, Index b) {
    const double of_a = numbers[std::size_t(a)], of_b = numbers[std::size_t(b)];
    return of_a > of_b || (of_a == of_b && a < b);
  });
  return order;
}

// The passes of calls, those of the longest first, of one length as they stand.
template <class Pass, class Call>
void take_longest_first(std::span<Call* const> calls, FixedList<Pass*>& passes) {
  std::vector<double> flops;
  for (Call* call : calls) flops.push_back(call->pass()->flops());
  for (const Index n : largest_first(flops)) passes.emplace(calls[std::size_t(n)]->pass());
}

// Runs calls of one op together, the longest first. Several of them must not read one KeyFeatures.
template <class Real>
void run_forward(const FixedList<ForwardPass<Real>*>& passes, const Options& options) {
  using Pass = ForwardPass<Real>;
  using Worker = typename Pass::Worker;
  Index items = 0, joins = 0, elements = 0;
  double flops = 0;
  for (const Pass* pass : passes) {
    items += pass->items();
    joins += pass->joins();
    elements = std::max(elements, pass->elements());
    flops += pass->flops();
  }
  if (items == 0) return;
  const int workers = worker_count(options, flops, items, elements * Index(sizeof(Real)));
  if (passes.size() == 1) passes[0]->build_keys(workers);
  // All items of work, or all joins.
  const auto run = [&](Index count, bool joining) {
    Dispenser dispenser(count);
    run_workers(int(std::min<Index>(workers, count)), [&](int) {
      Scratch<Real> scratch(elements);
      std::optional<Worker> worker;  // at work on passes[at], whose items begin at `first`
      std::size_t at = 0;
      Index first = 0;
      for (Index item = dispenser.next(); item >= 0; item = dispenser.next()) {
        for (Index own; item - first >= (own = passes[at]->count(joining)); ++at, first += own)
          worker.reset();
        if (!worker) {
          scratch.clear();
          passes[at]->engage(worker, scratch);
        }
        if (joining)
          passes[at]->join(*worker, item - first);
        else
          passes[at]->work(*worker, item - first);
      }
    });
  };
  run(items, false);
  if (joins > 0) run(joins, true);
}

// What a call of forward reads and writes beside the caller's memory, and the passes that it runs.
template <class Real>
class ForwardCall {
 public:
  // threads: that may prepare it. The call that was opened must outlive it.
  ForwardCall(const OpenCall<Real>& call, const Outputs<Real>& outputs, Saved<Real>* saved,
              int threads)
      : call_(call),
        saved_(saved),
        bound_(call.bound_mask(threads)),
        copies_(threads),
        operands_{{.query = rows(call.in.query, TokensOf::queries),
                   .key = call.in.key,
                   .value = call.in.value,
                   .extra = rows(call.in.extra, TokensOf::queries)}} {
    const OpTiles<Real>& op = call.op;
    const Geometry& g = call.geometry;
    const Inputs<Real>& in = call.in;
    const bool own_rows = op.readout.traits.uses_own_rows;
    // Own rows need not lie in the tile at hand, and tiles count keys from those elsewhere on.
    if (own_rows || g.share.keys_before > 0) {
      operands_.key = rows(in.key, TokensOf::keys);
      operands_.value = rows(in.value, TokensOf::keys);
    }
    if (op.columns.any()) {
      operands_.query_inputs = rows(in.query_inputs, TokensOf::queries);
      operands_.key_inputs = rows(in.key_inputs, TokensOf::keys);
    }
    inputs_ = take_inputs(op, g, threads, operands_);
    to_ = copies_.write_outputs(outputs, g.share.queries_before);
    const bool folds = heads_fold(op, g, call.mask, bound_, call.options.dropout);
    // Copied keys, shards and folded heads bypass the feature cache.
    const bool others = own_rows || g.held_keys() != g.len_kv ||
                        (folds && in.key_features && SideNeeds<Real>(op, g).per_query_head);
    kept_ = others ? nullptr : in.key_features;
    if (!folds) return;
    folded_.emplace(fold_heads(g), fold_heads(call.mask, bound_, g), fold_heads(call.options));
    folded_->bound.emplace(folded_->mask, folded_->geometry, call.where.c_str());
    operands_.query = fold_heads(operands_.query, g);
    operands_.extra = fold_heads(operands_.extra, g);
    to_ = {fold_heads(to_.out, g), fold_heads(to_.lse, g), fold_heads(to_.steps, g)};
  }
  ForwardCall(const ForwardCall&) = delete;  // its parts refer to each other

  // An op whose rows depend on each other is first run as a rehearsal; afterwards it is settled with what all rows of the
  // call have said.
  void rehearse() {
    take_readout(call_.op.readout.rehearsal());
    ready(*settled_, &reports_);
  }
  void settle() {
    pass_.reset();
    take_readout(call_.op.readout.settled(reports_));
    ready(*settled_, saved_);
  }
  void ready() { ready(call_.op, saved_); }
  [[nodiscard]] ForwardPass<Real>* pass() { return &*pass_; }
  // All of the call, by the worker that asks for it.
  void run_alone() {
    if (call_.op.readout.needs_rehearsal()) {
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
    if (saved_) saved_->stamp = call_.stamp();
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
  [[nodiscard]] TensorView<const Real> rows(const StoredView<const Real>& held, TokensOf tokens) {
    return rows_of_call(copies_.read(held), call_.geometry.share, tokens);
  }
  void take_readout(std::unique_ptr<ReadoutTiles<Real>> readout) {
    own_readout_ = std::move(readout);
    settled_.emplace(OpTiles<Real>{call_.op.score, call_.op.normaliser, *own_readout_,
                                   call_.op.columns, call_.op.type});
  }
  void ready(const OpTiles<Real>& op, Saved<Real>* to) {
    pass_.emplace(op, folded_ ? folded_->geometry : call_.geometry, operands_,
                  folded_ ? *folded_->bound : bound_, to_, to,
                  folded_ ? folded_->options : call_.options, kept_);
  }

  const OpenCall<Real>& call_;
  Saved<Real>* saved_;
  BoundMask<Real> bound_;
  WidenedTensors<Real> copies_;
  Operands<Real> operands_;
  std::unique_ptr<SummedInputs<Real>> inputs_;
  OutputSet<TensorView<Real>> to_;
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

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
