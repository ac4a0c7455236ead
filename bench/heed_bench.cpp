// SPDX-License-Identifier: Apache-2.0

// heed_bench: Google Benchmark over variants x shapes x {forward, backward} x {float, double}, with plain
// Eigen matrices as the user's alternative in the same table. Each benchmark first compares a small
// call of its own op with the slow twin, and reports an error instead of a time when they differ.
//
//   heed_bench --benchmark_filter='dar/forward/float' --benchmark_enable_random_interleaving=true

#include "suite/suite.hpp"

#include <cstdio>

int main(int argc, char** argv) {
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f")) {
    std::fprintf(stderr, "heed_bench: built for AVX-512, which this processor does not have\n");
    return 2;
  }
#elif defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2")) {
    std::fprintf(stderr, "heed_bench: built for AVX2, which this processor does not have\n");
    return 2;
  }
#endif
  heed_bench::add_float();
  heed_bench::add_double();
  heed_bench::add_eigen();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
