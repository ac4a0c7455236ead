// SPDX-License-Identifier: Apache-2.0
#pragma once

// How many threads a call takes by default while other programs keep processors busy.
//
// A parallel region ends when its last worker returns. Where the system lets another program run in a worker's place, the
// region waits, often longer than a thread alone would have computed. ThreadLimit compares the two: the processor time of all
// workers, at the share of a processor that the calling thread got, is what one thread would have taken. Where regions took
// longer than that lately, calls take half as many threads, and try more again after a pause.
//
// These numbers are all that outlives a call beside scratch memory. They choose numbers of threads, which no result depends on.

#include <heed/core/config.hpp>
#include <heed/core/system.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace heed {
inline namespace HEED_ABI {

// A clock of wall time, in seconds.
[[nodiscard]] inline double wall_seconds() noexcept {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// A parallel region as the thread that started it saw it; times in seconds.
struct RegionTimes {
  int workers = 0;
  double wall = 0;                    // from its start until all workers had returned
  double work = 0;                    // processor time of all workers
  double own_wall = 0, own_work = 0;  // of the calling thread's part
  double awake = 0;  // its processor time until all had returned, be it spent waiting
};

// All members may be called by several threads at once: a number that is lost or mixed with another's makes the next choice
// worse, not wrong.
class ThreadLimit {
 public:
  // The number of threads, at most `threads`, of a call at the time `now`.
  [[nodiscard]] int apply(int threads, double now) noexcept {
    const int most = most_.load(relaxed);
    if (most == 0 || threads <= most) return threads;
    if (now - since_.load(relaxed) < pause_.load(relaxed)) return most;
    change(2 * most, now);
    return std::min(threads, 2 * most);
  }

  // Is a region that starts now to be measured? That takes a few microseconds, and is done once a millisecond at most.
  [[nodiscard]] bool measures(double now) noexcept {
    if (now - measured_.load(relaxed) < kApart) return false;
    measured_.store(now, relaxed);
    return true;
  }

  // Learns from a region that ended at the time `now`.
  void learn(const RegionTimes& region, double now) noexcept {
    const int most = most_.load(relaxed);
    if ((most > 0 && region.workers > most) || region.own_work <= 0) return;
    // A thread that waits by running gets less of the processor in its own part, after it.
    const double share = blend(
        share_,
        std::min(1.0, std::max(region.own_work / region.own_wall, region.awake / region.wall)),
        region.wall);
    const double alone = region.work / share;
    if (blend(ratio_, std::min(kWorst, region.wall / alone), alone) <= 1) return;
    pause_.store(std::max(kPause, 16 * region.wall), relaxed);
    change(std::max(1, region.workers / 2), now);
    lowered_.fetch_add(1, relaxed);
  }

  // The most threads that calls take by default; 0 for any number.
  [[nodiscard]] int most() const noexcept { return most_.load(relaxed); }
  // How often that number was lowered.
  [[nodiscard]] long lowered() const noexcept { return lowered_.load(relaxed); }

 private:
  static constexpr auto relaxed = std::memory_order_relaxed;
  static constexpr double kPause = 0.25;   // seconds, at least
  static constexpr double kApart = 1e-3;   // seconds from one measured region to the next
  static constexpr double kMemory = 0.02;  // seconds that a mean looks back
  static constexpr double kStart = 0.75;   // a ratio of which nothing is known
  static constexpr double kWorst = 4;      // a region that waited for longer counts as this

  // Moves a mean towards x, which was so for `seconds`.
  static double blend(std::atomic<double>& mean, double x, double seconds) noexcept {
    const double old = mean.load(relaxed);
    const double blended = old + (x - old) * seconds / (seconds + kMemory);
    mean.store(blended, relaxed);
    return blended;
  }
  void change(int most, double now) noexcept {
    most_.store(most, relaxed);
    ratio_.store(kStart, relaxed);
    since_.store(now, relaxed);
  }

  std::atomic<int> most_{0};
  std::atomic<long> lowered_{0};
  std::atomic<double> ratio_{kStart};  // a region's time over that of one thread
  std::atomic<double> share_{1};       // of a processor, that a thread gets
  std::atomic<double> since_{0};       // the time of the last change
  std::atomic<double> pause_{kPause};
  std::atomic<double> measured_{0};  // the start of the last region that was measured
};

// Measures a parallel region from its own construction to its destruction, and tells `limit`, unless that is null.
class RegionClock {
 public:
  RegionClock(ThreadLimit* limit, int workers) : start_(limit ? wall_seconds() : 0) {
    if (!limit || !limit->measures(start_)) return;
    limit_ = limit;
    times_.workers = workers;
    start_work_ = thread_nanoseconds();
  }
  RegionClock(const RegionClock&) = delete;
  ~RegionClock() {
    if (!limit_) return;
    const double end = wall_seconds();
    times_.wall = end - start_;
    times_.work = seconds(work_.load(std::memory_order_relaxed));
    times_.awake = seconds(thread_nanoseconds() - start_work_);
    limit_->learn(times_, end);
  }

  // Measures a worker's part. Worker 0 is the thread that has started the region.
  class Part {
   public:
    Part(RegionClock& region, int worker)
        : region_(region), worker_(worker), start_(region.limit_ ? thread_nanoseconds() : 0) {}
    Part(const Part&) = delete;
    ~Part() {
      if (!region_.limit_) return;
      const long long work = thread_nanoseconds() - start_;
      region_.work_.fetch_add(work, std::memory_order_relaxed);
      if (worker_ > 0) return;
      region_.times_.own_work = seconds(work);
      region_.times_.own_wall = wall_seconds() - region_.start_;
    }

   private:
    RegionClock& region_;
    int worker_;
    long long start_;
  };

 private:
  [[nodiscard]] static double seconds(long long nanoseconds) { return double(nanoseconds) * 1e-9; }

  ThreadLimit* limit_ = nullptr;  // null: nothing is measured
  RegionTimes times_;
  double start_;
  long long start_work_ = 0;
  std::atomic<long long> work_{0};
};

}  // namespace HEED_ABI
}  // namespace heed
