// SPDX-License-Identifier: Apache-2.0
#pragma once

// Forward of checked calls: what a call prepares, and the workers that take its groups of panels through the keys. Several
// calls of one op, such as packed sequences, may share the workers. Each call is planned and computed as if it were alone, so
// that its bits are those of a call of its own; the groups of all calls are handed out together, the longest call's first.

#include <heed/engine/forward_walk.hpp>
#include <heed/engine/listed_keys.hpp>
#include <heed/engine/open.hpp>
#include <heed/engine/value_map.hpp>

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
  // Each row is written, but for those of a share whose panel begins elsewhere.
  if (!(g.share == Share{})) saved.mixed.clear();
  saved.mixed.resize(readout.saves_mixed ? rows * std::size_t(g.dim_v) : 0);
  saved.diagnostics.assign(std::size_t(normaliser.diagnostics + readout.diagnostics),
                           std::vector<Real>(rows, Real(0)));
  name_diagnostics(op, saved);
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

// A call of forward: what it reads and writes beside the caller's memory, and the items of work that its workers take.
template <class Real>
class ForwardCall {
 public:
  using Worker = ForwardWorker<Real>;
  // A worker, and the small call that it is at, where queries have lists of keys of their own.
  struct Engaged {
    std::unique_ptr<ListedQuery<Real>> query;
    std::optional<Worker> worker;
  };

  // threads: how many may prepare the call. The opened call must outlive this object.
  ForwardCall(const OpenCall<Real>& call, const Outputs<Real>& outputs, Saved<Real>* saved,
              int threads)
      : call_(call),
        saved_(saved),
        bound_(call.bound_mask(threads)),
        copies_(threads),
        in_{{.query = rows(call.in.query, TokensOf::queries),
             .key = call.in.key,
             .value = call.in.value,
             .extra = rows(call.in.extra, TokensOf::queries)}} {
    const OpTiles<Real>& op = call.op;
    const Geometry& g = call.geometry;
    const Inputs<Real>& in = call.in;
    // A share's keys are numbered behind those of other shares, which a worker's tile does not know.
    if (g.share.keys_before > 0) {
      in_.key = rows(in.key, TokensOf::keys);
      in_.value = rows(in.value, TokensOf::keys);
    }
    if (const MappedValues<Real> mapped(op, copies_, in.value, false); mapped.values.given())
      in_.value = rows_of_call<const Real>(mapped.values, g.share, TokensOf::keys);
    if (op.columns.any()) {
      in_.query_inputs = rows(in.query_inputs, TokensOf::queries);
      in_.key_inputs = rows(in.key_inputs, TokensOf::keys);
    }
    inputs_ = take_inputs(op, g, threads, in_);
    out_ = copies_.write_outputs(outputs, g.share.queries_before);
    if (const ListPairs* const own =
            takes_listed_keys(op, g, call.mask, bound_, call.options.dropout)) {
      listed_.emplace(op, g, *own, bound_, in_, call.options);
      return;
    }
    const bool folds = heads_fold(op, g, call.mask, bound_, call.options.dropout);
    // Copied keys, shards and folded heads bypass the feature cache.
    const bool others = g.held_keys() != g.len_kv ||
                        (folds && in.key_features && DerivedNeeds<Real>(op, g).per_query_head);
    kept_ = others ? nullptr : in.key_features;
    if (!folds) return;
    folded_.emplace(call, bound_);
    in_.query = fold_heads(in_.query, g);
    in_.extra = fold_heads(in_.extra, g);
    out_ = {fold_heads(out_.out, g), fold_heads(out_.lse, g), fold_heads(out_.steps, g)};
  }
  ForwardCall(const ForwardCall&) = delete;  // its parts refer to each other

  // Readouts that need reports of all rows run twice: settled with those of a rehearsal, they overwrite its rows.
  void rehearse() { prepare(call_.op.readout.rehearsal(), &reports_); }
  void settle() { prepare(call_.op.readout.settled(reports_), saved_); }
  void ready() { prepare(call_.op, saved_); }
  // All of the call, by the worker that asks for it.
  void run_alone() {
    if (call_.op.readout.needs_rehearsal()) {
      rehearse();
      run_items();
      settle();
    } else {
      ready();
    }
    run_items();
    finish();
  }
  void finish() {
    copies_.round();
    if (saved_) saved_->stamp = call_.stamp();
  }

  [[nodiscard]] double flops() const {
    return listed_ ? listed_->flops() : product_flops(c_->geometry);
  }
  [[nodiscard]] Index elements() const { return elements_; }  // of scratch for a worker
  // Items of work: first all of work(), and when they are done, all of join().
  [[nodiscard]] Index count(bool joining) const {
    return !joining ? units_ * parts_ : parts_ > 1 ? units_ : 0;
  }

