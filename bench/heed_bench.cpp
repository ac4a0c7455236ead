// SPDX-License-Identifier: Apache-2.0

// heed_bench: Google Benchmark over variants x cases x {forward, backward} x {float, double}, with peers
// (plain Eigen; OpenBLAS and libtorch where installed) in the same table. Each benchmark first
// compares a small call with the slow twin or with heed, and reports an error instead of a time when
// they differ. Baseline and machine are measured in turns with each benchmark. See bench/NOTES.md.
//
//   heed_bench                                           usual cases in float
//   heed_bench --benchmark_filter='^dar/forward/float'   any regular expression over the names
//   heed_bench --benchmark_filter='T1x'                  one query against the memory's bandwidth
//   heed_bench --benchmark_repetitions=5 --benchmark_report_aggregates_only=true
//   heed_bench --benchmark_out=FILE                      JSON, with all counters

#include "peers/peers.hpp"
#include "suite/case.hpp"
#include "suite/report.hpp"
#include "suite/suite.hpp"

#include <cstdio>
#include <cstring>

#include <unistd.h>

namespace {

[[nodiscard]] bool given(int argc, char** argv, const char* option) {
  for (int i = 1; i < argc; ++i)
    if (std::strncmp(argv[i], option, std::strlen(option)) == 0) return true;
  return false;
}

[[nodiscard]] std::string usual_filter() {
  std::string filter = "/float/(";
  for (std::size_t i = 0; i < heed_bench::kUsualCases; ++i)
    filter += (i > 0 ? "|" : "") + heed_bench::cases()[i].text();
  return "--benchmark_filter=" + filter + ")/";
}

}  // namespace

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
#ifdef HEED_BENCH_BLAS
  heed_bench::add_blas();
#endif
#ifdef HEED_BENCH_TORCH
  heed_bench::add_torch();
#endif
  std::string filter = usual_filter();
  std::vector<char*> arguments(argv, argv + argc);
  if (!given(argc, argv, "--benchmark_filter") && !given(argc, argv, "--benchmark_list_tests"))
    arguments.push_back(filter.data());
  int count = int(arguments.size());
  arguments.push_back(nullptr);
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
  // The library's own reporters for --benchmark_format=json or csv.
  heed_bench::TableReporter tables(isatty(STDOUT_FILENO) != 0);
  const std::size_t run =
      given(argc, argv, "--benchmark_format") ? benchmark::RunSpecifiedBenchmarks()
                                              : benchmark::RunSpecifiedBenchmarks(&tables);
  benchmark::Shutdown();
  return run > 0 ? 0 : 1;
}
