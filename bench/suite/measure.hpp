// SPDX-License-Identifier: Apache-2.0
#pragma once

// Times a benchmark: its call, the baseline's call and the machine's peak run in turns, so that
// shares and ratios come from the same moments.

#include "case.hpp"
#include "machine.hpp"

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <optional>

namespace heed_bench {

using Action = std::function<void()>;

// The calls of a benchmark; the data live as long as the actions.
struct Contender {
  Action forward, backward;  // needs a forward call before it; may be empty
  double share = 1;          // fraction of the case's products that it computes
  [[nodiscard]] const Action& of(Pass pass) const {
    return pass == Pass::forward ? forward : backward;
  }
};

// Calls of a case in one sample, which then lasts some milliseconds. The number depends on the case
// alone: Google Benchmark wants the same number of calls in each repetition.
[[nodiscard]] inline int calls_per_sample(const Case& c, Pass pass) {
  constexpr double flops = 1e8;
  return std::max(1, int(flops / std::max(1.0, c.flops(pass))));
}

// Time per call, from several calls after one that warms up.
class Sampler {
 public:
  Sampler(const Action& call, int calls) : call_(call), calls_(calls) { call_(); }
  void warm_up() const {
    if (calls_ > 1) call_();
  }
  [[nodiscard]] double sample() const {
    return heed::seconds_of([&] {
             for (int i = 0; i < calls_; ++i) call_();
           }) /
           calls_;
  }

 private:
  const Action& call_;
  int calls_;
};

// Sets the times of iterations so that their mean, which Google Benchmark reports, is the median of the samples.
inline void set_median(benchmark::State& state, const std::vector<double>& times, int calls) {
  const double median = heed::median_of(times);
  double rest = 0;
  for (const double time : times) rest += (median - time) * calls;
  state.SetIterationTime(rest);
}

// Counters  GFLOP/s of the plain products and `peak`, their fraction of the FMA peak of the type; for one query GB/s of
//           keys and values as they are stored, and `read`, their fraction of the speed of reading alone; `x_sdpa`, the
//           time over that of `baseline`, if there is one.
// Time      the median of the samples, to which the rates belong. Processor time counts only the contender's calls.
template <class Stored>
void measure(benchmark::State& state, const Case& c, Pass pass, const Contender& contender,
             const Contender* baseline) {
  const int calls = calls_per_sample(c, pass);
  const auto prepare = [pass, calls](const Contender& of) {
    if (pass == Pass::backward) of.forward();
    return Sampler(of.of(pass), calls);
  };
  const Sampler mine = prepare(contender);
  std::optional<Sampler> other;
  if (baseline) other.emplace(prepare(*baseline));
  std::optional<ReadProbe> reads;
  if (c.decodes()) reads.emplace(c.bytes<Stored>(), c.threads);
  const double amount = contender.share * (c.decodes() ? c.bytes<Stored>() : c.flops(pass));

  // A sample of short calls counts as one iteration for each of its calls: benchmarks of microseconds would otherwise take
  // thousands of samples, and a probe of a millisecond beside each.
  std::vector<double> times, shares, ratios;
  while (state.KeepRunningBatch(calls)) {
    state.PauseTiming();
    mine.warm_up();
    state.ResumeTiming();
    const double time = mine.sample();
    state.PauseTiming();
    state.SetIterationTime(time * calls);
    times.push_back(time);
    shares.push_back(amount / time /
                     (reads ? reads->bytes_per_second()
                            : heed::peak_flops<heed::ArithmeticOf<Stored>>(c.threads)));
    if (other) {
      other->warm_up();
      ratios.push_back(time / other->sample());
    }
    state.ResumeTiming();
  }
  set_median(state, times, calls);
  state.counters[c.decodes() ? "GB/s" : "GFLOP/s"] = amount / heed::median_of(times) * 1e-9;
  state.counters[c.decodes() ? "read" : "peak"] = heed::median_of(shares);
  if (other) state.counters["x_sdpa"] = heed::median_of(ratios);
}

inline void add_benchmark(const std::string& contender, Pass pass, const char* dtype, const Case& c,
                          std::function<void(benchmark::State&)> body) {
  const std::string name = contender + "/" + text(pass) + "/" + dtype + "/" + c.text();
  benchmark::RegisterBenchmark(name.c_str(), std::move(body))
      ->Unit(benchmark::kMillisecond)
      ->MinTime(0.1)
      ->UseManualTime();
}

}  // namespace heed_bench
