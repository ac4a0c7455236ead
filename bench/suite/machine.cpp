// SPDX-License-Identifier: Apache-2.0
#include "machine.hpp"

#include <heed/simd/few_products.hpp>

#include <benchmark/benchmark.h>

template double heed::peak_flops<float>(int);
template double heed::peak_flops<double>(int);

namespace heed_bench {
namespace {

// Makes the compiler compute every number of `sums`, yet leaves them in registers until then.
template <class P, std::size_t N>
void keep(const P (&sums)[N]) {
  P total = sums[0];
  for (std::size_t i = 1; i < N; ++i) total += sums[i];
  benchmark::DoNotOptimize(total);
}

}  // namespace

void ReadProbe::read(int worker) const {
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

}  // namespace heed_bench
