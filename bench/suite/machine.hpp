// SPDX-License-Identifier: Apache-2.0
#pragma once

// Bytes that the machine reads per second at this moment, by as many threads as a case uses, all at work. Measured
// between the samples of each benchmark, as the peak is (heed/check/machine_peak.hpp): shared machines drift.

#include <heed/check/stopwatch.hpp>
#include <heed/core/parallel.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/narrow_product.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

namespace heed_bench {

using heed::Index;

// Makes the compiler compute all of `sums`, yet leaves them in registers until then.
template <class P, std::size_t N>
void keep(const P (&sums)[N]) {
  P total = sums[0];
  for (std::size_t i = 1; i < N; ++i) total += sums[i];
  benchmark::DoNotOptimize(total);
}

// Bytes per second read from memory that holds `bytes` in all, read over and over.
class ReadProbe {
 public:
  ReadProbe(double bytes, int threads)
      : numbers_(std::size_t(bytes) / sizeof(float) / kStep * kStep, 1.0F), threads_(threads) {}

  [[nodiscard]] double bytes_per_second() const {
    const double bytes = double(numbers_.size()) * sizeof(float);
    const int passes = std::max(1, int(64e6 / std::max(1.0, bytes)));
    const auto time_of = [&](int count) {
      return heed::seconds_of([&] {
        heed::run_workers(threads_, [&](int worker) {
          for (int pass = 0; pass < count; ++pass) read(worker);
        });
      });
    };
    // As in samples of several calls, the first pass brings into cache what fits.
    if (passes > 1) (void)time_of(1);
    return bytes * passes / time_of(passes);
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
      for (Index i = 0; i < kStep; i += heed::detail::kLine<float, float>)
        heed::detail::prefetch_behind(from + i);
      for (Index i = 0; i < kChains; ++i) sums[i] += P::load(from + i * P::width);
    }
    keep(sums);
  }

  std::vector<float> numbers_;
  int threads_;
};

}  // namespace heed_bench
