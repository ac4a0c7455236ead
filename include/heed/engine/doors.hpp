// SPDX-License-Identifier: Apache-2.0
#pragma once

// Both doors: what they check, and the passes that they then run.

#include <heed/engine/backward_walk.hpp>
#include <heed/engine/forward_walk.hpp>

#include <memory>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

template <class Op>
[[nodiscard]] Shape lse_shape(const Geometry& g) {
  return {g.batch, g.heads, g.len_q, Op::NormaliserType::maps};
}

template <class Op>
[[nodiscard]] Shape steps_shape(const Op& op, const Geometry& g) {
  return {g.batch, g.heads, g.len_q, op.readout.step_columns(g)};
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
  require_output(outputs.out, {g.batch, g.heads, g.len_q, g.dim_v}, "out", where);
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
  require_output(outputs.steps, steps_shape(op, g), "steps", where);
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

// f(op), for an op whose rows depend on each other with what `reports()` says that all rows of the call do.
template <class Op, class Reports, class F>
void with_settled(const Op& op, Reports&& reports, F&& f) {
  if constexpr (Op::ReadoutType::rehearses)
    if (op.readout.needs_rehearsal()) {
      Op settled = op;
      settled.readout.settle(reports());
      return f(settled);
    }
  f(op);
}

// What the call reads of its tokens, in `operands`; holds the memory of their sums.
template <class Op, class Real>
[[nodiscard]] auto take_inputs(const Op& op, const Geometry& g, const Inputs<Real>& in,
                               WidenedTensors<Real>& copies, const Options& options,
                               Operands<Real>& operands) {
  using Score = typename Op::ScoreType;
  using Columns = InputColumns<Op>;
  if constexpr (Columns::any) {
    const auto query = copies.read(in.query_inputs), key = copies.read(in.key_inputs);
    operands.part_inputs = part_inputs_of<Op>(query, key);
    auto inputs = std::make_unique<SummedInputs<Score, Real>>(
        op.score, g, columns_of(query, Columns::score_query), columns_of(key, Columns::score_key),
        resolve_threads(options.threads));
    operands.query_inputs = inputs->query();
    operands.key_inputs = inputs->key();
    return inputs;
  } else {
    return nullptr;
  }
}

// Where backward writes what it adds up, in `grads`, which arrive as the caller's.
template <class Op, class Real, class Sums>
void take_input_gradients(Sums& sums, GradientOperands<Real>& grads) {
  using Columns = InputColumns<Op>;
  grads.part_inputs = part_inputs_of<Op>(grads.query_inputs, grads.key_inputs);
  grads.query_inputs = columns_of(grads.query_inputs, Columns::score_query);
  grads.key_inputs = columns_of(grads.key_inputs, Columns::score_key);
  sums.take_gradients(grads.query_inputs, grads.key_inputs);
}

template <class Op>
void Door<Op>::forward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                       const Outputs<Real>& outputs, Saved<Real>* saved, const Options& options) {
  const std::string where = door_name("heed::forward", options.name);
  if (saved) saved->stamp = {};
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  check_outputs(op, outputs, g, in, mask, where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  WidenedTensors<Real> copies(options.threads);
  Operands<Real> operands{copies.read(in.query), in.key, in.value, copies.read(in.extra)};
  if constexpr (Op::ReadoutType::uses_own_rows) {  // which need not lie in the tile at hand
    operands.key = copies.read(in.key);
    operands.value = copies.read(in.value);
  }
  [[maybe_unused]] const auto inputs = take_inputs(op, g, in, copies, options, operands);
  const OutputOperands<Real> wide{copies.write(outputs.out), copies.write(outputs.lse),
                                  copies.write(outputs.steps)};
  const bool folds = heads_fold(op, g, mask, bound, options.dropout);
  // Of copies of keys, and of heads that are folded in this call alone, nothing can be kept.
  const bool others = Op::ReadoutType::uses_own_rows ||
                      (folds && in.key_features && SideNeeds<Op>(op, g).per_query_head);
  KeyFeatures<Real>* kept = others ? nullptr : in.key_features;
  const auto run = [&](const Op& as, Saved<Real>* to) {
    if (!folds) return run_forward<Op, Real>(as, g, operands, bound, wide, to, options, kept);
    const Geometry folded = fold_heads(g);
    const Mask<Real> folded_mask = fold_heads(mask, bound, g);
    Operands<Real> folded_operands = operands;
    folded_operands.query = fold_heads(operands.query, g);
    folded_operands.extra = fold_heads(operands.extra, g);
    run_forward<Op, Real>(
        as, folded, folded_operands, BoundMask<Real>(folded_mask, folded, where.c_str()),
        {fold_heads(wide.out, g), fold_heads(wide.lse, g), fold_heads(wide.steps, g)}, to,
        fold_heads(options), kept);
  };
  const auto rehearse = [&] {
    Op first = op;
    if constexpr (Op::ReadoutType::rehearses) first.readout = op.readout.rehearsal();
    Saved<Real> reports;
    run(first, &reports);
    return reports;
  };
  with_settled(op, rehearse, [&](const Op& settled) { run(settled, saved); });
  copies.round();
  if (saved) saved->stamp = CallStamp::of<Op>(g, mask, scale_of(op, g, options), options);
}

template <class Op>
void Door<Op>::backward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                        const Saved<Real>& saved, const StoredView<const Real>& out,
                        const OutputGradients<Real>& output, const Gradients<Real>& grads,
                        Op* grad_op, const Options& options) {
  const std::string where = door_name("heed::backward", options.name);
  require_options<Real>(options, where);
  const Geometry g = geometry_of(op, in, where);
  require_one_piece(in.key, "key", where);
  require_one_piece(in.value, "value", where);
  const BoundMask<Real> bound(mask, g, where.c_str(), options.threads);
  const Shape out_shape{g.batch, g.heads, g.len_q, g.dim_v};
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
    require_shape(output.steps, steps_shape(op, g), "grad_steps", where);
  }
  check_gradients(grads, in, mask, out, output, where);
  check_saved<Op>(saved, CallStamp::of<Op>(g, mask, scale_of(op, g, options), options), where);

  WidenedTensors<Real> copies(options.threads);
  Operands<Real> operands{copies.read(in.query), copies.read(in.key), copies.read(in.value),
                          copies.read(in.extra)};
  [[maybe_unused]] const auto inputs = take_inputs(op, g, in, copies, options, operands);
  const OutputGradientOperands<Real> wide{copies.read(out), copies.read(output.out),
                                          copies.read(output.lse), copies.read(output.steps)};
  GradientOperands<Real> wide_grads{copies.write(grads.query),     copies.write(grads.key),
                                    copies.write(grads.value),     copies.write(grads.extra),
                                    copies.write(grads.bias),      copies.write(grads.query_inputs),
                                    copies.write(grads.key_inputs)};
  if constexpr (InputColumns<Op>::any) take_input_gradients<Op>(*inputs, wide_grads);
  with_settled(
      op, [&]() -> const Saved<Real>& { return saved; },
      [&](const Op& settled) {
        run_backward(settled, g, operands, bound, saved, wide, wide_grads, grad_op, options);
      });
  if constexpr (InputColumns<Op>::any) inputs->chain();
  copies.round();
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
