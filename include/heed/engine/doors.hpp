// SPDX-License-Identifier: Apache-2.0
#pragma once

// Both doors: what they check, and the passes that they then run; one for a call, several for packed sequences.

#include <heed/engine/backward_pass.hpp>
#include <heed/engine/forward_pass.hpp>
#include <heed/engine/held_rows.hpp>
#include <heed/engine/packed.hpp>
#include <heed/engine/share.hpp>

#include <deque>
#include <memory>
#include <optional>
#include <type_traits>
#include <variant>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

template <class Op>
[[nodiscard]] Shape lse_shape(const Geometry& g) {
  return {g.batch, g.heads, g.held_queries(), Op::NormaliserType::maps};
}

[[nodiscard]] inline Shape steps_shape(const Geometry& g) {
  return {g.batch, g.heads, g.held_queries(), 1};
}

// Throws where the op, with its options, gives no steps; `name` says of what they were given.
template <class Op>
void require_steps(const Op& op, const char* name, const std::string& where) {
  const char* why = op.readout.without_steps();
  require(why == nullptr, where, ": ", name, " was given, ", why ? why : "");
}

// f(name, tensor) for all that a call reads as numbers: of its inputs, or of their tangents, and of its mask's bias.
template <class Tensors, class Bias, class F>
void for_each_operand(const Tensors& of, const Bias& bias, F&& f) {
  f("query", of.query);
  f("key", of.key);
  f("value", of.value);
  f("extra", of.extra);
  f("query_inputs", of.query_inputs);
  f("key_inputs", of.key_inputs);
  f("bias", bias);
}

template <class Op, class Real>
void check_outputs(const Op& op, const Outputs<Real>& outputs, const Geometry& g,
                   const Inputs<Real>& in, const Mask<Real>& mask, const std::string& where) {
  require_output(outputs.out, g.out_shape(), "out", where);
  const auto apart = [&](const StoredView<Real>& out, const char* name) {
    for_each_operand(in, mask.bias, [&](const char* input, const auto& view) {
      require_apart(out, view, name, input, where);
    });
    require_apart(out, mask.allowed, name, "the boolean mask", where);
  };
  apart(outputs.out, "out");
  if (outputs.lse.given()) {
    require_output(outputs.lse, lse_shape<Op>(g), "lse", where);
    apart(outputs.lse, "lse");
    require_apart(outputs.lse, outputs.out, "lse", "out", where);
  }
  if (!outputs.steps.given()) return;
  require_steps(op, "steps", where);
  require_output(outputs.steps, steps_shape(g), "steps", where);
  apart(outputs.steps, "steps");
  require_apart(outputs.steps, outputs.out, "steps", "out", where);
  require_apart(outputs.steps, outputs.lse, "steps", "lse", where);
}

template <class Real>
void check_gradients(const Gradients<Real>& grads, const Inputs<Real>& in, const Mask<Real>& mask,
                     const StoredView<const Real>& out, const OutputGradients<Real>& output,
                     const std::string& where) {
  struct Named {
    const char* name;
    bool given;
    MemoryView view, scales;
  };
  const auto named = [](const char* name, const auto& view) {
    MemoryView scales{};
    if constexpr (requires { view.scales(); }) scales = view.scales();
    return Named{name, view.given(), view, scales};
  };
  const Named read[] = {named("query", in.query),           named("key", in.key),
                        named("value", in.value),           named("extra", in.extra),
                        named("bias", mask.bias),           named("query_inputs", in.query_inputs),
                        named("key_inputs", in.key_inputs), named("out", out),
                        named("grad_out", output.out),      named("grad_lse", output.lse),
                        named("grad_steps", output.steps)};
  const Named written[] = {named("grad_query", grads.query),
                           named("grad_key", grads.key),
                           named("grad_value", grads.value),
                           named("grad_extra", grads.extra),
                           named("grad_bias", grads.bias),
                           named("grad_query_inputs", grads.query_inputs),
                           named("grad_key_inputs", grads.key_inputs)};
  for (const Named& a : written) {
    if (!a.given) continue;
    const Named& like = read[&a - written];
    require(like.given, where, ": ", a.name, " was given, the call has no such input");
    require_output(a.view, like.view.shape, a.name, where);
    for (const Named& b : read) {
      require_apart(a.view, b.view, a.name, b.name, where);
      require_apart_from_scales(a.view, b.scales, a.name, b.name, where);
    }
    require_apart(a.view, mask.allowed, a.name, "the boolean mask", where);
    for (const Named& b : written)
      if (&a < &b) require_apart(a.view, b.view, a.name, b.name, where);
  }
}

