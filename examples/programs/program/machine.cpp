// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <fstream>
#include <sstream>
#include <thread>

namespace heed_program {

namespace {

// A field of the first processor in the text of /proc/cpuinfo; "unknown" if it is missing.
[[nodiscard]] std::string field_of(const std::string& cpuinfo, const std::string& name) {
  std::istringstream lines(cpuinfo);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(':'), end = line.find_last_not_of(" \t", colon - 1),
                      start = line.find_first_not_of(" \t", colon + 1);
    if (colon == std::string::npos || start == std::string::npos) continue;
    if (line.substr(0, end + 1) == name) return line.substr(start);
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

// Features that the compiler was allowed to use, from its own macros.
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

std::string machine_kind(const std::string& cpuinfo) {
  const std::string vendor = field_of(cpuinfo, "vendor_id"),
                    family = field_of(cpuinfo, "cpu family"), model = field_of(cpuinfo, "model"),
                    flags = " " + field_of(cpuinfo, "flags") + " ";
  const auto has = [&](const char* flag) { return flags.find(flag) != std::string::npos; };
  const bool wide = has(" avx512f ");
  const std::string widest = wide             ? " (AVX-512)"
                             : has(" avx2 ")  ? " (AVX2)"
                             : has(" avx ")   ? " (AVX)"
                             : has(" sse2 ")  ? " (SSE2)"
                             : has(" asimd ") ? " (NEON)"
                                              : "";
  // Zen 4 shares its family with Zen 3, which has no AVX-512.
  if (vendor == "AuthenticAMD" && family == "25") return (wide ? "Zen 4" : "Zen 3") + widest;
  if (vendor == "AuthenticAMD" && family == "26") return "Zen 5" + widest;
  if (vendor == "GenuineIntel" && family == "6" && model == "207") return "Emerald Rapids" + widest;
  if (vendor == "GenuineIntel" && family == "6" && model == "106") return "Ice Lake" + widest;
  return vendor + " family " + family + " model " + model + widest;
}

Machine this_machine() {
  const unsigned cores = std::thread::hardware_concurrency();
  std::ostringstream info;
  info << std::ifstream("/proc/cpuinfo").rdbuf();
  return {field_of(info.str(), "model name"), machine_kind(info.str()), compiler_name(),
          compile_flags(), cores > 0 ? int(cores) : 1};
}

}  // namespace heed_program
