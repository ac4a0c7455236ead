// SPDX-License-Identifier: Apache-2.0
// Counts how often a layer starts and ends its threads. Each time it waits for the slowest of them,
// which costs time when other programs need the processors, too.

#include "catch.hpp"

#include <heed/compiled.hpp>
#include <heed/nn/projected_attention.hpp>

#include <atomic>

#if defined(_OPENMP) && defined(__GNUC__) && !defined(__clang__)

#include <dlfcn.h>

namespace {
std::atomic<int> regions{0};
}

// g++ calls this for every parallel region; it counts and goes on to the function of the same name in libgomp.
extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
  using Function = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto next = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "GOMP_parallel"));
  ++regions;
  next(body, data, threads, flags);
}

using namespace heed;

TEST_CASE("an attention layer has three parallel regions forward and eight backward") {
  nn::ProjectedAttention<ScaledDot<float>> layer(nn::AttentionOptions::even(256, 4), {},
                                                 causal<float>());
  nn::Context<float> c;
  c.threads = 2;
  nn::Matrix<float> x(1024, 256), y(1024, 256), dx(1024, 256);
  x.fill(0.5F);
  regions = 0;
  layer.forward(c, 2, std::as_const(x).view(), y.view());
  CHECK(regions == 3);
  regions = 0;
  layer.backward(c, 2, std::as_const(x).view(), std::as_const(y).view(), dx.view());
  CHECK(regions == 8);
}

#else

TEST_CASE("an attention layer has three parallel regions forward and eight backward") {
  WARN("skipped: regions are counted with g++ and its OpenMP alone");
}

#endif