// Are these the rows that forward saves for such a call?
template <class Op, class Real>
void check_saved(const Saved<Real>& saved, const CallStamp& call, const std::string& where) {
  using Normaliser = typename Op::NormaliserType;
  const Geometry& g = call.geometry;
  const std::string difference = saved.stamp.difference(call);
  require(difference.empty(), where, ": saved ", difference);
  const auto check = [&](const std::vector<Real>& numbers, Index wanted, const char* what) {
    require(Index(numbers.size()) == wanted, where, ": saved holds ", numbers.size(), " ", what,
            ", the call needs ", wanted, "; it must come from forward() of the same op and inputs");
  };
  const Index rows = g.query_rows();
  check(saved.lse, Normaliser::maps * rows, "log-sum-exps");
  check(saved.state, Normaliser::streams ? StreamStates<Normaliser, Real>::kNumbers * rows : 0,
        "states of rows");
  check(saved.mixed, Op::ReadoutType::saves_mixed ? rows * g.dim_v : 0, "mixed values");
}

// What the call reads of its tokens, in `operands`; holds the memory of their sums.
template <class Op, class Real>
[[nodiscard]] auto take_inputs(const Op& op, const Geometry& g, const Inputs<Real>& in,
                               WidenedTensors<Real>& copies, int threads,
                               Operands<Real>& operands) {
  using Score = typename Op::ScoreType;
  using Columns = InputColumns<Op>;
  if constexpr (Columns::any) {
    const auto query = rows_of_call(copies.read(in.query_inputs), g.share.queries_before),
               key = rows_of_call(copies.read(in.key_inputs), g.share.keys_before);
    operands.part_inputs = part_inputs_of<Op>(query, key);
    auto inputs = std::make_unique<SummedInputs<Score, Real>>(
        op.score, g, columns_of(query, Columns::score_query), columns_of(key, Columns::score_key),
        threads);
    operands.query_inputs = inputs->query();
    operands.key_inputs = inputs->key();
    return inputs;
  } else {
    return nullptr;
  }
}

template <class Op>
using SumsOfInputs =
    decltype(take_inputs(std::declval<const Op&>(), std::declval<const Geometry&>(),
                         std::declval<const Inputs<typename Op::Scalar>&>(),
                         std::declval<WidenedTensors<typename Op::Scalar>&>(), 1,
                         std::declval<Operands<typename Op::Scalar>&>()));

// Where backward writes what it adds up, in `grads`, which arrive as the caller's.
template <class Op, class Real, class Sums>
void take_input_gradients(Sums& sums, GradientOperands<Real>& grads) {
  using Columns = InputColumns<Op>;
  grads.part_inputs = part_inputs_of<Op>(grads.query_inputs, grads.key_inputs);
  grads.query_inputs = columns_of(grads.query_inputs, Columns::score_query);
  grads.key_inputs = columns_of(grads.key_inputs, Columns::score_key);
  sums.take_gradients(grads.query_inputs, grads.key_inputs);
}

// A checked call of forward: what it reads and writes, and the passes that it runs.
template <class Op>
class ForwardCall {
 public:
  using Real = typename Op::Scalar;

