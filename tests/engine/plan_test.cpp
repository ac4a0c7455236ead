// SPDX-License-Identifier: Apache-2.0
// Laws of the plan of a call: tile sizes, groups of panels, workers and their scratch; and the number of threads.
#include <heed/core/random.hpp>
#include <heed/engine/plan.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"
#include "temporary.hpp"

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

using heed::BoundMask;
using heed::cpu_quota;
using heed::Geometry;
using heed::Index;
using heed::kNoQuota;
using heed::Mask;
using heed::Options;
using heed::Plan;

namespace {

// Everything that determines a plan.
struct Case {
  Geometry g;
  Options options;
  Index row_tiles = 0, page_rows = 0;
  bool backward = false;
};

template <class T>
[[nodiscard]] Plan plan_of(const Case& c, const Mask<T>& mask = {}) {
  return heed::make_plan<T>(c.g, BoundMask<T>(mask, c.g, "test"), c.options, c.row_tiles,
                            c.page_rows, c.backward);
}

// One of `choices`, drawn by number i.
[[nodiscard]] Index pick(const heed::CounterRandom& random, std::uint64_t& i,
                         std::vector<Index> choices) {
  return choices[std::size_t(random.bits(i++) % choices.size())];
}

// `count` cases of every kind: short and long, wide and narrow, in pages, with whole rows, with requested tiles.
template <class T>
[[nodiscard]] std::vector<Case> random_cases(int count) {
  const heed::CounterRandom random(11);
  std::uint64_t i = 0;
  std::vector<Case> cases;
  for (int n = 0; n < count; ++n) {
    Case c;
    const Index kv_heads = pick(random, i, {1, 2}), heads = kv_heads * pick(random, i, {1, 3, 8});
    c.g = {pick(random, i, {1, 2}),
           heads,
           heads,
           kv_heads,
           pick(random, i, {0, 1, 5, 8, 17, 33, 100, 700}),
           pick(random, i, {0, 1, 7, 64, 130, 700, 20000}),
           pick(random, i, {1, 16, 64, 512}),
           pick(random, i, {1, 16, 64, 512})};
    c.options.panel_vectors = int(pick(random, i, {0, 0, 1, heed::kPanelVectors}));
    c.options.key_tile = pick(random, i, {0, 0, 1, 20, 100, 5000});
    c.row_tiles = pick(random, i, {0, 0, 1, 4});
    c.page_rows = pick(random, i, {0, 0, 1, 3, 4, 16}) * heed::kPanelLanes<T>;
    c.backward = pick(random, i, {0, 1}) == 1;
    cases.push_back(c);
  }
  return cases;
}

[[nodiscard]] std::string describe(const Case& c) {
  std::string text = c.backward ? "backward" : "forward";
  for (const Index n :
       {c.g.batch, c.g.heads, c.g.kv_heads, c.g.len_q, c.g.len_kv, c.g.dim_qk, c.g.dim_v,
        Index(c.options.panel_vectors), c.options.key_tile, c.row_tiles, c.page_rows})
    text += ' ' + std::to_string(n);
  return text;
}

[[nodiscard]] bool same(const Plan& a, const Plan& b) {
  return a.vectors == b.vectors && a.lanes == b.lanes && a.tile == b.tile && a.tiles == b.tiles &&
         a.group == b.group && a.panels == b.panels && a.wide_tile == b.wide_tile &&
         a.fraction == b.fraction && a.wide_fraction == b.wide_fraction;
}

constexpr int kCases = 3000;

}  // namespace

TEMPLATE_TEST_CASE("tiles are whole panels, cover every key once, and panels cover every query",
                   "[plan]", float, double) {
  using T = TestType;
  for (const Case& c : random_cases<T>(kCases)) {
    const Plan plan = plan_of<T>(c);
    INFO(describe(c));
    REQUIRE(plan.vectors >= 1);
    REQUIRE(plan.vectors <= heed::kPanelVectors);
    REQUIRE(plan.lanes == plan.vectors * heed::kLanes<T>);
    REQUIRE(plan.tile > 0);
    REQUIRE(plan.tile % plan.lanes == 0);
    REQUIRE(plan.tiles * plan.tile >= c.g.len_kv);
    REQUIRE((plan.tiles == 0 || (plan.tiles - 1) * plan.tile < c.g.len_kv));
    REQUIRE(plan.panels * plan.lanes >= c.g.len_q);
    REQUIRE((plan.panels == 0 || (plan.panels - 1) * plan.lanes < c.g.len_q));
  }
}

