// SPDX-License-Identifier: Apache-2.0
#pragma once

// The list of variants. A line in for_each_variant() puts a variant into every generic test, every benchmark, the
// comparison and heed_lm; an op with a type of its own is also in BuiltIn, from which heed::compiled is made.

#include <heed/core/random.hpp>
#include <heed/engine/key_choice.hpp>
#include <heed/mask/mask.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/prototype.hpp>
#include <heed/ops/resonant_ode.hpp>
#include <heed/ops/scaled_dot.hpp>

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

template <class... Ops>
struct OpList {
  static constexpr std::size_t size = sizeof...(Ops);
  template <class Op>
  static constexpr bool contains = (std::is_same_v<Op, Ops> || ...);
};

// The types of the list, whose code heed::compiled holds.
template <class Real>
using BuiltIn = OpList<ScaledDot<Real>, Dar<Real>, Differential<Real>, DifferentialV1<Real>,
                       DifferentialV2<Real>, IntentGated<Real>, IntentFromQ<Real>, IntentCalc<Real>,
                       ResonantOde<Real>, Dialectical<Real>, Prototype<Real>>;

// The variant with which others are compared: plain attention.
inline constexpr const char* kBaseline = "sdpa";

// Requirements of a variant on the sizes of a call, beside those of its readout (uses_own_rows):
// forward() throws for other sizes. Also the meaning of Saved::lse, and of the variant's mask.
struct VariantTraits {
  bool even_dim_qk = false;   // it reads halves of a head
  bool equal_widths = false;  // dim_v is dim_qk
  bool lse_of_scores = true;  // false: lse is that of the normaliser's last softmax
  bool reads_later_keys =
      false;  // the variant's own mask shows later keys; a causal mask would change the variant
};

// One entry of the list: an op ready to run on `geometry`.
template <class Op>
struct Variant {
  const char* name;
  const char* settings;  // options that are no parameters, with the defaults of VariantOptions
  Geometry geometry;     // the variant's sizes: V2 has twice the query heads at half the width
  Op op;
  VariantTraits traits = {};
  // The mask that is a part of the variant, for calls of these sizes; null: none. Throws std::invalid_argument for sizes
  // without a mask. The mask of a variant that does not read later keys depends on no length, so that a layer may have it.
  Mask<typename Op::Scalar> (*mask)(const Geometry&) = nullptr;
  // The keys that the queries of a call choose, for variants in which they do.
  KeyChoice<typename Op::Scalar> choose = nullptr;

  // The caller's mask, joined with the variant's own if it has one.
  [[nodiscard]] Mask<typename Op::Scalar> mask_with(Mask<typename Op::Scalar> callers,
                                                    const Geometry& sizes) const {
    return mask == nullptr ? callers : std::move(callers) & mask(sizes);
  }
};

// Options of the list's ops.
struct VariantOptions {
  Index prototypes = 16;   // per head
  std::uint64_t seed = 1;  // seed of parameters that are tensors
  Index depth = 1;         // number of the layer, from 1; differential V1's lambda depends on it
};

// Sizes that every variant takes.
inline constexpr Geometry kSmallSizes{.batch = 1,
                                      .heads = 2,
                                      .query_heads = 2,
                                      .kv_heads = 2,
                                      .len_q = 1,
                                      .len_kv = 1,
                                      .dim_qk = 4,
                                      .dim_v = 4};

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

// The op changed by `change`.
template <class Op, class Change>
[[nodiscard]] Op with(Op op, Change&& change) {
  change(op);
  return op;
}

}  // namespace detail

// Calls f(Variant<Op>) for every variant, with its defaults. `g` is the baseline's geometry. Halves
// of an odd width are rounded down, but not below 1, and their ops refuse it.
template <class Real, class F>
void for_each_variant(const Geometry& g, F&& f, const VariantOptions& options = {}) {
  const auto add = [&]<class Op>(const char* name, const char* settings, const Geometry& geometry,
                                 Op op, const VariantTraits& traits = {}) {
    static_assert(BuiltIn<Real>::template contains<Op>,
                  "heed: the op of a variant of the list must stand in BuiltIn");
    detail::fill_tensors(op, options.seed);
    f(Variant<Op>{name, settings, geometry, std::move(op), traits, nullptr, nullptr});
  };
  Geometry pairs = g;  // differential V2: as many q.k products as the baseline
  pairs.query_heads = 2 * g.heads;
  pairs.dim_qk = std::max<Index>(1, g.dim_qk / 2);

  using detail::with;
  add(kBaseline, "", g, ScaledDot<Real>{});
  add("dar", "static logistic gate", g, Dar<Real>{});
  add("dar-unrolled", "2 iterations", g,
      with(Dar<Real>{}, [](auto& op) { op.score.iterations = 2; }));
  add("dar-converged", "fixed point", g, with(Dar<Real>{}, [](auto& op) {
        op.score.converged = true;
        op.score.feedback = Real(0.4);
      }));
  add("differential", "halves of a head", g, Differential<Real>{}, {.even_dim_qk = true});
  add("differential-v1", "depth 1, RMS norm", g,
      with(make_differential_v1<Real>(pairs.dim_qk, options.depth),
           [&](auto& op) {
             std::uint64_t stream = 0;  // the source starts from small random vectors
             visit_parameters(op.normaliser, [&](const char*, auto& p) {
               const CounterRandom random(options.seed, 100 + stream++);
               for (Index i = 0; i < p.size(); ++i)
                 p[i] = Real(0.1 * random.normal(std::uint64_t(i)));
             });
           }),
      {.even_dim_qk = true, .equal_widths = true});
  add("differential-v2", "2H query heads of half width", pairs, DifferentialV2<Real>{});
  add("intent", "gate given", g, IntentGated<Real>{});
  add("intent-from-q", "gate q Wg", g, make_intent_from_q<Real>(g));
  add("intent-calculated", "gate q Wq + k Wk + v Wv", g, make_intent_calculated<Real>(g));
  add("ode", "5 steps", g, ResonantOde<Real>{}, {.lse_of_scores = false});
  add("ode-equilibrium", "fixed point", g,
      with(ResonantOde<Real>{}, [](auto& op) { op.normaliser.mode = FlowMode::equilibrium; }),
      {.lse_of_scores = false});
  add("dialectical", "3 steps, halting per token", g, make_dialectical<Real>(g),
      {.equal_widths = true});
  add("prototype", "winner by cosine", g, make_prototype<Real>(g, options.prototypes),
      {.equal_widths = true});
}

// The names of all variants, in the order of the list.
[[nodiscard]] inline std::vector<std::string> variant_names() {
  std::vector<std::string> names;
  for_each_variant<float>(kSmallSizes, [&](const auto& variant) { names.push_back(variant.name); });
  return names;
}

}  // namespace HEED_ABI
}  // namespace heed
