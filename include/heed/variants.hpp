// SPDX-License-Identifier: Apache-2.0
#pragma once

// The list of variants. One line here puts a variant into every test, every benchmark and the
// comparison.

#include <heed/core/random.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/prototype.hpp>
#include <heed/ops/resonant_ode.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <string>
#include <utility>

namespace heed {
inline namespace HEED_ABI {

// One entry of the list: an op ready to run on `geometry`.
template <class Op>
struct Variant {
  const char* name;
  const char* settings;  // options that are no parameters
  Geometry geometry;     // as the variant reads it: V2 has twice the query heads at half the width
  Op op;
};

namespace detail {

// Fills every parameter that is a tensor with normal numbers of standard deviation 1/sqrt(columns); the
// scalars keep their defaults.
template <class Op>
void fill_tensors(Op& op, std::uint64_t seed) {
  using Real = typename Op::Scalar;
  std::uint64_t stream = 0;
  op.visit([&](const char*, auto& param) {
    const CounterRandom random(seed, ++stream);
    if (param.shape().size() < 2) return;
    const double spread = 1.0 / std::sqrt(double(param.shape().back()));
    for (Index i = 0; i < param.size(); ++i)
      param[i] = Real(spread * random.normal(std::uint64_t(i)));
  });
}

// The op after `change`.
template <class Op, class Change>
[[nodiscard]] Op with(Op op, Change&& change) {
  change(op);
  return op;
}

}  // namespace detail

// f(Variant<Op>) for every variant, its defaults, and `prototypes` prototypes per head. `g` is the
// baseline's geometry; halves of an odd width are rounded down, but to 1, and their ops refuse it.
template <class Real, class F>
void for_each_variant(const Geometry& g, F&& f, Index prototypes = 16, std::uint64_t seed = 1) {
  const auto add = [&]<class Op>(const char* name, const char* settings, const Geometry& geometry,
                                 Op op) {
    detail::fill_tensors(op, seed);
    f(Variant<Op>{name, settings, geometry, std::move(op)});
  };
  Geometry pairs = g;  // differential V2: as many q.k products as the baseline
  pairs.query_heads = 2 * g.heads;
  pairs.dim_qk = std::max<Index>(1, g.dim_qk / 2);

  using detail::with;
  add("sdpa", "", g, ScaledDot<Real>{});
  add("dar", "static logistic gate", g, Dar<Real>{});
  add("dar-unrolled", "2 iterations", g,
      with(Dar<Real>{}, [](auto& op) { op.score.iterations = 2; }));
  add("dar-converged", "fixed point", g, with(Dar<Real>{}, [](auto& op) {
        op.score.converged = true;
        op.score.feedback = Real(0.4);
      }));
  add("differential", "halves of a head", g, Differential<Real>{});
  add("differential-v1", "depth 1, RMS norm", g,
      with(make_differential_v1<Real>(pairs.dim_qk, 1), [&](auto& op) {
        std::uint64_t stream = 0;  // the source starts from small random vectors
        visit_parameters(op.normaliser, [&](const char*, auto& p) {
          const CounterRandom random(seed, 100 + stream++);
          for (Index i = 0; i < p.size(); ++i) p[i] = Real(0.1 * random.normal(std::uint64_t(i)));
        });
      }));
  add("differential-v2", "2H query heads of half width", pairs, DifferentialV2<Real>{});
  add("intent", "gate given", g, IntentGated<Real>{});
  add("intent-from-q", "gate q Wg", g, make_intent_from_q<Real>(g));
  add("intent-calculated", "gate q Wq + k Wk + v Wv", g, make_intent_calculated<Real>(g));
  add("ode", "5 steps", g, ResonantOde<Real>{});
  add("ode-equilibrium", "fixed point", g,
      with(ResonantOde<Real>{}, [](auto& op) { op.normaliser.mode = FlowMode::equilibrium; }));
  add("dialectical", "3 steps, halting per token", g, with(Dialectical<Real>{}, [&](auto& op) {
        static_cast<DialecticalParams<Real>&>(op.readout) = DialecticalParams<Real>::zeros(g.dim_v);
      }));
  add("prototype", "winner by cosine", g, make_prototype<Real>(g, prototypes));
}

}  // namespace HEED_ABI
}  // namespace heed