  // threads: that may prepare it. Op, mask, options and `where` must outlive it.
  ForwardCall(const Op& op, const Geometry& g, const Inputs<Real>& in, const Mask<Real>& mask,
              const Outputs<Real>& outputs, Saved<Real>* saved, const Options& options,
              const std::string& where, int threads)
      : op_(op),
        g_(g),
        mask_(mask),
        options_(options),
        saved_(saved),
        bound_(mask, g, where.c_str(), threads),
        copies_(threads),
        operands_{of_queries(copies_.read(in.query)), in.key, in.value,
                  of_queries(copies_.read(in.extra))} {
    // Own rows need not lie in the tile at hand, and tiles count keys from those elsewhere on.
    if (Op::ReadoutType::uses_own_rows || g.share.keys_before > 0) {
      operands_.key = rows_of_call(copies_.read(in.key), g.share.keys_before);
      operands_.value = rows_of_call(copies_.read(in.value), g.share.keys_before);
    }
    inputs_ = take_inputs(op, g, in, copies_, threads, operands_);
    to_ = {of_queries(copies_.write(outputs.out)), of_queries(copies_.write(outputs.lse)),
           of_queries(copies_.write(outputs.steps))};
    const bool folds = heads_fold(op, g, mask, bound_, options.dropout);
    // Of copies and shares of keys, and of heads that are folded in this call alone, nothing can be kept.
    const bool others = Op::ReadoutType::uses_own_rows || g.held_keys() != g.len_kv ||
                        (folds && in.key_features && SideNeeds<Op>(op, g).per_query_head);
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
  [[nodiscard]] static bool needs_rehearsal(const Op& op) {
    if constexpr (Op::ReadoutType::rehearses) return op.readout.needs_rehearsal();
    return false;
  }
  void rehearse() {
    if constexpr (Op::ReadoutType::rehearses) {
      settled_.emplace(op_);
      settled_->readout = op_.readout.rehearsal();
      ready(*settled_, &reports_);
    }
  }
  void settle() {
    if constexpr (Op::ReadoutType::rehearses) {
      pass_.reset();
      settled_.emplace(op_);
      settled_->readout.settle(reports_);
      ready(*settled_, saved_);
    }
  }
  void ready() { ready(op_, saved_); }
  [[nodiscard]] ForwardPass<Op, Real>* pass() { return &*pass_; }

  void finish() {
    copies_.round();
    if (saved_) saved_->stamp = CallStamp::of<Op>(g_, mask_, scale_of(op_, g_, options_), options_);
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
  void ready(const Op& op, Saved<Real>* to) {
    if (folded_)
      pass_.emplace(op, folded_->geometry, operands_, *folded_->bound, to_, to, folded_->options,
                    kept_);
    else
      pass_.emplace(op, g_, operands_, bound_, to_, to, options_, kept_);
  }

  const Op& op_;
  Geometry g_;
  const Mask<Real>& mask_;
  const Options& options_;
  Saved<Real>* saved_;
  BoundMask<Real> bound_;
  WidenedTensors<Real> copies_;
  Operands<Real> operands_;
  SumsOfInputs<Op> inputs_;
  OutputOperands<Real> to_;
  KeyFeatures<Real>* kept_ = nullptr;
  std::optional<Folded> folded_;
  std::conditional_t<Op::ReadoutType::rehearses, std::optional<Op>, std::monostate> settled_;
  Saved<Real> reports_;  // of the rehearsal
  std::optional<ForwardPass<Op, Real>> pass_;
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

// Runs so many calls of one op together; make(n, threads) makes call n.
template <class Op, class Make>
void run_forward_calls(const Op& op, Index count, Make&& make, const Options& options) {
  using Call = ForwardCall<Op>;
  const Preparation preparation(count, resolve_threads(options.threads));
  std::vector<std::unique_ptr<Call>> calls(static_cast<std::size_t>(count));
  const auto run_all = [&] {
    std::vector<ForwardPass<Op, typename Op::Scalar>*> passes;
    for (const auto& call : calls) passes.push_back(call->pass());
    run_forward(passes, options);
  };
  const bool rehearses = Call::needs_rehearsal(op);
  preparation.run(count, [&](Index n, int threads) {
    auto& call = calls[std::size_t(n)];
    call = make(n, threads);
    rehearses ? call->rehearse() : call->ready();
  });
  run_all();
  if (rehearses) {
    preparation.run(count, [&](Index n, int) { calls[std::size_t(n)]->settle(); });
    run_all();
  }
  for (const auto& call : calls) call->finish();
}

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
[[nodiscard]] std::vector<PackedCall<Op>> calls_of(const Op& op, const PackedCalls<Real>& packed,
                                                   const Options& options) {
  std::vector<PackedCall<Op>> calls;
  for (Index n = 0; n < packed.size(); ++n) {
    PackedCall<Op> call{
        packed.where(n), packed.inputs(n), packed.mask(n), packed.options(n, options), {}};
    call.geometry = geometry_of(op, call.in, call.where);
    calls.push_back(std::move(call));
  }
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

template <class Op>
void forward_packed(const Op& op, const Inputs<typename Op::Scalar>& in,
                    const Mask<typename Op::Scalar>& mask,
                    const Outputs<typename Op::Scalar>& outputs, Saved<typename Op::Scalar>* saved,
                    const Options& options, const std::string& where) {
  using Real = typename Op::Scalar;
  const PackedCalls<Real> packed(in, mask, joins_sequences<Op>, where);
  const std::vector<PackedCall<Op>> calls = calls_of(op, packed, options);
  const Geometry whole = packed_geometry(calls[0].geometry, packed, in.first_query);
  check_outputs(op, outputs, whole, in, mask, where);
  for (const PackedCall<Op>& call : calls)
    if (packed.with_caches())
      for (const auto& [out, name] :
           {std::pair{&outputs.out, "out"}, {&outputs.lse, "lse"}, {&outputs.steps, "steps"}}) {
        require_apart(*out, call.in.key, name, "key", call.where);
        require_apart(*out, call.in.value, name, "value", call.where);
      }
  if (saved) saved->sequences.assign(calls.size(), {});
  const auto make = [&](Index n, int threads) {
    const PackedCall<Op>& call = calls[std::size_t(n)];
    const Outputs<Real> to{packed.of_queries(outputs.out, n), packed.of_queries(outputs.lse, n),
                           packed.of_queries(outputs.steps, n)};
    return std::make_unique<ForwardCall<Op>>(op, call.geometry, call.in, call.mask, to,
                                             saved ? &saved->sequences[std::size_t(n)] : nullptr,
                                             call.options, call.where, threads);
  };
  run_forward_calls(op, packed.size(), make, options);
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

// Throws where an op cannot be computed in shares, or a share cuts through what is computed together.
template <class Op>
void require_share(const Op& op, const Geometry& g, const Options& options,
                   const std::string& where) {
  if (g.share == Share{}) return;
  if constexpr (Op::ReadoutType::rehearses)
    require(!op.readout.needs_rehearsal(), where,
            ": the op's rows depend on all rows of the call, a share of it has ", g.held_queries(),
            " of ", g.len_q);
  require(keys_in_shares<Op> || g.held_keys() == g.len_kv, where,
          ": the op reads all keys of a row at once, a share of the call has ", g.held_keys(),
          " of ", g.len_kv);
  if (g.held_queries() == g.len_q) return;
  const Index step = share_step(op, g, options);
  const auto fits = [&](Index at) { return at % step == 0 || at == g.len_q; };
  require(fits(g.share.queries_before) && fits(g.held_queries_end()), where,
          ": a share has queries [", g.share.queries_before, ", ", g.held_queries_end(), ") of ",
          g.len_q, "; it must begin and end at multiples of ", step,
          " (share_step()), or at the end");
}

template <class Op>
void Door<Op>::forward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                       const Outputs<Real>& outputs, Saved<Real>* saved, const Options& options) {
  const std::string where = door_name("heed::forward", options.name);
  if (saved) saved->stamp = {};
  require_options<Real>(options, where);
  if (in.packed) return forward_packed(op, in, mask, outputs, saved, options, where);
  const Geometry g = geometry_of(op, in, where);
  require_share(op, g, options, where);
  check_outputs(op, outputs, g, in, mask, where);
  if (saved) saved->sequences.clear();
  const auto make = [&](Index, int threads) {
    return std::make_unique<ForwardCall<Op>>(op, g, in, mask, outputs, saved, options, where,
                                             threads);
  };
  run_forward_calls(op, 1, make, options);
}

// What backward() is given beside its inputs, of a call or of packed sequences.
template <class Op, class Real>
void check_backward(const Op& op, const Geometry& g, const Inputs<Real>& in, const Mask<Real>& mask,
                    const StoredView<const Real>& out, const OutputGradients<Real>& output,
                    const Gradients<Real>& grads, const std::string& where) {
  const Shape out_shape = g.out_shape();
  require_shape(out, out_shape, "out", where);
  require_shape(output.out, out_shape, "grad_out", where);
  if (output.lse.given()) {
    require(Op::NormaliserType::differentiates_lse, where,
            ": grad_lse was given, the op's normaliser has no derivative of lse "
            "(plug/normaliser.hpp)");
    require_shape(output.lse, lse_shape<Op>(g), "grad_lse", where);
  }
  if (output.steps.given()) {
    require_steps(op, "grad_steps", where);
    require_shape(output.steps, steps_shape(g), "grad_steps", where);
  }
  check_gradients(grads, in, mask, out, output, where);
}

// A checked call of backward, and its pass.
template <class Op>
class BackwardCall {
 public:
  using Real = typename Op::Scalar;

  // As ForwardCall.
  BackwardCall(const Op& op, const Geometry& g, const Inputs<Real>& in,
               const BoundMask<Real>& bound, const Saved<Real>& saved,
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
    if constexpr (InputColumns<Op>::any) take_input_gradients<Op>(*inputs_, grads_);
    const Op* run = &op;
    if constexpr (Op::ReadoutType::rehearses)
      if (op.readout.needs_rehearsal()) {
        settled_.emplace(op);
        settled_->readout.settle(saved);
        run = &*settled_;
      }
    pass_.emplace(*run, g, operands_, bound, saved, output_, grads_, options);
  }
  BackwardCall(const BackwardCall&) = delete;  // its parts refer to each other

  [[nodiscard]] BackwardPass<Op, Real>* pass() { return &*pass_; }
  void finish() {
    if constexpr (InputColumns<Op>::any) inputs_->chain();
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
  SumsOfInputs<Op> inputs_;
  OutputGradientOperands<Real> output_;
  GradientOperands<Real> grads_;
  std::conditional_t<Op::ReadoutType::rehearses, std::optional<Op>, std::monostate> settled_;
  std::optional<BackwardPass<Op, Real>> pass_;
};

// Runs so many calls of one op together, as run_forward_calls().
template <class Op, class Make>
void run_backward_calls(Index count, bool one_bias, Make&& make, Op* grad_op,
                        const Options& options) {
  const Preparation preparation(count, resolve_threads(options.threads));
  std::vector<std::unique_ptr<BackwardCall<Op>>> calls(static_cast<std::size_t>(count));
  preparation.run(count, [&](Index n, int threads) { calls[std::size_t(n)] = make(n, threads); });
  std::vector<BackwardPass<Op, typename Op::Scalar>*> passes;
  for (const auto& call : calls) passes.push_back(call->pass());
  run_backward(passes, one_bias, grad_op, options);
  preparation.run(count, [&](Index n, int) { calls[std::size_t(n)]->finish(); });
}

template <class Op>
void backward_packed(const Op& op, const Inputs<typename Op::Scalar>& in,
                     const Mask<typename Op::Scalar>& mask, const Saved<typename Op::Scalar>& saved,
                     const StoredView<const typename Op::Scalar>& out,
                     const OutputGradients<typename Op::Scalar>& output,
                     const Gradients<typename Op::Scalar>& grads, Op* grad_op,
                     const Options& options, const std::string& where) {
  using Real = typename Op::Scalar;
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
  const auto make = [&](Index n, int threads) {
    const PackedCall<Op>& call = calls[std::size_t(n)];
    const Gradients<Real> to{
        packed.of_queries(grads.query, n),  packed.of_keys(grads.key, n),
        packed.of_keys(grads.value, n),     packed.of_queries(grads.extra, n),
        corner_of(bias, packed.run(n)),     packed.of_queries(grads.query_inputs, n),
        packed.of_keys(grads.key_inputs, n)};
    return std::make_unique<BackwardCall<Op>>(
        op, call.geometry, call.in, bounds[std::size_t(n)], saved.sequences[std::size_t(n)],
        packed.of_queries(out, n),
        OutputGradients<Real>{packed.of_queries(output.out, n), packed.of_queries(output.lse, n),
                              packed.of_queries(output.steps, n)},
        to, call.options, threads);
  };
  run_backward_calls(packed.size(), bias.given() && bias.shape().batch == 1, make, grad_op,
                     options);
  copies.round();
}

template <class Op>
void Door<Op>::backward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                        const Saved<Real>& saved, const StoredView<const Real>& out,
                        const OutputGradients<Real>& output, const Gradients<Real>& grads,
                        Op* grad_op, const Options& options) {
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  if (in.packed)
    return backward_packed(op, in, mask, saved, out, output, grads, grad_op, options, where);
  const Geometry g = geometry_of(op, in, where);
  require_one_piece(in.key, "key", where);
  require_one_piece(in.value, "value", where);
  require_share(op, g, options, where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  check_backward(op, g, in, mask, out, output, grads, where);
  check_saved<Op>(saved, CallStamp::of<Op>(g, mask, scale_of(op, g, options), options), where);
  const auto make = [&](Index, int threads) {
    return std::make_unique<BackwardCall<Op>>(op, g, in, bound, saved, out, output, grads, options,
                                              threads);
  };
  run_backward_calls(1, false, make, grad_op, options);
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