TEMPLATE_TEST_CASE("no tile straddles a page, and none is a panel wider than the row", "[plan]",
                   float, double) {
  using T = TestType;
  for (const Case& c : random_cases<T>(kCases)) {
    const Plan plan = plan_of<T>(c);
    INFO(describe(c));
    if (c.page_rows > 0)
      REQUIRE(c.page_rows % plan.tile == 0);
    else
      REQUIRE(plan.tile <= c.g.len_kv + plan.lanes);
  }
}

TEMPLATE_TEST_CASE("a plan does not depend on the number of threads", "[plan]", float, double) {
  using T = TestType;
  for (Case c : random_cases<T>(kCases)) {
    c.options.threads = 1;
    const Plan one = plan_of<T>(c);
    c.options.threads = 64;
    INFO(describe(c));
    REQUIRE(same(one, plan_of<T>(c)));
  }
}

TEMPLATE_TEST_CASE(
    "the tile that was asked for is the nearest number of whole panels, at least one", "[plan]",
    float, double) {
  using T = TestType;
  Case c;
  c.g = {1, 1, 1, 1, 64, 4096, 64, 64};
  for (int vectors = 1; vectors <= heed::kPanelVectors; ++vectors) {
    const Index lanes = vectors * heed::kLanes<T>;
    c.options.panel_vectors = vectors;
    for (const Index panels : {1, 2, 5, 9})
      for (const Index beside : {-(lanes / 2), Index(0), (lanes - 1) / 2}) {
        c.options.key_tile = panels * lanes + beside;
        INFO(c.options.key_tile << " keys, panels of " << lanes);
        CHECK(plan_of<T>(c).tile == panels * lanes);
      }
    c.options.key_tile = 1;
    CHECK(plan_of<T>(c).tile == lanes);
    c.options.key_tile = 100000;
    CHECK(plan_of<T>(c).tile <= 4096 + lanes);
  }
}

TEMPLATE_TEST_CASE(
    "a panel, and a tile of keys and values beside it, fit into half of the second cache", "[plan]",
    float, double) {
  using T = TestType;
  for (Case c : random_cases<T>(kCases)) {
    c.options.key_tile = 0;
    c.row_tiles = 0;
    const Plan plan = plan_of<T>(c);
    const Index width = c.g.dim_qk + c.g.dim_v, size = Index(sizeof(T));
    const Index bytes = size * (plan.lanes * (width + plan.tile) + plan.tile * width);
    INFO(describe(c) << ", tile " << plan.tile << ", " << bytes << " bytes");
    // The rounding to whole panels adds half a panel of keys; fewer than 96 keys would be too slow a tile.
    const Index rounding = size * (plan.lanes / 2) * (plan.lanes + width);
    REQUIRE((bytes <= heed::kCacheBytes / 2 + rounding || plan.tile <= 96 + plan.lanes / 2));
    REQUIRE(plan.tile <= (c.backward ? 192 : 512) + plan.lanes / 2);
  }
}

TEMPLATE_TEST_CASE(
    "whole rows of a panel fill at most an eighth of all scratch, or the panel is one vector",
    "[plan]", float, double) {
  using T = TestType;
  for (Case c : random_cases<T>(kCases)) {
    c.options.panel_vectors = 0;
    c.row_tiles = 6;
    c.g.len_kv *= 7;
    const Plan plan = plan_of<T>(c);
    const Index bytes = c.row_tiles * c.g.len_kv * plan.lanes * Index(sizeof(T));
    INFO(describe(c) << ", " << bytes << " bytes of rows");
    REQUIRE((bytes <= heed::kWorkerBytes || plan.vectors == 1));
    REQUIRE((plan.group == 1 || plan.group * bytes <= heed::kCacheBytes));
    REQUIRE(plan.span_keys(false, c.g.len_kv) == c.g.len_kv);
    REQUIRE(plan.span_keys(true, c.g.len_kv) == std::min(plan.tile, c.g.len_kv));
  }
}

TEMPLATE_TEST_CASE("a group has no more panels than share its keys, nor more than fill its width",
                   "[plan]", float, double) {
  using T = TestType;
  for (const Case& c : random_cases<T>(kCases)) {
    const Plan plan = plan_of<T>(c);
    INFO(describe(c) << ", group " << plan.group);
    REQUIRE(plan.group >= 1);
    const Index sharing = (c.backward ? 1 : c.g.group()) * plan.panels;
    REQUIRE((plan.group == 1 || plan.group <= sharing));
    REQUIRE((plan.group == 1 || plan.group * plan.lanes * Index(sizeof(T)) <= heed::kGroupBytes));
  }
}