  // Computes derived values of keys ahead of the first item. The first worker that arrives does it; later ones find them.
  void build_keys(int threads) {
    built_->run([&] {
      if (units_ > 0 && !lazy_keys_) keys_->build(threads);
    });
  }
  [[gnu::noinline]] void engage(Engaged& engaged, Scratch<Real>& scratch) {
    build_keys(1);
    engaged.worker.reset();
    if (!listed_) {
      engaged.worker.emplace(*c_, out_, to_, lazy_keys_, scratch);
      return;
    }
    engaged.query = listed_->query(*keys_);
    if (to_) prepare_saved(call_.op, listed_->geometry(), engaged.query->saved);
    engaged.worker.emplace(*engaged.query->context, out_, to_ ? &engaged.query->saved : nullptr,
                           nullptr, scratch);
  }
  void work(Engaged& engaged, Index item) {
    Worker& worker = *engaged.worker;
    if (listed_) return listed_->run(worker, *engaged.query, item, out_, to_);
    if (parts_ > 1) {
      const Index unit = item / parts_, n = item % parts_;
      return worker.accumulate_part(unit / kv_heads(), unit % kv_heads(), n, parts_, left(unit, n));
    }
    // The longest groups of a head first: under a causal mask those of the last queries.
    const Index groups = c_->groups_of(c_->geometry.group()), batch_and_head = item / groups;
    const Index group = groups - 1 - item % groups;
    if (!holds(group)) return;
    worker.mix(batch_and_head / kv_heads(), batch_and_head % kv_heads(), group);
    worker.write_out();
  }
  void join(Engaged& engaged, Index unit) {
    Worker& worker = *engaged.worker;
    worker.join_parts(unit / kv_heads(), unit % kv_heads(), parts_, left(unit, 0));
    worker.write_out();
  }

 private:
  // The call in which query heads that share keys stand as further queries of one head.
  struct Folded {
    Geometry geometry;
    Mask<Real> mask;
    Options options;
    BoundMask<Real> bound;
    Folded(const OpenCall<Real>& call, const BoundMask<Real>& own)
        : geometry(fold_heads(call.geometry)),
          mask(fold_heads(call.mask, own, call.geometry)),
          options(fold_heads(call.options)),
          bound(mask, geometry, call.where.c_str()) {}
  };
  [[nodiscard]] TensorView<const Real> rows(const StoredView<const Real>& held, TokensOf tokens) {
    return rows_of_call(copies_.read(held), call_.geometry.share, tokens);
  }
  void prepare(std::unique_ptr<ReadoutTiles<Real>> readout, Saved<Real>* to) {
    const OpTiles<Real>& op = call_.op;
    own_readout_ = std::move(readout);
    settled_.emplace(OpTiles<Real>{op.score, op.normaliser, *own_readout_, op.columns, op.type});
    prepare(*settled_, to);
  }
  void prepare(const OpTiles<Real>& op, Saved<Real>* to) {
    const Geometry& g = folded_ ? folded_->geometry : call_.geometry;
    const Options& options = folded_ ? folded_->options : call_.options;
    const BoundMask<Real>& mask = folded_ ? folded_->bound : bound_;
    to_ = to;
    if (listed_) return prepare_listed(op);
    keys_.emplace(op, g, in_.key, kept_, door_name("heed::forward", options.name), in_.key_inputs);
    // Tiles end where a page of a cache does. This is no plan of backward.
    c_.emplace(
        make_context(op, g, mask, in_, *keys_, options,
                     plan_call<Real>(op, g, mask, options,
                                     std::gcd(in_.key.page_rows(), in_.value.page_rows()), false)));
    const Index groups = c_->groups_of(g.group());
    units_ = g.held_queries() > 0 ? g.batch * g.kv_heads * groups : 0;
    built_.emplace();
    if (to) prepare_saved(op, g, *to);
    // Where one unit reads all keys of a head, derived values are computed while their tile is in cache.
    lazy_keys_ = groups == 1 && !keys_->keeps() ? &*keys_ : nullptr;
    parts_ = op.normaliser.traits.mergeable && groups == 1 && units_ > 0
                 ? parts_of_keys(units_, g.len_kv)
                 : 1;
    if (parts_ > 1)
      left_.assign(std::size_t(units_ * parts_ * Worker::part_elements(*c_)), Real(0));
    if (units_ > 0)
      elements_ = scratch_elements<Real>(
          [&](Scratch<Real>& scratch) { return Worker(*c_, out_, to_, lazy_keys_, scratch); });
  }
  void prepare_listed(const OpTiles<Real>& op) {
    built_.emplace();
    if (to_) prepare_saved(op, call_.geometry, *to_);
    keys_.emplace(op, listed_->geometry(), in_.key, nullptr, "heed::forward", in_.key_inputs);
    units_ = listed_->count();
    const auto sample = listed_->query(*keys_);
    elements_ = scratch_elements<Real>([&](Scratch<Real>& scratch) {
      return Worker(*sample->context, out_, to_, nullptr, scratch);
    });
  }
  void run_items() {
    if (units_ == 0) return;
    Scratch<Real> scratch(elements_);
    Engaged engaged;
    engage(engaged, scratch);
    for (Index item = 0; item < count(false); ++item) work(engaged, item);
    for (Index unit = 0; unit < count(true); ++unit) join(engaged, unit);
  }
  // Does this share hold a panel of the group?
  [[nodiscard]] bool holds(Index group) const {
    const Index first = group * c_->plan.group;
    bool any = false;
    for (Index i = 0; i < c_->plan.group && !any; ++i)
      any = c_->holds((first + i) % c_->plan.panels);
    return any;
  }
  [[nodiscard]] Index kv_heads() const { return c_->geometry.kv_heads; }
  [[nodiscard]] Real* left(Index unit, Index part) {
    return left_.data() + (unit * parts_ + part) * Worker::part_elements(*c_);
  }

