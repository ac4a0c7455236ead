// SPDX-License-Identifier: Apache-2.0
// Masks that are functions of positions: pair by pair against plain loops, in calls against the slow twin, and what
// hides whole tiles or nothing.

#include "catch.hpp"
#include "door_case.hpp"
#include "message_of.hpp"

#include <heed/compiled.hpp>
#include <heed/core/random.hpp>
#include <heed/engine/explain.hpp>
#include <heed/mask/patterns.hpp>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

using namespace heed;
using heed_test::message_of;

namespace {

using Shows = std::function<bool(Index b, Index h, Index i, Index j)>;

// A mask, and the same in plain words. i is the query's index.
struct Case {
  std::string name;
  Mask<double> mask;
  Shows shows;
};

constexpr Geometry kG{2, 4, 4, 2, 75, 91, 5, 3};

[[nodiscard]] std::vector<Index> random_numbers(Index count, Index below, unsigned seed) {
  RandomSequence random(seed);
  std::vector<Index> numbers;
  for (Index n = 0; n < count; ++n) numbers.push_back(random.below(below));
  return numbers;
}

[[nodiscard]] std::vector<Case> functions(const Geometry& g) {
  const Index shift = g.len_kv - g.len_q;
  const auto groups = random_numbers(g.batch * g.len_kv, 3, 5);
  const TokenValues group(groups, g.batch);
  const auto per_head = std::make_shared<std::vector<std::int32_t>>();
  for (const Index number : random_numbers(g.heads * g.len_kv, 4, 6))
    per_head->push_back(std::int32_t(number));
  const TokenValues level(TensorView<const std::int32_t>(per_head->data(), {1, g.heads, 1, g.len_kv}));
  return {
      {"causal", visible<double>([](auto, auto, auto i, auto j) { return j <= i; }),
       [](Index, Index, Index i, Index j) { return j <= i; }},
      {"every third key",
       visible<double>([](auto, auto, auto i, auto j) { return (i + j) % 3 == 0; }),
       [](Index, Index, Index i, Index j) { return (i + j) % 3 == 0; }},
      {"another window per head and batch",
       visible<double>([](auto b, auto h, auto i, auto j) {
         return absolute(i - j) <= 3 + 4 * h + 2 * b;
       }),
       [](Index b, Index h, Index i, Index j) { return std::abs(i - j) <= 3 + 4 * h + 2 * b; }},
      {"bottom right", visible<double>([](auto, auto, auto i, auto j) { return j <= i; },
                                       Align::bottom_right),
       [shift](Index, Index, Index i, Index j) { return j <= i + shift; }},
      {"offset", visible<double>([](auto, auto, auto i, auto j) { return j < i; }, Align::top_left, -7),
       [](Index, Index, Index i, Index j) { return j < i - 7; }},
      {"values per token", visible<double>([group](auto b, auto, auto i, auto j) {
         return group(b, i) == group(b, j);
       }),
       [groups, n = g.len_kv](Index b, Index, Index i, Index j) {
         return groups[std::size_t(b * n + i)] == groups[std::size_t(b * n + j)];
       }},
      {"values per head and token",
       visible<double>([level, per_head](auto, auto h, auto i, auto j) {
         return level(0, h, i) <= level(0, h, j);
       }),
       [per_head, n = g.len_kv](Index, Index h, Index i, Index j) {
         return (*per_head)[std::size_t(h * n + i)] <= (*per_head)[std::size_t(h * n + j)];
       }},
      {"some queries and keys see nothing",
       visible<double>([](auto, auto, auto i, auto j) { return (i % 5 != 1) & !(j % 7 == 2); }),
       [](Index, Index, Index i, Index j) { return i % 5 != 1 && j % 7 != 2; }},
      {"nothing in the second head",
       visible<double>([](auto, auto h, auto, auto) { return h != 1; }),
       [](Index, Index h, Index, Index) { return h != 1; }},
      {"nothing", visible<double>([](auto, auto, auto, auto) { return false; }),
       [](Index, Index, Index, Index) { return false; }},
      {"all", visible<double>([](auto, auto, auto, auto) { return true; }),
       [](Index, Index, Index, Index) { return true; }},
      {"two functions",
       visible<double>([](auto, auto, auto i, auto j) { return j <= i; }) &
           visible<double>([](auto, auto, auto i, auto j) { return i - j < 20; }),
       [](Index, Index, Index i, Index j) { return j <= i && i - j < 20; }},
      {"beside other parts",
       visible<double>([](auto, auto, auto, auto j) { return j % 4 != 3; }) & window<double>(30, 2) &
           key_lengths<double>({g.len_kv, 11}),
       [n = g.len_kv](Index b, Index, Index i, Index j) {
         return j % 4 != 3 && j >= i - 30 && j <= i + 2 && j < (b == 0 ? n : 11);
       }},
      {"64 by 64 blocks",
       visible<double>([](auto, auto, auto i, auto j) { return i / 64 == j / 64; }),
       [](Index, Index, Index i, Index j) { return i / 64 == j / 64; }},
  };
}

// The same pairs as a boolean tensor.
struct Tensor {
  std::unique_ptr<bool[]> allowed;
  Mask<double> mask;

