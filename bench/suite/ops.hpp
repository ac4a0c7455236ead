// SPDX-License-Identifier: Apache-2.0
#pragma once

// One variant as benchmarks: its call, and its comparison with the slow twin.

#include "suite.hpp"

#include <heed/engine/backward_call.hpp>
#include <heed/reference/reference.hpp>
#include <heed/variants.hpp>

#include <memory>
#include <vector>

namespace heed_bench {

template <class T>
std::vector<T> normals(Index count, std::uint64_t stream) {
  const heed::CounterRandom random(7, stream);
  std::vector<T> x;
  for (Index i = 0; i < count; ++i) x.push_back(T(random.normal(std::uint64_t(i))));
  return x;
}

// Inputs, outputs and gradients of one op.
template <class Op>
class Call {
 public:
  using T = typename Op::Scalar;

  Call(const Op& op, const heed::Geometry& g, bool causal) : op_(op), grad_(op), g_(g) {
    if (causal) mask_ = heed::causal<T>();
    const heed::Shape q{g.batch, g.query_heads, g.len_q, g.dim_qk};
    const heed::Shape k{g.batch, g.kv_heads, g.len_kv, g.dim_qk};
    const heed::Shape v{g.batch, g.kv_heads, g.len_kv, g.dim_v};
    const heed::Shape extra{g.batch, g.heads, g.len_q, op.extra_dim(g)};
    shape_ = {g.batch, g.heads, g.len_q, g.dim_v};
    in_ = {input(0, q), input(1, k), input(2, v), {}};
    grads_ = {output(0, q), output(1, k), output(2, v), {}, {}};
    if (extra.dim > 0) {
      in_.extra = input(3, extra);
      grads_.extra = output(3, extra);
    }
    grad_out_ = input(4, shape_);
    out_ = output(4, shape_);
  }

  void forward() { heed::forward(op_, in_, mask_, out_, &saved_); }
  void backward() {
    heed::backward(op_, in_, mask_, saved_, heed::TensorView<const T>(out_), grad_out_, grads_,
                   &grad_);
  }

  // Largest difference from the slow twin, relative to the largest number, over out and dq, dk, dv.
  double deviation_from_twin() {
    forward();
    backward();
    heed::reference::Problem<T> problem;
    problem.geometry = g_;
    problem.query = numbers_[0];
    problem.key = numbers_[1];
    problem.value = numbers_[2];
    problem.extra = numbers_[3];
    heed::reference::use_mask(problem, mask_);
    const auto out = heed::reference::forward(op_, problem).out;
    const auto slow = heed::reference::gradients(op_, problem, numbers_[4]);
    return std::max({deviation(results_[4], out), deviation(results_[0], slow.dquery),
                     deviation(results_[1], slow.dkey), deviation(results_[2], slow.dvalue)});
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
  static double deviation(const std::vector<T>& a, const std::vector<T>& b) {
    double error = 0, top = 0;
    for (std::size_t i = 0; i < b.size(); ++i) {
      top = std::max(top, std::abs(double(b[i])));
      const double e = std::abs(double(a[i]) - double(b[i]));
      if (!(e <= error)) error = e;
    }
    return error / top;
  }

  Op op_, grad_;
  heed::Geometry g_;
  heed::Mask<T> mask_;
  heed::Shape shape_;
  std::vector<T> numbers_[5], results_[5];
  heed::Inputs<T> in_;
  heed::Gradients<T> grads_;
  heed::TensorView<T> out_;
  heed::TensorView<const T> grad_out_;
  heed::Saved<T> saved_;
};

[[nodiscard]] inline heed::Geometry geometry(const BenchShape& s) {
  return {1, s.heads, s.heads, s.heads, s.len, s.len, s.dim, s.dim};
}


// Runs one benchmark: compare first, then time.
template <class Op>
void run(benchmark::State& state, const heed::Variant<Op>& variant, const BenchShape& s,
         bool backward) {
  using T = typename Op::Scalar;
  heed::Geometry small = variant.geometry;
  small.len_q = small.len_kv = 70;
  const double error = Call<Op>(variant.op, small, s.causal).deviation_from_twin();
  if (!(error < (sizeof(T) == 4 ? 1e-3 : 1e-10))) {
    state.SkipWithError(("differs from the slow twin by " + std::to_string(error)).c_str());
    return;
  }
  Call<Op> call(variant.op, variant.geometry, s.causal);
  call.forward();
  for (auto _ : state) {
    if (backward)
      call.backward();
    else
      call.forward();
  }
  report_rate(state, s, backward);
}

template <class T>
void add_variants(const char* dtype) {
  for (const BenchShape& s : kShapes)
    heed::for_each_variant<T>(geometry(s), [&]<class Op>(const heed::Variant<Op>& variant) {
      const auto shared = std::make_shared<heed::Variant<Op>>(variant);
      for (const bool backward : {false, true}) {
        const std::string name = std::string(variant.name) + (backward ? "/backward/" : "/forward/") +
                                 dtype + "/" + s.text();
        configure(benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
          run(state, *shared, s, backward);
        }));
      }
    });
}

}  // namespace heed_bench
