// SPDX-License-Identifier: Apache-2.0
#pragma once

// Variants as benchmarks: their calls, and their comparison with the slow twin.

#include "measure.hpp"

#include <heed/attention.hpp>
#include <heed/compiled.hpp>
#include <heed/reference/reference.hpp>
#include <heed/variants.hpp>

namespace heed_bench {

// Normal numbers; beyond a million they repeat.
template <class T>
std::vector<T> normals(Index count, std::uint64_t stream) {
  const heed::CounterRandom random(7, stream);
  constexpr std::size_t distinct = 1 << 20;
  std::vector<T> x(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = i < distinct ? T(random.normal(i)) : x[i - distinct];
  return x;
}

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

// Inputs, outputs and gradients of one op.
template <class Op>
class Call {
 public:
  using T = typename Op::Scalar;

  Call(const Op& op, const heed::Geometry& g, MaskKind mask, int threads)
      : op_(op), grad_(op), g_(g) {
    options_.threads = threads;
    const heed::Shape q{g.batch, g.query_heads, g.len_q, g.dim_qk};
    const heed::Shape k{g.batch, g.kv_heads, g.len_kv, g.dim_qk};
    const heed::Shape v{g.batch, g.kv_heads, g.len_kv, g.dim_v};
    const heed::Shape extra{g.batch, g.heads, g.len_q, op.extra_dim(g)};
    shape_ = {g.batch, g.heads, g.len_q, g.dim_v};
    in_ = {input(0, q), input(1, k), input(2, v), {}};
    if (extra.dim > 0) in_.extra = input(3, extra);
    grad_out_ = input(4, shape_);
    out_ = output(4, shape_);
    use_mask(mask);
  }
  Call(const Call&) = delete;  // views

  void forward() { heed::forward(op_, in_, mask_, out_, &saved_, options_); }
  void backward() {
    if (!grads_.query.given()) take_gradients();
    heed::backward(op_, in_, mask_, saved_, heed::TensorView<const T>(out_), grad_out_, grads_,
                   &grad_, options_);
  }

  // Largest difference from the slow twin, relative to the largest number: over out, or dq, dk, dv.
  double deviation_from_twin(Pass pass) {
    forward();
    heed::reference::Problem<T> problem;
    problem.geometry = g_;
    problem.query = numbers_[0];
    problem.key = numbers_[1];
    problem.value = numbers_[2];
    problem.extra = numbers_[3];
    heed::reference::use_mask(problem, mask_);
    if (pass == Pass::forward)
      return deviation(results_[4], heed::reference::forward(op_, problem).out);
    backward();
    const auto slow = heed::reference::gradients(op_, problem, numbers_[4]);
    return std::max({deviation(results_[0], slow.dquery), deviation(results_[1], slow.dkey),
                     deviation(results_[2], slow.dvalue)});
  }

 private:
  heed::TensorView<const T> input(std::size_t i, const heed::Shape& s) {
    numbers_[i] = normals<T>(heed::element_count(s, "heed_bench"), i + 1);
    return {numbers_[i].data(), s};
  }
  heed::TensorView<T> output(std::size_t i, const heed::Shape& s) {
    results_[i].resize(std::size_t(heed::element_count(s, "heed_bench")));
    return {results_[i].data(), s};
  }
  void take_gradients() {
    grads_ = {output(0, in_.query.shape()),
              output(1, in_.key.shape()),
              output(2, in_.value.shape()),
              {},
              {}};
    if (in_.extra.given()) grads_.extra = output(3, in_.extra.shape());
    if (mask_.bias.given()) grads_.bias = output(5, {1, 1, g_.len_q, g_.len_kv});
  }
  // A boolean mask hides every eighth pair.
  void use_mask(MaskKind kind) {
    const heed::Shape pairs{1, 1, g_.len_q, g_.len_kv};
    const Index count = g_.len_q * g_.len_kv;
    if (kind == MaskKind::causal) mask_ = heed::causal<T>();
    if (kind == MaskKind::bias) mask_ = heed::bias<T>(input(5, pairs));
    if (kind != MaskKind::boolean) return;
    allowed_.reset(new bool[std::size_t(count)]);
    const heed::CounterRandom random(7, 99);
    for (Index i = 0; i < count; ++i)
      allowed_[std::size_t(i)] = random.uniform(std::uint64_t(i)) > 0.125;
    mask_ = heed::boolean<T>({allowed_.get(), pairs});
  }
  Op op_, grad_;
  heed::Geometry g_;
  heed::Options options_;
  heed::Mask<T> mask_;
  heed::Shape shape_;
  std::vector<T> numbers_[6], results_[6];
  std::unique_ptr<bool[]> allowed_;
  heed::Inputs<T> in_;
  heed::Gradients<T> grads_;
  heed::TensorView<T> out_;
  heed::TensorView<const T> grad_out_;
  heed::Saved<T> saved_;
};

template <class Op>
[[nodiscard]] Contender contender(const Op& op, const heed::Geometry& g, MaskKind mask,
                                  int threads) {
  const auto call = std::make_shared<Call<Op>>(op, g, mask, threads);
  return {[call] { call->forward(); }, [call] { call->backward(); }};
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
  return Call<Op>(variant.op, small, c.mask, c.threads).deviation_from_twin(pass);
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
  const bool is_baseline = variant.name == std::string("sdpa") && c.mask != MaskKind::boolean &&
                           c.mask != MaskKind::bias;
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
