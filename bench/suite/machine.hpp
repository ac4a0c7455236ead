// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the machine can do at this moment: fused multiply-adds and reads per second, by as many threads
// as a case uses, all at work. Measured between the samples of each benchmark, since shared machines
// drift.

#include <heed/core/parallel.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/narrow_product.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace heed_bench {

using heed::Index;

template <class Body>
[[nodiscard]] double seconds(Body&& body) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  body();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Makes the compiler compute all of `sums`, yet leaves them in registers until then.
template <class P, std::size_t N>
void keep(const P (&sums)[N]) {
  P total = sums[0];
  for (std::size_t i = 1; i < N; ++i) total += sums[i];
  benchmark::DoNotOptimize(total);
}

// Flops per second of multiply-adds on registers, by this library's own instructions.
template <class T>
[[nodiscard]] double peak_flops(int threads) {
  using P = heed::Pack<T>;
  constexpr int chains =
      14;  // more than latency times ports; with two operands they fill 16 registers
  constexpr Index rounds = Index(1) << 19;  // a millisecond or two
  const auto work = [](int worker) {
    P sums[chains], factor = T(0.999999), step = T(1e-6) * T(worker + 1);
    for (int i = 0; i < chains; ++i) sums[i] = T(i);
    benchmark::DoNotOptimize(factor);
    benchmark::DoNotOptimize(step);
    for (Index r = 0; r < rounds; ++r)
#pragma GCC unroll 14
      for (int i = 0; i < chains; ++i) sums[i] = mul_add(sums[i], factor, step);
    keep(sums);
  };
  const double time = seconds([&] { heed::run_workers(threads, work); });
  return 2.0 * P::width * chains * double(rounds) * threads / time;
}

// Bytes per second read from memory that holds `bytes` in all, read over and over.
class ReadProbe {
 public:
  ReadProbe(double bytes, int threads)
      : numbers_(std::size_t(bytes) / sizeof(float) / kStep * kStep, 1.0F), threads_(threads) {}

  [[nodiscard]] double bytes_per_second() const {
    const double bytes = double(numbers_.size()) * sizeof(float);
    const int passes = std::max(1, int(16e6 / std::max(1.0, bytes)));
    const double time = seconds([&] {
      heed::run_workers(threads_, [&](int worker) {
        for (int pass = 0; pass < passes; ++pass) read(worker);
      });
    });
    return bytes * passes / time;
  }

 private:
  using P = heed::Pack<float>;
  static constexpr Index kChains = 8, kStep = kChains * P::width;

  void read(int worker) const {
    const Index steps = Index(numbers_.size()) / kStep;
    const float* from = numbers_.data() + steps * worker / threads_ * kStep;
    const float* to = numbers_.data() + steps * (worker + 1) / threads_ * kStep;
    P sums[kChains];
    for (P& sum : sums) sum = 0.0F;
    for (; from < to; from += kStep) {
      for (Index i = 0; i < kStep; i += heed::detail::kLine<float>)
        heed::detail::prefetch_behind(from + i);
      for (Index i = 0; i < kChains; ++i) sums[i] += P::load(from + i * P::width);
    }
    keep(sums);
  }

  std::vector<float> numbers_;
  int threads_;
};

}  // namespace heed_bench
