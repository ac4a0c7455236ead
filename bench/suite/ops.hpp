// SPDX-License-Identifier: Apache-2.0
#pragma once

// Variants as benchmarks: their calls, and their comparison with the slow twin.

#include "measure.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/compiled.hpp>

namespace heed_bench {

// Largest difference of a from b, relative to b's largest number; infinite where one of them is NaN.
template <class T, class Wanted>
[[nodiscard]] double deviation(const std::vector<T>& a, const std::vector<Wanted>& b) {
  double error = 0, top = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    top = std::max(top, std::abs(double(b[i])));
    const double e = std::abs(double(a[i]) - double(b[i]));
    error = std::isnan(e) ? heed::kInfinity<double> : std::max(error, e);
    if (std::isinf(error)) return error;
  }
  return error / top;
}

// The mask of a case and the numbers that it reads; a boolean mask hides every eighth pair.
template <class T>
struct CaseMask {
  std::vector<T> numbers;
  std::unique_ptr<bool[]> allowed;
  heed::Mask<T> mask;

  CaseMask(MaskKind kind, const heed::Geometry& g) {
    const heed::Shape pairs{1, 1, g.len_q, g.len_kv};
    const auto count = std::size_t(g.len_q * g.len_kv);
    const heed::CounterRandom random(7, kind == MaskKind::bias ? 6 : 99);
    if (kind == MaskKind::causal) mask = heed::causal<T>();
    if (kind == MaskKind::bias) {
      for (std::size_t i = 0; i < count; ++i) numbers.push_back(T(random.normal(i)));
      mask = heed::bias<T>(heed::TensorView<const T>(numbers.data(), pairs));
    }
    if (kind != MaskKind::boolean) return;
    allowed.reset(new bool[count]);
    for (std::size_t i = 0; i < count; ++i) allowed[i] = random.uniform(i) > 0.125;
    mask = heed::boolean<T>({allowed.get(), pairs});
  }
};

// A call of a case.
template <class Op>
struct CaseCall {
  CaseMask<typename Op::Scalar> mask;
  heed::OpCall<Op> call;

  CaseCall(const Op& op, const heed::Geometry& g, MaskKind kind, int threads)
      : mask(kind, g), call(op, g, mask.mask, {.threads = threads}) {}
};

// Largest difference from the slow twin, relative to the largest number: over out, or dq, dk, dv.
template <class Op>
[[nodiscard]] double deviation_from_twin(heed::OpCall<Op>& call, Pass pass) {
  const auto problem = heed::problem_of<typename Op::Scalar>(call);
  call.forward();
  if (pass == Pass::forward)
    return deviation(call.out, heed::reference::forward(call.op, problem).out);
  call.backward();
  const auto slow = heed::reference::gradients(call.op, problem, call.grad_out);
  return std::max({deviation(call.grad_query, slow.dquery), deviation(call.grad_key, slow.dkey),
                   deviation(call.grad_value, slow.dvalue)});
}

template <class Op>
[[nodiscard]] Contender contender(const Op& op, const heed::Geometry& g, MaskKind mask,
                                  int threads) {
  const auto at = std::make_shared<CaseCall<Op>>(op, g, mask, threads);
  return {[at] { at->call.forward(); }, [at] { at->call.backward(); }};
}

// What the others are compared with: plain attention, and for masks that are read from memory no mask.
template <class T>
[[nodiscard]] Contender baseline(const Case& c) {
  return contender(heed::ScaledDot<T>{}, c.geometry(),
                   c.mask == MaskKind::causal ? c.mask : MaskKind::full, c.threads);
}

// The op on a few rows and one key-value head, against the slow twin.
template <class Op>
[[nodiscard]] double small_deviation(const heed::Variant<Op>& variant, const Case& c, Pass pass) {
  heed::Geometry small = variant.geometry;
  small.len_q = std::min<Index>(small.len_q, 70);
  small.len_kv = 70;
  CaseCall<Op> at(variant.op, small, c.mask, c.threads);
  return deviation_from_twin(at.call, pass);
}

// Compares first, then times.
template <class Op>
void run(benchmark::State& state, const heed::Variant<Op>& variant, const Case& c, Pass pass,
         bool& compared) {
  using T = typename Op::Scalar;
  if (!compared) {
    const double error = small_deviation(variant, c, pass);
    if (!(error < (sizeof(T) == 4 ? 1e-3 : 1e-10))) {
      state.SkipWithError(("differs from the slow twin by " + std::to_string(error)).c_str());
      return;
    }
    compared = true;
  }
  const Contender mine = contender(variant.op, variant.geometry, c.mask, c.threads);
  const bool is_baseline = variant.name == std::string(heed::kBaseline) &&
                           c.mask != MaskKind::boolean && c.mask != MaskKind::bias;
  std::optional<Contender> other;
  if (!is_baseline) other = baseline<T>(c);
  measure<T>(state, c, pass, mine, other ? &*other : nullptr);
}

// Variants that read the key at a query's own position need as many keys as queries.
template <class Op>
[[nodiscard]] bool fits(const heed::Variant<Op>& variant) {
  try {
    variant.op.validate(variant.geometry, "heed_bench");
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

template <class T>
void add_variants(const char* dtype) {
  for (const Case& c : cases()) {
    const auto add = [&]<class Op>(const heed::Variant<Op>& variant) {
      if (!fits(variant)) return;
      const auto shared = std::make_shared<heed::Variant<Op>>(variant);
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        if (c.decodes() && pass == Pass::backward) continue;
        add_benchmark(variant.name, pass, dtype, c,
                      [=, compared = std::make_shared<bool>(false)](benchmark::State& state) {
                        run(state, *shared, c, pass, *compared);
                      });
      }
    };
    heed::for_each_variant<T>(c.geometry(), add);
    heed::ResonantOde<T> eight;
    eight.normaliser.steps = 8;
    add(heed::Variant<heed::ResonantOde<T>>{"ode-8", "8 steps", c.geometry(), eight});
  }
}

}  // namespace heed_bench