TEST_CASE(
    "a mask of small documents gets smaller tiles, which compute a smaller share of all pairs",
    "[plan]") {
  Case c;
  c.g = {1, 2, 2, 2, 2048, 2048, 64, 64};
  std::vector<Index> ids;
  for (Index t = 0; t < c.g.len_kv; ++t) ids.push_back(t / 128);
  const Plan open = plan_of<float>(c), blocks = plan_of<float>(c, heed::documents<float>(ids, ids));
  CHECK(open.wide_tile == 0);
  CHECK(blocks.tile < open.tile);
  CHECK(blocks.wide_tile == open.tile);
  CHECK(blocks.fraction < blocks.wide_fraction);
  CHECK(blocks.fraction >= 1.0 / 16);
}

TEST_CASE(
    "workers are at most the threads, the units of work, and those whose scratch is affordable",
    "[plan]") {
  const Geometry large{1, 8, 8, 8, 4096, 4096, 64, 64}, small{1, 1, 1, 1, 8, 8, 8, 8};
  Options options;
  for (const int threads : {1, 2, 5, 64}) {
    options.threads = threads;
    const int most = heed::resolve_threads(threads);
    CHECK(heed::worker_count(options, large, 1000, 1) == most);
    CHECK(heed::worker_count(options, small, 1000, 1) == most);  // an explicit number counts
    CHECK(heed::worker_count(options, large, 3, 1) == std::min(most, 3));
    CHECK(heed::worker_count(options, large, 0, 1) == 1);
    CHECK(heed::worker_count(options, large, 1000, heed::kWorkerBytes) == most);
    for (const Index shares : {2, 3, 20}) {
      const int workers = heed::worker_count(options, large, 1000, shares * heed::kWorkerBytes);
      CHECK((workers == 1 || workers * shares <= std::max(8, most)));
      CHECK((workers == most || (workers + 1) * shares > std::max(8, most)));
    }
  }
  options.threads = 0;
  heed::adapt_threads(false);  // two questions for the default have one answer
  CHECK(heed::worker_count(options, small, 1000, 1) == 1);
  CHECK(heed::worker_count(options, large, 1000, 1) == heed::resolve_threads(0));
}

TEST_CASE("the default number of threads is the CPU quota where nobody has chosen one", "[plan]") {
  const auto count = [](int openmp, int quota, bool chosen) {
    return heed::default_threads(openmp, {64, quota, chosen}).count;
  };
  CHECK(count(64, 2, false) == 2);
  CHECK(count(64, 64, false) == 64);
  CHECK(count(64, 100, false) == 64);
  CHECK(count(64, kNoQuota, false) == 64);
  CHECK(count(64, 2, true) == 64);   // OMP_NUM_THREADS=64
  CHECK(count(16, 2, false) == 16);  // omp_set_num_threads(16)
  CHECK(count(1, 2, false) == 1);
  const auto source = [](int openmp, int quota) {
    return std::string(heed::default_threads(openmp, {64, quota, false}).source);
  };
  CHECK(source(64, 2) == "the CPU quota of the control group");
  CHECK(source(64, kNoQuota) == "OpenMP's default");
  CHECK(source(8, 2) == "OpenMP's default");
#ifdef _OPENMP
  CHECK(heed::resolve_threads(0) <= omp_get_max_threads());
  CHECK(heed::thread_count(3).count == 3);
  CHECK(std::string(heed::thread_count(3).source) == "Options::threads");
#endif
}

