// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <fstream>
#include <thread>

namespace compare {

namespace {

[[nodiscard]] std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (line.find(':') != std::string::npos && start != std::string::npos)
      return line.substr(start);
  }
  return "unknown";
}

[[nodiscard]] std::string compiler_name() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "g++ " __VERSION__;
#else
  return "unknown";
#endif
}

// What the compiler was allowed to use, from its own macros.
[[nodiscard]] std::string compile_flags() {
  std::string flags;
#if defined(__AVX512F__)
  flags += "avx512f ";
#endif
#if defined(__AVX512VL__)
  flags += "avx512vl ";
#endif
#if defined(__AVX2__)
  flags += "avx2 ";
#endif
#if defined(__FMA__)
  flags += "fma ";
#endif
#if defined(__AVX__)
  flags += "avx ";
#elif defined(__SSE2__)
  flags += "sse2 ";
#elif defined(__aarch64__)
  flags += "neon ";
#endif
#if defined(__OPTIMIZE__)
  flags += "optimised ";
#else
  flags += "not-optimised ";
#endif
#if defined(NDEBUG)
  flags += "ndebug ";
#endif
#if defined(_OPENMP)
  flags += "openmp";
#else
  flags += "no-openmp";
#endif
  return flags;
}

}  // namespace

const char* missing_instruction_set() {
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
  __builtin_cpu_init();
#if defined(__AVX__)
  if (!__builtin_cpu_supports("avx")) return "AVX";
#endif
#if defined(__AVX2__)
  if (!__builtin_cpu_supports("avx2")) return "AVX2";
#endif
#if defined(__FMA__)
  if (!__builtin_cpu_supports("fma")) return "FMA";
#endif
#if defined(__BMI2__)
  if (!__builtin_cpu_supports("bmi2")) return "BMI2";
#endif
#if defined(__AVX512F__)
  if (!__builtin_cpu_supports("avx512f")) return "AVX-512F";
#endif
#if defined(__AVX512DQ__)
  if (!__builtin_cpu_supports("avx512dq")) return "AVX-512DQ";
#endif
#if defined(__AVX512BW__)
  if (!__builtin_cpu_supports("avx512bw")) return "AVX-512BW";
#endif
#if defined(__AVX512VL__)
  if (!__builtin_cpu_supports("avx512vl")) return "AVX-512VL";
#endif
#if defined(__AVX512VBMI__)
  if (!__builtin_cpu_supports("avx512vbmi")) return "AVX-512VBMI";
#endif
#endif
  return nullptr;
}

Machine this_machine() {
  const unsigned cores = std::thread::hardware_concurrency();
  return {processor_name(), compiler_name(), compile_flags(), cores > 0 ? int(cores) : 1};
}

}  // namespace compare
