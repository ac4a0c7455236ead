// SPDX-License-Identifier: Apache-2.0
// The same bits for any number of threads, any number of times, and from several threads at once. The
// long cases run with their tags: 250 repeats, and 10,000 calls by eight threads.

#include "conformance/compare.hpp"

#include <fstream>
#include <thread>

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true};
constexpr int kThreads[] = {1, 2, 3, 4, 7, 8};

// Everything that a call returns, as numbers to compare.
template <class T>
struct Bits {
  std::vector<T> out, lse, mixed;
  std::vector<std::vector<T>> diagnostics;
  Named gradients;

  friend bool operator==(const Bits& a, const Bits& b) {
    bool same = same_bits(a.out, b.out) && same_bits(a.lse, b.lse) && same_bits(a.mixed, b.mixed) &&
                a.diagnostics.size() == b.diagnostics.size() &&
                a.gradients.size() == b.gradients.size();
    for (std::size_t d = 0; same && d < a.diagnostics.size(); ++d)
      same = same_bits(a.diagnostics[d], b.diagnostics[d]);
    for (std::size_t t = 0; same && t < a.gradients.size(); ++t)
      same = same_bits(a.gradients[t].values, b.gradients[t].values);
    return same;
  }
};

template <class T>
[[nodiscard]] Bits<T> run(const Runner<T>& runner, Call<T> call, int threads) {
  call.options.threads = threads;
  const Outcome<T> result = forward(runner, call);
  return {result.out.dense(), result.saved.lse, result.saved.mixed, result.saved.diagnostics,
          backward(runner, call, result)};
}

// The first part in which two results differ.
template <class T>
[[nodiscard]] std::string difference(const Bits<T>& a, const Bits<T>& b) {
  if (!same_bits(a.out, b.out)) return "out";
  if (!same_bits(a.lse, b.lse)) return "lse";
  if (!same_bits(a.mixed, b.mixed)) return "mixed rows";
  for (std::size_t t = 0; t < a.gradients.size(); ++t)
    if (!same_bits(a.gradients[t].values, b.gradients[t].values))
      return "gradient of " + a.gradients[t].name;
  return a == b ? "nothing" : "diagnostics";
}

struct Case {
  const char* name;
  Geometry geometry;
  bool small;
};
// One head alone, heads in groups, more heads than threads; many tiles and few.
const Case kCases[] = {
    {"one head", geometry(1, 1, 1, 150, 150, 8, 8), true},
    {"one head, long", geometry(1, 1, 1, 530, 530, 8, 8), false},
    {"groups", geometry(2, 4, 2, 50, 50, 8, 8), true},
    {"many heads", geometry(2, 6, 1, 33, 33, 4, 4), true},
};

template <class T>
[[nodiscard]] std::vector<OwnedMask<T>> masks_of(const Geometry& g) {
  // A window has ragged edges on both sides. Broadcast biases: their gradients are sums over heads and batches.
  return {
      owned(heed::window<T>(g.len_kv / 3, 0)), random_bias<T>({1, 1, g.len_q, g.len_kv}, 3, 0.1),
      random_bias<T>({1, g.heads, 1, g.len_kv}, 4), random_bias<T>({g.batch, 1, 1, g.len_kv}, 5)};
}

// Repeats take the numbers of threads in turn.
template <class T>
void check_threads(std::size_t repeats) {
  for (const Case& c : kCases)
    for (const Runner<T>& runner : all_runners<T, kNeeds>(c.geometry)) {
      Call<T> call = random_call<T>(runner.geometry, runner.extra_dim);
      if (c.small) call.options = small_tiles();
      const auto masks = masks_of<T>(runner.geometry);
      for (std::size_t m = 0; m < masks.size(); ++m) {
        call.mask = masks[m];
        const Bits<T> first = run(runner, call, 1);
        for (std::size_t r = 0; r < repeats; ++r) {
          const int threads = kThreads[r % std::size(kThreads)];
          const Bits<T> again = run(runner, call, threads);
          if (again == first) continue;
          FAIL_CHECK(runner.name << " (" << c.name << ", mask " << m << ") on " << threads
                                 << " threads differs in its " << difference(again, first));
        }
      }
      SUCCEED();
    }
}