#ifdef _OPENMP
TEST_CASE("a forked child of a process that has used threads computes with one", "[plan]") {
  heed::run_workers(2, [](int) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // ends the program if it waits for threads that it does not have
    int sum = 0;
    heed::parallel_for(9, heed::resolve_threads(2), [&](Index n) { sum += int(n); });
    _exit(sum == 36 && heed::resolve_threads(0) == 1 ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(heed::resolve_threads(2) == 2);
}
#endif

// Calls limit(root) with these files below the root.
using Files = std::vector<std::pair<std::string, std::string>>;  // paths and what they hold
template <class Limit>
auto limit_with(const Files& files, Limit&& limit) {
  const heed_test::TemporaryFolder root;
  for (const auto& [name, text] : files) {
    const auto path = root.path / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  return limit(root.path.c_str());
}

TEST_CASE("the memory of control groups is the least one of a group and of all above it",
          "[plan]") {
  const auto bytes = [](const Files& files) { return limit_with(files, heed::memory_quota); };
  const std::string group = "proc/self/cgroup", mount = "sys/fs/cgroup/";
  CHECK(bytes({}) == heed::kNoMemoryLimit);
  CHECK(bytes({{group, "0::/a/b\n"}, {mount + "a/b/memory.max", "max\n"}}) == heed::kNoMemoryLimit);
  CHECK(bytes({{group, "0::/a/b\n"},
               {mount + "a/b/memory.max", "4000\n"},
               {mount + "a/memory.max", "3000\n"}}) == 3000);
  CHECK(bytes({{group, "5:cpu:/c\n4:memory:/m\n"},
               {mount + "memory/m/memory.limit_in_bytes", "5000\n"},
               {mount + "memory/c/memory.limit_in_bytes", "1\n"}}) == 5000);
}

TEST_CASE("a CPU quota is the least one of a control group and of all above it", "[plan]") {
  const auto quota = [](const Files& files) { return limit_with(files, cpu_quota); };
  const std::string group = "proc/self/cgroup", mount = "sys/fs/cgroup/";
  CHECK(quota({}) == kNoQuota);

  // Version 2, rounded up.
  const auto own = [&](const std::string& text) {
    return quota({{group, "0::/\n"}, {mount + "cpu.max", text}});
  };
  CHECK(own("max 100000\n") == kNoQuota);
  CHECK(own("150000 100000\n") == 2);
  CHECK(own("200000 100000\n") == 2);
  CHECK(own("200001 100000\n") == 3);
  CHECK(own("1000 100000") == 1);
  CHECK(own("9223372036854775807 1\n") == kNoQuota);
  for (const char* text :
       {"", "\n", "100000", "100000\n", "100000 ", "0 100000\n", "100000 0\n", "-1 100000\n",
        "2e5 100000\n", "200000  100000\n", "200000 100000 7\n", "99999999999999999999 1\n"})
    CHECK(own(text) == kNoQuota);

  // Version 1.
  const auto older = [&](const std::string& time, const std::string& period) {
    return quota({{group, "5:memory:/m\n4:cpuacct,cpu:/a\n1:name=systemd:/s\n"},
                  {mount + "cpu/a/cpu.cfs_quota_us", time},
                  {mount + "cpu/a/cpu.cfs_period_us", period}});
  };
  CHECK(older("-1\n", "100000\n") == kNoQuota);
  CHECK(older("250000\n", "100000\n") == 3);
  CHECK(older("250000\n", "") == kNoQuota);
  CHECK(older("much\n", "100000\n") == kNoQuota);
  // Both versions, of which the older one has the quota.
  CHECK(quota({{group, "4:cpu:/a\n0::/\n"},
               {mount + "cpu/a/cpu.cfs_quota_us", "100000\n"},
               {mount + "cpu/a/cpu.cfs_period_us", "100000\n"}}) == 1);

  // Groups above, and the mount of a container that knows only its name on the machine.
  const auto nested = [&](const std::string& name, const std::string& at_mount,
                          const std::string& above, const std::string& below) {
    return quota({{group, "0::" + name + "\n"},
                  {mount + "cpu.max", at_mount},
                  {mount + "a/cpu.max", above},
                  {mount + "a/b/cpu.max", below}});
  };
  CHECK(nested("/a/b", "max 1", "400000 100000", "200000 100000") == 2);
  CHECK(nested("/a/b", "max 1", "200000 100000", "400000 100000") == 2);
  CHECK(nested("/a/b", "200000 100000", "max 1", "400000 100000") == 2);
  CHECK(nested("/a", "max 1", "400000 100000", "200000 100000") == 4);
  CHECK(nested("/a/b/c", "max 1", "max 1", "200000 100000") == 2);
  CHECK(nested("/docker/x", "300000 100000", "200000 100000", "100000 100000") == 3);
  CHECK(nested("/../a", "300000 100000", "200000 100000", "100000 100000") == 3);
  CHECK(nested("no slash", "300000 100000", "max 1", "max 1") == 3);
  CHECK(nested("/" + std::string(20000, 'x'), "300000 100000", "max 1", "max 1") == 3);
  // Without a name the mount counts.
  CHECK(quota({{mount + "cpu.max", "300000 100000"}}) == 3);
}
