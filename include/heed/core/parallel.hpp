// SPDX-License-Identifier: Apache-2.0
#pragma once

// Threads. A call has one parallel region, which passes exceptions on to the caller; turnstiles
// keep the order of additions the same for any number of threads.

#include <heed/core/control_groups.hpp>
#include <heed/core/error.hpp>
#include <heed/core/function_ref.hpp>
#include <heed/core/system.hpp>
#include <heed/core/thread_limit.hpp>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace heed {
inline namespace HEED_ABI {

// A number of threads, and the setting that it comes from.
struct ThreadCount {
  int count = 1;
  const char* source = "";
};

// Facts about the process and its machine, which are read once.
struct ProcessorShare {
  int processors = 0;    // as OpenMP counts them
  int quota = kNoQuota;  // quota of the control groups (core/control_groups.hpp)
  bool chosen = false;   // true if OMP_NUM_THREADS gives a number
};
// The default number of threads; `openmp` is OpenMP's default. That number holds where
// OMP_NUM_THREADS or omp_set_num_threads() chose it. Where nobody chose, and it is the number of
// processors, the quota limits it. A program that sets omp_set_num_threads() to exactly the number
// of processors cannot be told from one that sets nothing: Options::threads is always obeyed.
[[nodiscard]] inline ThreadCount default_threads(int openmp, const ProcessorShare& share) noexcept {
  if (share.chosen || openmp != share.processors || openmp <= share.quota)
    return {openmp, "OpenMP's default"};
  return {share.quota, "the CPU quota of the control group"};
}

namespace detail {

// The process that has started OpenMP's threads; 0 before any has.
inline std::atomic<long> process_with_threads{0};

// A forked child has none of its parent's threads. OpenMP does not know it, and would wait for them for ever.
[[nodiscard]] inline bool lost_its_threads() noexcept {
  const long process = process_with_threads.load(std::memory_order_relaxed);
  return process != 0 && process != process_number();
}

// The number of threads, at most `workers` and this one included, that the system can start. OpenMP ends the process when
// it cannot start a thread; therefore the first call for a larger number starts as many threads itself, and ends them.
[[nodiscard]] inline int workers_to_be_had(int workers) {
  thread_local int started = 1;
  if (workers <= started) return workers;
  std::mutex gate;
  std::unique_lock closed(gate);
  std::vector<std::thread> others;
  const auto end_all = [&] {
    closed.unlock();
    for (std::thread& other : others) other.join();
  };
  try {
    others.reserve(std::size_t(workers - 1));
    for (int n = 1; n < workers; ++n) others.emplace_back([&] { std::lock_guard waits(gate); });
  } catch (const std::system_error&) {  // there are no more threads
  } catch (...) {
    end_all();
    throw;
  }
  end_all();
  return started = 1 + int(others.size());
}

}  // namespace detail

// Facts about the process and its machine, which are read once.
[[nodiscard]] inline const ProcessorShare& processor_share() {
#ifdef _OPENMP
  static const ProcessorShare share = [] {
    const char* const said = std::getenv("OMP_NUM_THREADS");
    return ProcessorShare{omp_get_num_procs(), cpu_quota(),
                          said && std::strtol(said, nullptr, 10) > 0};
  }();
#else
  static const ProcessorShare share{1, 1, true};
#endif
  return share;
}

namespace detail {

// The limit of default thread counts of this process, and whether there is one.
inline ThreadLimit thread_limit;
inline std::atomic<bool> adapts_threads{true};

[[nodiscard]] inline bool limits_threads() {
  return adapts_threads.load(std::memory_order_relaxed) && !processor_share().chosen;
}

}  // namespace detail

// Says whether calls that leave the number of threads to heed take fewer where other programs keep processors busy
// (core/thread_limit.hpp), as they do unless this or OMP_NUM_THREADS says otherwise.
inline void adapt_threads(bool adapts) noexcept {
  detail::adapts_threads.store(adapts, std::memory_order_relaxed);
}
// How often such calls were given fewer threads since the program started.
[[nodiscard]] inline long times_threads_were_lowered() noexcept {
  return detail::thread_limit.lowered();
}

// The number of workers that a call uses: `requested` if positive, else the default, or fewer on a busy machine; 1 when
// already inside a parallel region, in a process whose parent had used threads when it forked, or built without OpenMP.
[[nodiscard]] inline ThreadCount thread_count(int requested) {
  require(requested >= 0, "threads: ", requested, " threads; it must be 0 (default) or positive");
#ifdef _OPENMP
  if (omp_in_parallel()) return {1, "inside a parallel region"};
  if (detail::lost_its_threads()) return {1, "forked by a process that has used threads"};
  if (requested > 0) return {requested, "Options::threads"};
  const ThreadCount all = default_threads(omp_get_max_threads(), processor_share());
  if (all.count == 1 || !detail::limits_threads()) return all;
  const int most = detail::thread_limit.apply(all.count, wall_seconds());
  return most < all.count ? ThreadCount{most, "threads have waited for busy processors"} : all;
#else
  return {1, "compiled without OpenMP"};
#endif
}
[[nodiscard]] inline int resolve_threads(int requested) { return thread_count(requested).count; }

// Thrown in a worker that waits at a turnstile when another worker has failed.
struct Abandoned {};

// Runs body(worker) once on each of `workers` threads, or on fewer where the system has no more.
// The first exception stops no other worker; it is rethrown after all have returned. Where workers
// wait for each other at Turnstiles, release() must abandon() these: it is called for each worker
// that throws. The Abandoned that this throws in the other workers is not rethrown.
inline void run_workers(
    int workers, FunctionRef<int> body, [[maybe_unused]] FunctionRef<> release = [] {}) {
  if (workers <= 1) {
    body(0);
    return;
  }
#ifdef _OPENMP
  workers = detail::workers_to_be_had(workers);
  detail::process_with_threads.store(process_number(), std::memory_order_relaxed);
  std::exception_ptr error;
  std::mutex guard;
  RegionClock clock(detail::limits_threads() ? &detail::thread_limit : nullptr, workers);
#pragma omp parallel num_threads(workers)
  {
    const RegionClock::Part part(clock, omp_get_thread_num());
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
// Hands out the numbers 0, 1, ..., count - 1 to the workers, each once and in this order.
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
  // Lets the next visitor in.
  void pass(Index gate) { passed_[std::size_t(gate)].fetch_add(1, std::memory_order_seq_cst); }
  // The same for a visitor `rank` that adds nothing behind the gate, by whoever comes first. Returns whether it was so, and the
  // rank was next; else sets it to the number that have passed.
  bool pass_for(Index gate, Index& rank) {
    return passed_[std::size_t(gate)].compare_exchange_strong(rank, rank + 1,
                                                              std::memory_order_seq_cst);
  }
  [[nodiscard]] Index passed(Index gate) const {
    return passed_[std::size_t(gate)].load(std::memory_order_seq_cst);
  }
  // After this call wait() throws where it would wait.
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
