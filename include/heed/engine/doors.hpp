// SPDX-License-Identifier: Apache-2.0
#pragma once

// The door of backward; forward comes with it.

#include <heed/engine/backward_walk.hpp>
#include <heed/engine/forward_walk.hpp>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

template <class Real>
void set_zero(const TensorView<Real>& view, int threads) {
  if (!view.given() || !view.has_elements()) return;
  const Shape& s = view.shape();
  parallel_for(s.batch * s.heads, threads, [&](Index unit) {
    for (Index t = 0; t < s.len; ++t) {
      Real* row = view.row(unit / s.heads, unit % s.heads, t);
      std::fill(row, row + s.dim, Real(0));
    }
  });
}

template <class Real>
void check_gradients(const Gradients<Real>& grads, const Inputs<Real>& in, const Mask<Real>& mask,
                     const TensorView<const Real>& out, const TensorView<const Real>& grad_out,
                     const std::string& where) {
  struct Named {
    const TensorView<Real>& view;
    const char* name;
    const TensorView<const Real>& like;
  };
  const Named named[] = {{grads.query, "grad_query", in.query},
                         {grads.key, "grad_key", in.key},
                         {grads.value, "grad_value", in.value},
                         {grads.extra, "grad_extra", in.extra},
                         {grads.bias, "grad_bias", mask.bias}};
  for (const Named& a : named) {
    if (!a.view.given()) continue;
    require(a.like.given(), where, ": ", a.name, " was given, the call has no such input");
    require_output(a.view, a.like.shape(), a.name, where);
    for (const auto& [view, name] : {std::pair{in.query, "query"},
                                     {in.key, "key"},
                                     {in.value, "value"},
                                     {in.extra, "extra"},
                                     {mask.bias, "bias"},
                                     {out, "out"},
                                     {grad_out, "grad_out"}})
      require_apart(a.view, view, a.name, name, where);
    require_apart(a.view, mask.allowed, a.name, "the boolean mask", where);
    for (const Named& b : named)
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
  check(saved.state, Normaliser::streams ? SoftmaxState<Real>::rows * rows : 0, "softmax states");
  check(saved.mixed, Op::ReadoutType::saves_mixed ? rows * g.dim_v : 0, "mixed values");
}

template <class Op>
void Door<Op>::backward(const Op& op, const Inputs<Real>& in, const Mask<Real>& mask,
                        const Saved<Real>& saved, const TensorView<const Real>& out,
                        const TensorView<const Real>& grad_out, const Gradients<Real>& grads,
                        Op* grad_op, const Options& options) {
  using Worker = BackwardWorker<Op, Real>;
  const std::string where = door_name("heed::backward", options.name);
  require_options(options);
  const Geometry g = geometry_of(op, in, where);
  require_one_piece(in.key, "key", where);
  require_one_piece(in.value, "value", where);
  const BoundMask<Real> bound(mask, g, where.c_str());
  const Shape out_shape{g.batch, g.heads, g.len_q, g.dim_v};
  require_shape(out, out_shape, "out", where);
  require_shape(grad_out, out_shape, "grad_out", where);
  check_gradients(grads, in, mask, out, grad_out, where);
  check_saved<Op>(saved, CallStamp::of<Op>(g, mask, scale_of(op, g, options), options.dropout),
                  where);

  KeySide<Op, Real> keys(op, g, in.key);
  const CallContext<Op, Real> c{op,
                                g,
                                bound,
                                in,
                                plan_call<Real>(op, g, bound, options, 0, true),
                                Real(scale_of(op, g, options)),
                                keys,
                                options.dropout};
  BackwardShared<Op, Real> shared(c, saved, out, grad_out, grads);
  const Index units = g.batch * g.heads * c.groups_of(1);
  const Index elements =
      scratch_elements<Real>([&](Scratch<Real>& scratch) { return Worker(c, shared, scratch); });
  const int workers = worker_count(options, g, units, elements * Index(sizeof(Real)));
  keys.build(workers);
  for (const auto& view : {grads.key, grads.value, grads.bias}) set_zero(view, workers);
  if (shared.sums_queries) set_zero(grads.query, workers);
  if (units > 0) {
    std::vector<Scratch<Real>> scratch;
    std::vector<std::unique_ptr<Worker>> ready;
    for (int w = 0; w < workers; ++w) {
      scratch.emplace_back(elements);
      ready.push_back(std::make_unique<Worker>(c, shared, scratch.back()));
    }
    Dispenser dispenser(units);
    run_workers(workers, [&](int w) {
      try {
        for (Index unit = dispenser.next(); unit >= 0; unit = dispenser.next())
          ready[std::size_t(w)]->run(unit);
      } catch (...) {
        shared.abandon();
        throw;
      }
    });
    if (grads.key.given())
      keys.chain(shared.dfeatures.data(), shared.dprojected.data(), grads.key, workers);
  }
  if (grad_op) *grad_op = shared.parameter_gradients(c);
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
