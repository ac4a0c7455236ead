// SPDX-License-Identifier: Apache-2.0

// An attention layer with its projections on the threads that heed takes by default, beside the same layer on one thread; and
// again while other threads keep every core but one busy, as a second program would.

#include "measure.hpp"
#include "suite.hpp"

#include <heed/compiled.hpp>
#include <heed/nn/projected_attention.hpp>

#include <atomic>
#include <thread>

namespace heed_bench {
namespace {

constexpr Index kBatch = 4, kLen = 512, kWidth = 256, kHeads = 4;
constexpr int kSamples = 200;

// Threads that compute until they are destroyed.
class BusyCores {
 public:
  explicit BusyCores(int count) {
    for (int i = 0; i < count; ++i)
      threads_.emplace_back([this] {
        while (!done_.load(std::memory_order_relaxed))
          benchmark::DoNotOptimize(heed::detail::multiply_add_chains<float>(10'000, 0.5F, 1.0F));
      });
  }
  ~BusyCores() {
    done_.store(true);
    for (std::thread& thread : threads_) thread.join();
  }
  BusyCores(const BusyCores&) = delete;

 private:
  std::atomic<bool> done_{false};
  std::vector<std::thread> threads_;
};

// A layer and everything that its calls need.
class LayerCall {
 public:
  LayerCall()
      : layer_(heed::nn::AttentionOptions::even(kWidth, kHeads), {}, heed::causal<float>()),
        x_(kBatch * kLen, kWidth),
        y_(kBatch * kLen, kWidth),
        dx_(kBatch * kLen, kWidth) {
    std::uint64_t stream = 1;
    layer_.visit([&](const std::string&, heed::Param<float>& value, heed::Param<float>&) {
      heed::nn::fill_normal(value, 0.05, 1, stream++);
    });
    const heed::CounterRandom random(1);
    for (Index i = 0; i < kBatch * kLen * kWidth; ++i)
      x_.view().data[i] = float(random.normal(std::uint64_t(i)));
  }
  void run(Pass pass, int threads) {
    context_.threads = threads;
    if (pass == Pass::forward)
      layer_.forward(context_, kBatch, std::as_const(x_).view(), y_.view());
    else
      layer_.backward(context_, kBatch, std::as_const(x_).view(), std::as_const(y_).view(),
                      dx_.view());
  }

 private:
  heed::nn::ProjectedAttention<heed::ScaledDot<float>> layer_;
  heed::nn::Context<float> context_;
  heed::nn::Matrix<float> x_, y_, dx_;
};

// Counter  `x_one_thread`, the median time over that of one thread; the two are measured in turns.
void run(benchmark::State& state, Pass pass, int busy) {
  constexpr int by_default = 0;
  LayerCall call;
  call.run(Pass::forward, by_default);
  call.run(pass, by_default);
  call.run(pass, 1);
  const BusyCores others(busy);
  std::vector<double> all, one;
  for (auto _ : state) {
    all.push_back(heed::seconds_of([&] { call.run(pass, by_default); }));
    state.PauseTiming();
    state.SetIterationTime(all.back());
    one.push_back(heed::seconds_of([&] { call.run(pass, 1); }));
    state.ResumeTiming();
  }
  set_median(state, all, 1);
  state.counters["x_one_thread"] = heed::median_of(all) / heed::median_of(one);
}

}  // namespace

void add_layer() {
  const int cores = std::max(2, int(std::thread::hardware_concurrency()));
  for (const int busy : {0, cores - 1})
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const std::string name = std::string("layer/") + text(pass) + "/float/B" +
                               std::to_string(kBatch) + "_H" + std::to_string(kHeads) + "_T" +
                               std::to_string(kLen) + "_w" + std::to_string(kWidth) + "_causal_" +
                               std::to_string(cores) + "threads" +
                               (busy > 0 ? "_" + std::to_string(busy) + "busy" : "");
      benchmark::RegisterBenchmark(name.c_str(),
                                   [=](benchmark::State& state) { run(state, pass, busy); })
          ->Unit(benchmark::kMillisecond)
          ->Iterations(kSamples)
          ->UseManualTime();
    }
}

}  // namespace heed_bench