  const OpenCall<Real>& call_;
  Saved<Real>* saved_;
  BoundMask<Real> bound_;
  WidenedTensors<Real> copies_;
  Operands<Real> in_;
  std::unique_ptr<SummedInputs<Real>> inputs_;
  OutputSet<TensorView<Real>> out_;
  KeyFeatures<Real>* kept_ = nullptr;
  std::optional<Folded> folded_;
  std::optional<ListedKeys<Real>> listed_;
  // prepare() sets these, and sets them again for an op that is settled after its rehearsal.
  std::unique_ptr<ReadoutTiles<Real>> own_readout_;  // of settled_
  std::optional<OpTiles<Real>> settled_;
  Saved<Real> reports_;  // of the rehearsal
  Saved<Real>* to_ = nullptr;
  std::optional<DerivedKeys<Real>> keys_;
  std::optional<CallContext<Real>> c_;
  DerivedKeys<Real>* lazy_keys_ = nullptr;
  Index units_ = 0, parts_ = 1, elements_ = 0;
  std::vector<Real> left_;  // what the parts of each unit leave for join()
  std::optional<Once> built_;
};

// Many calls are prepared in parallel, one thread each; few are prepared one after the other, each with all threads.
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

// Calls from the longest to the shortest; calls of equal length keep their order.
template <class Call>
[[nodiscard]] std::vector<Call*> longest_first(std::span<Call* const> calls) {
  std::vector<std::pair<double, std::size_t>> order;
  for (std::size_t n = 0; n < calls.size(); ++n) order.emplace_back(-calls[n]->flops(), n);
  std::sort(order.begin(), order.end());
  std::vector<Call*> sorted;
  for (const auto& [flops, n] : order) sorted.push_back(calls[n]);
  return sorted;
}

// Runs calls of one op that are prepared, together, the longest first. Several of them must not read one KeyFeatures.
template <class Real>
void run_prepared(std::span<ForwardCall<Real>* const> prepared, const Options& options) {
  const std::vector<ForwardCall<Real>*> calls = longest_first(prepared);
  Index items = 0, joins = 0, elements = 0;
  double flops = 0;
  for (const ForwardCall<Real>* call : calls) {
    items += call->count(false);
    joins += call->count(true);
    elements = std::max(elements, call->elements());
    flops += call->flops();
  }
  if (items == 0) return;
  const int workers = worker_count(options, flops, items, elements * Index(sizeof(Real)));
  if (calls.size() == 1) calls[0]->build_keys(workers);
  // All items of work, or all joins.
  const auto run = [&](Index count, bool joining) {
    Dispenser dispenser(count);
    run_workers(int(std::min<Index>(workers, count)), [&](int) {
      Scratch<Real> scratch(elements);
      // The worker is at work on calls[at], whose items begin at `first`.
      typename ForwardCall<Real>::Engaged engaged;
      std::size_t at = 0;
      Index first = 0;
      for (Index item = dispenser.next(); item >= 0; item = dispenser.next()) {
        for (Index of_call; item - first >= (of_call = calls[at]->count(joining));) {
          engaged.worker.reset();
          first += of_call;
          ++at;
        }
        if (!engaged.worker) {
          scratch.clear();
          calls[at]->engage(engaged, scratch);
        }
        if (joining)
          calls[at]->join(engaged, item - first);
        else
          calls[at]->work(engaged, item - first);
      }
    });
  };
  run(items, false);
  if (joins > 0) run(joins, true);
}

// Prepares and runs calls of one op together.
template <class Real>
void run_forward(std::span<ForwardCall<Real>* const> calls, const OpTiles<Real>& op,
                 const Preparation& preparation, const Options& options) {
  const auto run = [&](void (ForwardCall<Real>::*prepare)()) {
    preparation.run(Index(calls.size()),
                    [&](Index n, int) { (calls[std::size_t(n)]->*prepare)(); });
    run_prepared<Real>(calls, options);
  };
  if (op.readout.needs_rehearsal()) {
    run(&ForwardCall<Real>::rehearse);
    run(&ForwardCall<Real>::settle);
  } else {
    run(&ForwardCall<Real>::ready);
  }
  for (ForwardCall<Real>* call : calls) call->finish();
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
