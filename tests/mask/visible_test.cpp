// SPDX-License-Identifier: Apache-2.0
// Masks that are functions of positions: pair by pair against plain loops, in calls against the
// reference, also those that hide whole tiles or nothing.

#include "catch.hpp"
#include "door_case.hpp"
#include "message_of.hpp"
#include "pair_answers.hpp"

#include <heed/compiled.hpp>
#include <heed/core/narrow.hpp>
#include <heed/core/random.hpp>
#include <heed/explain.hpp>
#include <heed/mask/patterns.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

using namespace heed;
using heed_test::check_pairs;
using heed_test::message_of;
using heed_test::Shows;

namespace {

// A mask, and the same mask as a plain function.
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
  const TokenValues level(
      TensorView<const std::int32_t>(per_head->data(), {1, g.heads, 1, g.len_kv}));
  return {
      {"causal", visible<double>([](auto, auto, auto i, auto j) { return j <= i; }),
       [](Index, Index, Index i, Index j) { return j <= i; }},
      {"every third key",
       visible<double>([](auto, auto, auto i, auto j) { return (i + j) % 3 == 0; }),
       [](Index, Index, Index i, Index j) { return (i + j) % 3 == 0; }},
      {"another window per head and batch", visible<double>([](auto b, auto h, auto i, auto j) {
         return absolute(i - j) <= 3 + 4 * h + 2 * b;
       }),
       [](Index b, Index h, Index i, Index j) { return std::abs(i - j) <= 3 + 4 * h + 2 * b; }},
      {"bottom right",
       visible<double>([](auto, auto, auto i, auto j) { return j <= i; }, Align::bottom_right),
       [shift](Index, Index, Index i, Index j) { return j <= i + shift; }},
      {"offset",
       visible<double>([](auto, auto, auto i, auto j) { return j < i; }, Align::top_left, -7),
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
      {"two functions", visible<double>([](auto, auto, auto i, auto j) {
                          return j <= i;
                        }) & visible<double>([](auto, auto, auto i, auto j) { return i - j < 20; }),
       [](Index, Index, Index i, Index j) { return j <= i && i - j < 20; }},
      {"beside other parts",
       visible<double>([](auto, auto, auto, auto j) { return j % 4 != 3; }) &
           window<double>(30, 2) & key_lengths<double>({g.len_kv, 11}),
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

void check_answers(const Case& c, const Geometry& g) {
  INFO(c.name);
  check_pairs(c.mask, g, c.shows);
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

// Compares both passes with the reference's under a tensor of the same pairs.
template <class Op>
void check_calls(const Op& op, const Case& c, const Geometry& g) {
  const Tensor tensor(g, c.shows);
  const auto problem = heed_test::random_problem<double>(g, op.extra_dim(g), 11);
  reference::Problem<double> twin = problem;
  reference::use_mask(twin, tensor.mask);
  std::vector<double> grad_out;
  for (Index n = 0; n < g.query_rows() * g.dim_v; ++n)
    grad_out.push_back(std::sin(1.7 * double(n) + 0.3));
  const auto out = reference::forward(op, twin).out;
  const auto slow = reference::gradients(op, twin, grad_out);
  for (const Options& options :
       {Options{}, Options{.threads = 3, .key_tile = 1, .panel_vectors = 1},
        Options{.threads = 2, .key_tile = 64}}) {
    INFO(c.name << ", len_q " << g.len_q << ", key_tile " << options.key_tile);
    const auto fast = heed_test::run_doors(op, problem, c.mask, grad_out, options);
    CHECK(heed_test::deviation(fast.out, out, 1e-3) < 1e-11);
    CHECK(heed_test::deviation(fast.grad_query, slow.dquery, 1e-3) < 1e-11);
    CHECK(heed_test::deviation(fast.grad_key, slow.dkey, 1e-3) < 1e-11);
    CHECK(heed_test::deviation(fast.grad_value, slow.dvalue, 1e-3) < 1e-11);
  }
}

TEST_CASE(
    "calls under a function of positions agree with the slow twin under a tensor of its pairs") {
  for (const Case& c : functions(kG)) check_calls(ScaledDot<double>{}, c, kG);
}
TEST_CASE("whole rows under a function of positions agree with the slow twin") {
  const Geometry g{2, 2, 2, 2, 37, 41, 4, 4};
  ResonantOde<double> ode;
  ode.normaliser.steps = 2;
  for (const Case& c : functions(g)) {
    check_calls(ode, c, g);
    Differential<double> differential;
    differential.normaliser.lambda = {0.3};
    check_calls(differential, c, g);
  }
}
TEST_CASE("one query and few of grouped heads see what a function of positions shows") {
  for (const Index len_q : {1, 3}) {
    const Geometry g{2, 4, 4, 2, len_q, 150, 5, 3};
    for (const Case& c : functions(g)) check_calls(ScaledDot<double>{}, c, g);
  }
}

TEST_CASE("what a function of positions hides may be NaN") {
  const Geometry g{1, 2, 2, 2, 70, 130, 8, 8};
  const Mask<float> mask =
      visible<float>([](auto, auto, auto i, auto j) { return (j % 3 != 1) & (j >= i); });
  OpCall<Dar<float>> clean({}, g, mask), spoilt({}, g, mask);
  for (Index h = 0; h < g.heads; ++h)
    for (Index j = 1; j < g.len_kv; j += 3)
      for (Index d = 0; d < 8; ++d) {
        const auto at = std::size_t((h * g.len_kv + j) * 8 + d);
        spoilt.key[at] = spoilt.value[at] = std::nanf("");
      }
  for (OpCall<Dar<float>>* call : {&clean, &spoilt}) {
    call->forward();
    call->backward();
  }
  CHECK(clean.out == spoilt.out);
  CHECK(clean.grad_query == spoilt.grad_query);
  CHECK(clean.grad_key == spoilt.grad_key);
  CHECK(clean.grad_value == spoilt.grad_value);
}

TEST_CASE("a function of positions has the same bits for any number of threads") {
  const Geometry g{2, 4, 4, 2, 300, 260, 16, 16};
  const TokenValues group(random_numbers(g.batch * 300, 3, 9), g.batch);
  const Mask<float> mask = visible<float>([group](auto b, auto h, auto i, auto j) {
    return (group(b, i) == group(b, j)) | (i - j == h);
  });
  const auto run = [&](int threads) {
    OpCall<ScaledDot<float>> call({}, g, mask, {.threads = threads});
    call.forward();
    call.backward();
    return std::vector{call.out, call.grad_query, call.grad_key, call.grad_value};
  };
  const auto one = run(1);
  for (const int threads : {2, 3, 5}) CHECK(run(threads) == one);
}

TEST_CASE("a function of positions hides in mixed precision and from tensors of 16 bits") {
  const Geometry g{1, 4, 4, 2, 200, 220, 16, 16};
  const Mask<float> mask = visible<float>(
      [](auto, auto h, auto i, auto j) { return (i / 64 == j / 64) & (j % 5 != h); });
  OpCall<ScaledDot<float>> exact({}, g, mask), mixed({}, g, mask, {.precision = Precision::mixed});
  for (auto* call : {&exact, &mixed}) {
    call->forward();
    call->backward();
  }
  const auto close = [](const auto& a, const auto& b) {
    double top = 0, error = 0;
    for (std::size_t n = 0; n < a.size(); ++n) {
      top = std::max(top, std::abs(double(a[n])));
      error = std::max(error, std::abs(double(a[n]) - double(b[n])));
    }
    return error < 0.03 * top;  // bfloat16 has 8 bits
  };
  CHECK(close(exact.out, mixed.out));
  CHECK(close(exact.grad_key, mixed.grad_key));

  const auto narrow = [](const std::vector<float>& x) {
    return std::vector<bfloat16>(x.begin(), x.end());
  };
  const auto q = narrow(exact.query), k = narrow(exact.key), v = narrow(exact.value);
  const auto wide = [](const std::vector<bfloat16>& x) {
    return std::vector<float>(x.begin(), x.end());
  };
  const auto wide_q = wide(q), wide_k = wide(k), wide_v = wide(v);
  std::vector<float> from_narrow(exact.out.size()), from_wide(exact.out.size());
  using View = TensorView<const float>;
  using Narrow = TensorView<const bfloat16>;
  forward(ScaledDot<float>{},
          {Narrow(q.data(), g.query_shape()), Narrow(k.data(), g.key_shape()),
           Narrow(v.data(), g.value_shape())},
          mask, TensorView<float>(from_narrow.data(), g.out_shape()));
  forward(ScaledDot<float>{},
          {View(wide_q.data(), g.query_shape()), View(wide_k.data(), g.key_shape()),
           View(wide_v.data(), g.value_shape())},
          mask, TensorView<float>(from_wide.data(), g.out_shape()));
  CHECK(from_narrow == from_wide);
}

// A function that counts the vectors of pairs that it is asked for.
TEST_CASE("a function that does not read batch and head is asked about the pairs of one head") {
  const Geometry g{3, 4, 4, 4, 64, 128, 4, 4};
  std::atomic<Index> asked{0};
  const Index vectors = 64 * 128 / Positions::width;
  const auto count = [&](const Mask<float>& mask) {
    asked = 0;
    const BoundMask<float> bound(mask, g, "test");
    return asked.load() - 1;  // one further pair tells what the function reads
  };
  CHECK(count(visible<float>([&](auto, auto, auto i, auto j) {
          ++asked;
          return j <= i;
        })) == vectors);
  CHECK(count(visible<float>([&](auto, auto h, auto i, auto j) {
          ++asked;
          return j <= i + h;
        })) == 4 * vectors);
  CHECK(count(visible<float>([&](auto b, auto h, auto i, auto j) {
          ++asked;
          return j + b <= i + h;
        })) == 12 * vectors);
}

TEST_CASE("a function is asked about tiles that it shows in part, and about no others") {
  const Geometry g{1, 1, 1, 1, 256, 256, 8, 8};
  std::atomic<Index> asked{0};
  const Mask<float> mask = visible<float>([&](auto, auto, auto i, auto j) {
    ++asked;
    return (i / 64 == j / 64) & ((i < 64) | (j % 2 == 0));
  });
  OpCall<ScaledDot<float>> call({}, g, BlockMask<float>(mask, g), {.threads = 1, .key_tile = 64});
  asked = 0;
  call.forward();
  // Three of four blocks of 64 queries have one of 64 keys that is shown in part; the first one is shown as a whole.
  CHECK(asked == 3 * 64 * 64 / Positions::width);
}

TEST_CASE("values per token are refused where there are none") {
  const Geometry g{2, 2, 2, 2, 20, 30, 4, 4};
  const auto asks = [&](const Mask<float>& mask) {
    return message_of([&] { OpCall<ScaledDot<float>>({}, g, mask).forward(); });
  };
  const TokenValues few(std::vector<Index>(2 * 29), 2), one_batch(std::vector<Index>(30));
  CHECK(asks(visible<float>([few](auto b, auto, auto, auto j) { return few(b, j) == 0; })) ==
        "TokenValues: token 29 is read, there are values for [0, 29)");
  CHECK(asks(visible<float>([few](auto b, auto, auto i, auto) { return few(b, i) == 0; },
                            Align::top_left, -1)) ==
        "TokenValues: token -1 is read, there are values for [0, 29)");
  CHECK(asks(visible<float>([few](auto b, auto, auto i, auto) { return few(b + 1, i) == 0; })) ==
        "TokenValues: batch 2 is read, there are values for [0, 2)");
  CHECK_NOTHROW(
      OpCall<ScaledDot<float>>({}, g, visible<float>([one_batch](auto b, auto, auto, auto j) {
                                 return one_batch(b, j) == 0;
                               }))
          .forward());
  const std::vector<std::int32_t> memory(3 * 30);
  const TokenValues heads(TensorView<const std::int32_t>(memory.data(), {1, 3, 1, 30}));
  CHECK(asks(visible<float>([heads](auto b, auto, auto, auto j) { return heads(b, j) == 0; })) ==
        "TokenValues: values differ by head, of which there are 3; they are read without one");
  CHECK(message_of([] { TokenValues(std::vector<Index>(7), 2); }) ==
        "TokenValues: 7 values are no whole number of tokens for 2 batches");
  CHECK(message_of([] { TokenValues(std::vector<Index>{Index(1) << 31}); }) ==
        "TokenValues: a value is 2147483648, it must fit 32 bits");
  CHECK(message_of([&] {
          TokenValues(TensorView<const std::int32_t>(memory.data(), {1, 1, 3, 30}));
        }) == "TokenValues: values have shape (1,1,3,30), len must be 1; dim counts tokens");
}

TEST_CASE("a backward call needs a function of positions where forward had one") {
  const Geometry g{1, 1, 1, 1, 8, 8, 4, 4};
  OpCall<ScaledDot<float>> call({}, g,
                                visible<float>([](auto, auto, auto i, auto j) { return j <= i; }));
  call.forward();
  call.mask = causal<float>();
  CHECK(message_of([&] { call.backward(); }).find("without bands, this one is with") !=
        std::string::npos);
  call.mask = {};
  CHECK(message_of([&] {
          call.backward();
        }).find("with a function of positions, this one is without") != std::string::npos);
}

TEST_CASE("a backward call needs the function where it stood in forward") {
  const auto causal_at = [](Align align, Index offset) {
    return visible<float>([](auto, auto, auto i, auto j) { return j <= i; }, align, offset);
  };
  OpCall<ScaledDot<float>> call({}, {1, 1, 1, 1, 4, 8, 4, 4}, causal_at(Align::top_left, 1));
  call.forward();
  for (const auto& other : {causal_at(Align::bottom_right, 1), causal_at(Align::top_left, 2)}) {
    call.mask = other;
    CHECK(message_of([&] { call.backward(); }).find("is of a call with other") !=
          std::string::npos);
  }
}
