// SPDX-License-Identifier: Apache-2.0
#pragma once

// Measures the bytes that the machine reads per second at this moment, by as many threads as a case uses, all at work. It
// runs between the samples of each benchmark, as the probe of the peak does (heed/check/machine_peak.hpp), since the speed
// of shared machines drifts. The loops of both are compiled in machine.cpp, at -O3; the files that call them need not be.

#include <heed/check/machine_peak.hpp>
#include <heed/check/stopwatch.hpp>
#include <heed/core/parallel.hpp>
#include <heed/simd/pack.hpp>

#include <algorithm>
#include <vector>

extern template double heed::peak_flops<float>(int);
extern template double heed::peak_flops<double>(int);

namespace heed_bench {

using heed::Index;

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
    // The first pass brings the memory into cache as far as it fits, as in samples of several calls.
    if (passes > 1) (void)time_of(1);
    return bytes * passes / time_of(passes);
  }

 private:
  using P = heed::Pack<float>;
  static constexpr Index kChains = 8, kStep = kChains * P::width;

  void read(int worker) const;

  std::vector<float> numbers_;
  int threads_;
};

}  // namespace heed_bench
