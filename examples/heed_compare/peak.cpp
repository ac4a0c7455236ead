// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <heed/core/parallel.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <chrono>

namespace compare {

namespace {

using Clock = std::chrono::steady_clock;

// More chains of multiply-adds than latency (4) times units (2) of common processors, and few
// enough for 16 registers.
constexpr int kChains = 12;

// Runs `steps` multiply-adds on each chain. Returns their sum, so that the compiler cannot leave them out.
template <class T>
[[nodiscard]] T multiply_add(Index steps, T factor, T term) {
  using Vector = typename heed::Pack<T>::Vector;
  const Vector a = heed::Pack<T>(factor).v, b = heed::Pack<T>(term).v;
  Vector sums[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = heed::Pack<T>(T(i)).v;
  for (Index step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = heed::fused_multiply_add(sums[i], a, b);
  }
  heed::Pack<T> total = T(0);
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) total += heed::Pack<T>(sums[i]);
  return heed::sum_lanes(total);
}

// Waits until all threads have come, at most 100 ms: OpenMP may give fewer than were asked for. A thread that has a core
// of its own spins instead of yielding: on a busy machine it would get the core back too late.
void meet(std::atomic<int>& missing, bool yields) {
  const Clock::time_point latest = Clock::now() + std::chrono::milliseconds(100);
  missing.fetch_sub(1);
  while (missing.load() > 0 && Clock::now() < latest)
    if (yields) std::this_thread::yield();
}

struct Span {
  Clock::time_point begin, end;
  bool ran = false;
};

// The rate of all threads together, from the first one's begin to the last one's end.
[[nodiscard]] double gflops(const std::vector<Span>& spans, double flops_per_thread) {
  Clock::time_point begin = Clock::time_point::max(), end = Clock::time_point::min();
  double flops = 0;
  for (const Span& span : spans) {
    if (!span.ran) continue;
    begin = std::min(begin, span.begin);
    end = std::max(end, span.end);
    flops += flops_per_thread;
  }
  return flops / std::chrono::duration<double>(end - begin).count() * 1e-9;
}

template <class T>
[[nodiscard]] double measure_once(int threads, Index steps) {
  std::atomic<int> missing{threads};
  const bool crowded = unsigned(threads) > std::thread::hardware_concurrency();
  std::vector<Span> spans(std::size_t(threads), Span{});
  volatile T factor = T(0.5), term = T(1);  // a sum moves to 2: no overflow, no denormal number
  heed::run_workers(threads, [&](int worker) {
    Span& span = spans[std::size_t(worker)];
    meet(missing, crowded);
    span.begin = Clock::now();
    volatile T result = multiply_add<T>(steps, factor, term);
    (void)result;
    span.end = Clock::now();
    span.ran = true;
  });
  return gflops(spans, 2.0 * kChains * heed::kLanes<T> * double(steps));
}

template <class T>
[[nodiscard]] double measure(int threads) {
  constexpr Index steps = 200'000;  // 1.2 ms at 2 GHz and one multiply-add a cycle
  double best = 0;
  for (int i = 0; i < 16; ++i) best = std::max(best, measure_once<T>(threads, steps));
  return best;
}

}  // namespace

double measure_peak(Dtype dtype, int threads) {
  return dtype == Dtype::float32 ? measure<float>(threads) : measure<double>(threads);
}

}  // namespace compare
