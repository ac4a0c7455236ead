// SPDX-License-Identifier: Apache-2.0
#pragma once

// Translation units compiled for different instruction sets must not share inline functions: the
// linker would keep one of them at random; nor must those with threads and those without. HEED_ABI names
// the class of instruction set, and OpenMP, in every symbol.
#include <cstddef>

// Hidden pairs are marked by -infinity, rounding and the order of additions are part of every promise.
#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "heed relies on NaN and infinity: build without -ffast-math, -Ofast and -ffinite-math-only"
#endif
#if defined(__ASSOCIATIVE_MATH__)
#error \
    "heed relies on the order of operations: build without -funsafe-math-optimizations and -fassociative-math"
#endif

#if defined(__AVX512F__)
#define HEED_ISA v0_1_avx512
#elif defined(__AVX2__) && defined(__FMA__)
#define HEED_ISA v0_1_avx2
#elif defined(__AVX__)
#define HEED_ISA v0_1_avx
#elif defined(__SSE2__)
#define HEED_ISA v0_1_sse2
#elif defined(__aarch64__)
#define HEED_ISA v0_1_neon
#else
#define HEED_ISA v0_1_generic
#endif

#define HEED_JOIN_NOW(a, b) a##_##b
#define HEED_JOIN(a, b) HEED_JOIN_NOW(a, b)
#if defined(_OPENMP)
#define HEED_ABI HEED_JOIN(HEED_ISA, openmp)
#else
#define HEED_ABI HEED_JOIN(HEED_ISA, serial)
#endif

namespace heed {
inline namespace HEED_ABI {

// Every extent, stride and index. Signed, so that a difference of positions is a number.
using Index = std::ptrdiff_t;

}  // namespace HEED_ABI
}  // namespace heed
