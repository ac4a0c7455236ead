// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <benchmark/benchmark.h>
#include <heed/core/geometry.hpp>

#include <string>

namespace heed_bench {

using heed::Index;

// batch 1; key and value have as many heads as the query.
struct BenchShape {
  Index heads, len, dim;
  bool causal;
  [[nodiscard]] std::string text() const {
    return "H" + std::to_string(heads) + "_T" + std::to_string(len) + "_d" + std::to_string(dim) +
           (causal ? "_causal" : "");
  }
};

inline constexpr BenchShape kShapes[] = {
    {4, 512, 64, true}, {4, 2048, 64, false}, {4, 2048, 64, true}, {2, 2048, 128, false}};

// The two products of forward, or the five of backward; causal counts the pairs that are seen.
[[nodiscard]] inline double plain_flops(const BenchShape& s, bool backward) {
  const double n = double(s.len), pairs = s.causal ? n * (n + 1) / 2 : n * n;
  return (backward ? 10.0 : 4.0) * double(s.heads) * pairs * double(s.dim);
}

inline void report_rate(benchmark::State& state, const BenchShape& s, bool backward) {
  state.counters["GFLOP/s"] =
      benchmark::Counter(plain_flops(s, backward) * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

inline void configure(benchmark::internal::Benchmark* bench) {
  bench->Unit(benchmark::kMillisecond)->MinTime(0.1)->UseRealTime();
}

void add_float();
void add_double();
void add_eigen();

}  // namespace heed_bench
