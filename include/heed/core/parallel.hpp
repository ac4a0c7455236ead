// SPDX-License-Identifier: Apache-2.0
#pragma once

// Threads. A call has one parallel region, out of which exceptions are carried; turnstiles keep the order of
// additions the same for any number of threads.

#include <heed/core/error.hpp>
#include <heed/core/function_ref.hpp>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace heed {
inline namespace HEED_ABI {

// The number of workers that a call uses: `requested` if positive, else OpenMP's default; 1 when
// already inside a parallel region or built without OpenMP.
[[nodiscard]] inline int resolve_threads(int requested) {
  require(requested >= 0, "threads: ", requested, " threads; it must be 0 (default) or positive");
#ifdef _OPENMP
  if (omp_in_parallel()) return 1;
  return requested > 0 ? requested : omp_get_max_threads();
#else
  return 1;
#endif
}

// Thrown to a worker that waits at a turnstile for another one that has failed.
struct Abandoned {};

// Runs body(worker) once on each of `workers` threads. The first exception stops no other worker; it is rethrown
// after all have returned. Where workers wait for each other at Turnstiles, release() must abandon() these: it is
// called for each worker that throws, and the Abandoned that it throws in the others is not rethrown.
inline void run_workers(
    int workers, FunctionRef<int> body, [[maybe_unused]] FunctionRef<> release = [] {}) {
  if (workers <= 1) {
    body(0);
    return;
  }
#ifdef _OPENMP
  std::exception_ptr error;
  std::mutex guard;
#pragma omp parallel num_threads(workers)
  {
    try {
      body(omp_get_thread_num());
    } catch (const Abandoned&) {
    } catch (...) {
      release();
      const std::lock_guard lock(guard);
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
#else
  for (int worker = 0; worker < workers; ++worker) body(worker);
#endif
}
// Hands out 0, 1, ..., count - 1 to the workers, each once and in this order.
class Dispenser {
 public:
  explicit Dispenser(Index count) : count_(count) {}
  // The next number, or -1 when none is left.
  [[nodiscard]] Index next() {
    const Index taken = next_.fetch_add(1, std::memory_order_relaxed);
    return taken < count_ ? taken : -1;
  }

 private:
  std::atomic<Index> next_{0};
  Index count_;
};

// A row of gates, each passed by visitors 0, 1, 2, ... in this order. Visitor r of a gate
// enters after visitor r - 1 has passed, so that additions behind a gate happen in one fixed order, whatever
// the number of threads. No visitor waits for ever as long as visitors are started in order and abandon() is
// called when one fails.
class Turnstiles {
 public:
  explicit Turnstiles(Index gates)
      : passed_(new std::atomic<Index>[std::size_t(gates > 0 ? gates : 1)]) {
    for (Index g = 0; g < gates; ++g) passed_[std::size_t(g)].store(0, std::memory_order_relaxed);
  }

  // Returns when the visitors before `rank` have passed, at once if there is none; throws Abandoned if one of them has
  // failed.
  void wait(Index gate, Index rank) const {
    const auto& passed = passed_[std::size_t(gate)];
    for (int spins = 0; passed.load(std::memory_order_acquire) < rank; ++spins) {
      if (spins <= 64) continue;
      if (abandoned_.load(std::memory_order_relaxed)) throw Abandoned{};
      std::this_thread::yield();
    }
  }
  void pass(Index gate) { passed_[std::size_t(gate)].fetch_add(1, std::memory_order_release); }
  // From now on wait() throws where it would wait.
  void abandon() { abandoned_.store(true, std::memory_order_relaxed); }

 private:
  std::unique_ptr<std::atomic<Index>[]> passed_;
  std::atomic<bool> abandoned_{false};
};

// body(i) for i in [0, count), handed out in order; body must not wait for other iterations.
inline void parallel_for(Index count, int threads, FunctionRef<Index> body) {
  if (count <= 0) return;
  const int workers = int(std::min<Index>(threads, count));
  if (workers <= 1) {
    for (Index i = 0; i < count; ++i) body(i);
    return;
  }
  Dispenser dispenser(count);
  run_workers(workers, [&](int) {
    for (Index i = dispenser.next(); i >= 0; i = dispenser.next()) body(i);
  });
}

}  // namespace HEED_ABI
}  // namespace heed
