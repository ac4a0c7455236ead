// SPDX-License-Identifier: Apache-2.0
#include <heed/core/parallel.hpp>

#include "catch.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

using heed::RegionTimes;
using heed::ThreadLimit;

namespace {

constexpr double kMillisecond = 1e-3;

// A region of `workers` that computes for `work` seconds in all and takes `ratio` times as long as one thread would, which has
// `share` of a processor.
RegionTimes region(int workers, double work, double ratio, double share = 1) {
  const double own = work / workers;
  const double wall = ratio * work / share;
  return {workers, wall, work, own / share, own, std::min(share * wall, own)};
}

// A program that does nothing but regions of `work` seconds, on a machine where `ratio(workers)` times the time of one thread pass.
struct Program {
  ThreadLimit limit;
  double now = 100;
  int threads = 2;
  double work = 3 * kMillisecond;
  long calls = 0;

  template <class Ratio>
  void run(double seconds, Ratio&& ratio, double share = 1) {
    for (const double end = now + seconds; now < end; ++calls) {
      const int workers = limit.apply(threads, now);
      if (workers == 1) {
        now += work / share;
        continue;
      }
      const RegionTimes times = region(workers, work, ratio(workers), share);
      now += times.wall;
      limit.learn(times, now);
    }
  }
};

}  // namespace

TEST_CASE("on free processors default calls take all threads, and one late thread changes nothing",
          "[threads]") {
  Program program;
  int call = 0;
  program.run(10, [&](int) { return ++call % 100 == 0 ? 10.0 : 0.52; });
  CHECK(program.limit.lowered() == 0);
  CHECK(program.limit.apply(2, program.now) == 2);
  // Small regions lose by their start; the time that they take is what counts.
  for (int i = 0; i < 1000; ++i) {
    program.limit.learn(region(2, 3 * kMillisecond, 0.52), program.now);
    program.limit.learn(region(2, 0.01 * kMillisecond, 2), program.now);
  }
  CHECK(program.limit.lowered() == 0);
}

TEST_CASE("where regions last longer than one thread would take, default calls take one thread",
          "[threads]") {
  Program program;
  program.work = GENERATE(0.1, 3.0, 50.0) * kMillisecond;
  const double ratio = GENERATE(1.3, 4.0, 20.0);
  program.run(600, [&](int) { return ratio; });
  CHECK(program.limit.lowered() >= 10);  // it tries again
  CHECK(600 / (double(program.calls) * program.work) < 1.3);
  // The processors are free again.
  program.run(20, [](int) { return 0.52; });
  CHECK(program.limit.apply(2, program.now) == 2);
}

TEST_CASE("a call that lost by seconds waits for longer before it tries again", "[threads]") {
  ThreadLimit limit;
  limit.learn(region(2, 5, 2), 100);
  CHECK(limit.apply(2, 100 + 150) == 1);
  CHECK(limit.apply(2, 100 + 170) == 2);
}

TEST_CASE("many threads on a machine with few busy processors become as many as are free",
          "[threads]") {
  Program program;
  program.threads = 64;
  program.run(20, [](int workers) { return workers > 40 ? 2.0 : 1.0 / workers; });
  int most = 0;
  program.run(3, [&](int workers) {
    most = std::max(most, workers);
    return workers > 40 ? 2.0 : 1.0 / workers;
  });
  CHECK(most >= 32);
  CHECK(double(program.calls) > 0.8 * 23 / (3 * kMillisecond / 32));
}

TEST_CASE("threads that get half a processor each are as good as two", "[threads]") {
  Program program;
  // Wall time is that of 3 ms of work; one thread would take 6 ms.
  program.run(
      10, [](int) { return 0.5; }, 0.5);
  CHECK(program.limit.lowered() == 0);
  // Calling threads that happen not to share theirs know it from the calls before.
  program.limit.learn(RegionTimes{2, 3.5 * kMillisecond, 3 * kMillisecond, 1.5 * kMillisecond,
                                  1.5 * kMillisecond, 1.5 * kMillisecond},
                      program.now);
  CHECK(program.limit.lowered() == 0);
}

TEST_CASE("a thread that waits by running has the share that it waits with, too", "[threads]") {
  ThreadLimit limit;
  // It computes 1.5 ms in 3 ms, since it has run on while it waited in the calls before.
  for (int i = 0; i < 20; ++i)
    limit.learn({2, 4.5 * kMillisecond, 3 * kMillisecond, 3 * kMillisecond, 1.5 * kMillisecond,
                 3.6 * kMillisecond},
                100 + i * 4.5 * kMillisecond);
  CHECK(limit.lowered() == 1);
}

TEST_CASE("a region whose worker sleeps limits calls that leave the number to heed, and no others",
          "[threads]") {
#ifdef _OPENMP
  if (heed::processor_share().chosen || heed::thread_nanoseconds() == 0) return;
  const int before = omp_get_max_threads(), all = before + 3;
  omp_set_num_threads(all);
  const auto waits = [&] {
    heed::run_workers(all, [](int worker) {
      if (worker == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(200));
      for (const long long start = heed::thread_nanoseconds();
           heed::thread_nanoseconds() < start + 2'000'000;) {
      }
    });
  };
  CHECK(heed::thread_count(0).count == all);
  for (int i = 0; i < 100 && heed::times_threads_were_lowered() == 0; ++i) waits();
  CHECK(heed::times_threads_were_lowered() == 1);
  CHECK(heed::thread_count(0).count == all / 2);
  CHECK(std::string(heed::thread_count(0).source) == "threads have waited for busy processors");
  CHECK(heed::thread_count(all).count == all);
  // A region of more workers than the limit was a caller's own choice, and says nothing of it.
  for (int i = 0; i < 10; ++i) waits();
  CHECK(heed::times_threads_were_lowered() == 1);
  heed::adapt_threads(false);
  CHECK(heed::thread_count(0).count == all);
  omp_set_num_threads(before);
#endif
}
