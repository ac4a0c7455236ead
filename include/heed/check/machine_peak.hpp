// SPDX-License-Identifier: Apache-2.0
#pragma once

// The machine's peak: multiply-adds on registers, by this library's own instructions, on as many threads as a call uses,
// all at work together. The speed of shared machines drifts: a fraction of the peak needs a probe beside each measurement.

#include <heed/check/stopwatch.hpp>
#include <heed/core/parallel.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

namespace detail {

// More chains of multiply-adds than latency (4) times units (2) of common processors, and few enough for 16
// registers. Measured with AVX2 on a Zen processor, in turns: 8 chains lose a tenth, 10 to 14 are equal.
inline constexpr int kPeakChains = 12;

// Runs `steps` multiply-adds on each chain; the result keeps the compiler from leaving them out.
template <class Real>
[[nodiscard]] Real multiply_add_chains(Index steps, Real factor, Real term) {
  using Vector = typename Pack<Real>::Vector;
  const Vector a = Pack<Real>(factor).v, b = Pack<Real>(term).v;
  Vector sums[kPeakChains];
#pragma GCC unroll 12
  for (int i = 0; i < kPeakChains; ++i) sums[i] = Pack<Real>(Real(i)).v;
  for (Index step = 0; step < steps; ++step) {
#pragma GCC unroll 12
    for (int i = 0; i < kPeakChains; ++i) sums[i] = fused_multiply_add(sums[i], a, b);
  }
  Pack<Real> total = Real(0);
#pragma GCC unroll 12
  for (int i = 0; i < kPeakChains; ++i) total += Pack<Real>(sums[i]);
  return sum_lanes(total);
}

// Waits for the other threads, a tenth of a second at most, since OpenMP may give fewer than were asked for. If every
// thread has a core, it does not yield: on a busy machine it would come back too late.
inline void meet(std::atomic<int>& missing, bool yields) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point latest = Clock::now() + std::chrono::milliseconds(100);
  missing.fetch_sub(1);
  while (missing.load() > 0 && Clock::now() < latest)
    if (yields) std::this_thread::yield();
}

}  // namespace detail

// Flops per second that `threads` threads reach together, two per multiply-add; takes about a millisecond.
template <class Real>
[[nodiscard]] double peak_flops(int threads) {
  using Clock = std::chrono::steady_clock;
  struct Span {
    Clock::time_point begin, end;
    bool ran = false;
  };
  constexpr Index steps = 200'000;  // 1.2 ms at 2 GHz and one multiply-add a cycle
  std::atomic<int> missing{threads};
  const bool crowded = unsigned(threads) > std::thread::hardware_concurrency();
  std::vector<Span> spans(std::size_t(threads), Span{});
  // Each sum tends to 2: no overflow, no denormal number.
  const volatile Real factor = Real(0.5), term = Real(1);
  run_workers(threads, [&](int worker) {
    Span& span = spans[std::size_t(worker)];
    detail::meet(missing, crowded);
    span.begin = Clock::now();
    volatile Real result = detail::multiply_add_chains<Real>(steps, factor, term);
    (void)result;
    span.end = Clock::now();
    span.ran = true;
  });
  // From the start of the first thread to the end of the last.
  Clock::time_point begin = Clock::time_point::max(), end = Clock::time_point::min();
  double flops = 0;
  for (const Span& span : spans) {
    if (!span.ran) continue;
    begin = std::min(begin, span.begin);
    end = std::max(end, span.end);
    flops += 2.0 * detail::kPeakChains * double(kLanes<Real>) * double(steps);
  }
  return flops / std::chrono::duration<double>(end - begin).count();
}

}  // namespace HEED_ABI
}  // namespace heed