// Threads that call one op at once, each `repeats` times.
template <class T>
void check_callers(const Runner<T>& runner, int callers, int repeats) {
  Call<T> call = random_call<T>(runner.geometry, runner.extra_dim);
  call.options = small_tiles();
  call.mask = owned(heed::causal<T>());
  const Bits<T> alone = run(runner, call, 1);
  std::vector<int> same(std::size_t(callers), 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < callers; ++t)
    threads.emplace_back([&, t] {
      for (int r = 0; r < repeats; ++r)
        same[std::size_t(t)] += run(runner, call, 1 + (t + r) % 3) == alone ? 1 : 0;
    });
  for (std::thread& thread : threads) thread.join();
  INFO(runner.name);
  CHECK(same == std::vector<int>(std::size_t(callers), repeats));
}

// Pages of memory that this process has; 0 where the system does not say.
[[nodiscard]] long resident_pages() {
  long whole = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> whole >> resident;
  return resident;
}

}  // namespace

TEMPLATE_TEST_CASE("results have the same bits on 1, 2, 3, 4, 7 and 8 threads", "[determinism]",
                   float, double) {
  check_threads<TestType>(std::size(kThreads));
}

TEMPLATE_TEST_CASE("results have the same bits 250 times on 1, 2, 3, 4, 7 and 8 threads",
                   "[.long][repeats]", float, double) {
  check_threads<TestType>(250);
}

TEMPLATE_TEST_CASE("four threads that call one op at once get what each would get alone",
                   "[determinism]", float, double) {
  for (const Runner<TestType>& runner :
       all_runners<TestType, kNeeds>(geometry(2, 2, 1, 40, 40, 8, 8)))
    for (int repeat = 0; repeat < 5; ++repeat) check_callers(runner, 4, 1);
}

TEST_CASE("10,000 calls by eight threads that share const ops leave no memory behind",
          "[.long][callers]") {
  const auto runners = all_runners<float, kNeeds>(geometry(2, 2, 1, 40, 40, 8, 8));
  const int repeats = int(10000 / 8 / runners.size()) + 1;
  // The memory that threads keep and lists of the C library fill up in the first rounds; a leak adds to each one.
  long more = 0;
  for (int round = 0; round == 0 || (round < 12 && more >= 64); ++round) {
    const long before = resident_pages();
    for (const Runner<float>& runner : runners) check_callers(runner, 8, repeats);
    more = resident_pages() - before;
  }
  CHECK(more < 64);
}

#ifdef _OPENMP
TEST_CASE("a call inside a parallel region runs on one thread and has the same bits",
          "[determinism]") {
  for (const Runner<float>& runner : all_runners<float, kNeeds>(geometry(2, 2, 1, 40, 40, 8, 8))) {
    Call<float> call = random_call<float>(runner.geometry, runner.extra_dim);
    call.options = small_tiles();
    const Bits<float> alone = run(runner, call, 1);
    int same = 0;
#pragma omp parallel num_threads(3) reduction(+ : same)
    same += run(runner, call, 8) == alone ? 1 : 0;
    INFO(runner.name);
    CHECK(same == 3);
  }
}

TEST_CASE("calls leave OpenMP's number of threads alone", "[determinism]") {
  const int before = omp_get_max_threads();
  for (const Runner<float>& runner : all_runners<float, kNeeds>(geometry(1, 2, 1, 9, 9, 4, 4)))
    (void)run(runner, random_call<float>(runner.geometry, runner.extra_dim), 5);
  CHECK(omp_get_max_threads() == before);
}
#endif