  Tensor(const Geometry& g, const Shows& shows)
      : allowed(new bool[std::size_t(g.query_rows() * g.len_kv + 1)]) {
    bool* at = allowed.get();
    for (Index b = 0; b < g.batch; ++b)
      for (Index h = 0; h < g.heads; ++h)
        for (Index i = 0; i < g.len_q; ++i)
          for (Index j = 0; j < g.len_kv; ++j) *at++ = shows(b, h, i, j);
    mask = boolean<double>({allowed.get(), Shape{g.batch, g.heads, g.len_q, g.len_kv}});
  }
};

// Every answer of the bound mask about every pair, about whole rows and about tiles.
void check_answers(const Case& c, const Geometry& g) {
  INFO(c.name);
  const BoundMask<double> bound(c.mask, g, "test", 2);
  Index wrong = 0, wrong_rows = 0;
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i) {
        bool any = false;
        for (Index j = 0; j < g.len_kv; ++j) {
          wrong += bound.visible(b, h, i, j) != c.shows(b, h, i, j);
          any = any || c.shows(b, h, i, j);
        }
        wrong_rows += bound.sees_any(b, h, i) != any;
      }
  CHECK(wrong == 0);
  CHECK(wrong_rows == 0);
  RandomSequence random(3);
  for (int n = 0; n < 200; ++n) {
    const Index b = random.below(g.batch), h = random.below(g.heads), i = random.below(g.len_q),
                j = random.below(g.len_kv);
    const Index rows = 1 + random.below(std::min<Index>(20, g.len_q - i)),
                keys = 1 + random.below(g.len_kv - j);
    Index seen = 0;
    for (Index r = i; r < i + rows; ++r)
      for (Index k = j; k < j + keys; ++k) seen += c.shows(b, h, r, k);
    const TileKind kind = bound.classify(b, h, i, rows, j, keys);
    if (kind == TileKind::empty) CHECK(seen == 0);
    if (kind == TileKind::full) CHECK(seen == rows * keys);
  }
}

[[nodiscard]] std::vector<Index> seen_by_one(const Mask<float>& mask, const Geometry& g) {
  const BoundMask<float> bound(mask, g, "test");
  std::vector<Index> counts;
  for (Index i = 0; i < g.len_q; ++i) {
    counts.push_back(0);
    for (Index j = 0; j < g.len_kv; ++j) counts.back() += bound.visible(0, 0, i, j);
  }
  return counts;
}

}  // namespace

TEST_CASE("a function of positions hides the pairs for which it is false") {
  for (const Case& c : functions(kG)) check_answers(c, kG);
  const Geometry one{1, 1, 1, 1, 1, 200, 4, 4};
  for (const Case& c : functions({2, 4, 4, 4, 1, 200, 4, 4}))
    if (c.name != "beside other parts") check_answers(c, {2, 4, 4, 4, 1, 200, 4, 4});
  for (const Case& c : functions(one))
    if (c.name == "causal") check_answers(c, one);
}

TEST_CASE("calls under a function of positions agree with the slow twin under a tensor of its pairs") {
  unsigned seed = 0;
  for (const Case& c : functions(kG)) {
    const Tensor tensor(kG, c.shows);
    const auto check = [&](const auto& op) {
      for (const Options& options :
           {Options{}, Options{.threads = 3, .key_tile = 1, .panel_vectors = 1},
            Options{.threads = 2, .key_tile = 64}}) {
        INFO(c.name << ", key_tile " << options.key_tile);
        const auto problem = heed_test::random_problem<double>(kG, op.extra_dim(kG), ++seed);
        reference::Problem<double> twin = problem;
        reference::use_mask(twin, tensor.mask);
        std::vector<double> grad_out = problem.query;
        grad_out.resize(std::size_t(kG.query_rows() * kG.dim_v), 0.25);
        const auto fast = heed_test::run_doors(op, problem, c.mask, grad_out, options);
        const auto out = reference::forward(op, twin).out;
        const auto slow = reference::gradients(op, twin, grad_out);
        CHECK(heed_test::deviation(fast.out, out, 1e-3) < 1e-11);
        CHECK(heed_test::deviation(fast.grad_query, slow.dquery, 1e-3) < 1e-11);
        CHECK(heed_test::deviation(fast.grad_key, slow.dkey, 1e-3) < 1e-11);
        CHECK(heed_test::deviation(fast.grad_value, slow.dvalue, 1e-3) < 1e-11);
      }
    };
    check(ScaledDot<double>{});
  }
}
