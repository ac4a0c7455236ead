// SPDX-License-Identifier: Apache-2.0
#pragma once

// HEED_ABI is the inline namespace around all of heed. It names the class of instruction set, and whether OpenMP is
// on, so that both are part of every symbol. Files that were compiled for different classes then share no inline
// function: of two with equal names the linker would keep either one, which may be code that the other file's
// processor does not have.

// heed cannot be compiled with the settings below. Each prints a sentence and includes a file that
// does not exist, which ends the compilation before the errors that would follow.
#if __cplusplus < 202002L && !(defined(_MSVC_LANG) && _MSVC_LANG >= 202002L)
#error "heed is written in C++20: build with -std=c++20 or later"
#include "heed stops here"
#elif !defined(__cpp_exceptions)
#error "heed throws exceptions: build without -fno-exceptions"
#include "heed stops here"
#elif defined(_MSC_VER) && !defined(__clang__)
#error "heed needs g++ or clang: in place of MSVC's own compiler take clang-cl"
#include "heed stops here"
#elif defined(__MINGW32__) && !defined(__clang__) && defined(__AVX__)
#error "g++ for Windows misplaces AVX's vectors on the stack: build with clang, or without AVX"
#include "heed stops here"
#endif

#include <cstddef>

// Hidden pairs are marked by -infinity, and results have the same bits for any number of threads only while the
// compiler keeps the order of additions. Flags that let it assume otherwise are refused.
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "heed relies on NaN and infinity: build without -ffast-math, -Ofast and -ffinite-math-only"
#endif
#if defined(__ASSOCIATIVE_MATH__)
#error \
    "heed relies on the order of operations: build without -funsafe-math-optimizations and -fassociative-math"
#endif

#if defined(__AVX512BF16__)
#define HEED_ISA v0_1_avx512bf16
#elif defined(__AVX512F__)
#define HEED_ISA v0_1_avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define HEED_ISA v0_1_avx2
#elif defined(__AVX__)
#define HEED_ISA v0_1_avx
#elif defined(__SSE2__)
#define HEED_ISA v0_1_sse2
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HEED_ISA v0_1_neonbf16
#elif defined(__aarch64__)
#define HEED_ISA v0_1_neon
#else
#define HEED_ISA v0_1_generic
#endif

#define HEED_JOIN_NOW(a, b) a##_##b
#define HEED_JOIN(a, b) HEED_JOIN_NOW(a, b)
#define HEED_TEXT_NOW(a) #a
#define HEED_TEXT(a) HEED_TEXT_NOW(a)
#if defined(_OPENMP)
#define HEED_ABI HEED_JOIN(HEED_ISA, openmp)
#else
#define HEED_ABI HEED_JOIN(HEED_ISA, serial)
#endif

namespace heed {
inline namespace HEED_ABI {

// Every extent, stride and index. Signed, so that a difference of positions is a number.
using Index = std::ptrdiff_t;

namespace detail {

// The instruction set that the headers are compiled for, in words.
[[nodiscard]] constexpr const char* instruction_set() {
#if defined(__AVX512BF16__)
  return "AVX-512 with BF16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "AVX2 with FMA";
#elif defined(__AVX__)
  return "AVX";
#elif defined(__aarch64__) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return "NEON with BF16";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "128-bit registers";
#endif
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
