// SPDX-License-Identifier: Apache-2.0
// Queries that have lists of keys of their own: against a boolean mask of the same pairs, which the engine takes in tiles.

#include "catch.hpp"
#include "golden_case.hpp"
#include "own_op.hpp"

#include <heed/compiled.hpp>
#include <heed/core/random.hpp>
#include <heed/explain.hpp>
#include <heed/kv_cache.hpp>
#include <heed/mask/block_mask.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

template <class T>
struct Sharp {
  Param<T> factor = T(1);
  static constexpr auto parameters = std::tuple{named("factor", &Sharp::factor)};
  using PlaceFree = Sharp;
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.logit;
  }
};

template <class T>
struct Far {
  using PlaceFree = Far;
  template <class S>
  S column(const auto& q, const auto& k, const auto&) const {
    return math::absolute(S(q[0] - k[0]));
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return -pair.logit;
  }
};

// About a third of the blocks of each query, of few queries none and of few all.
BlockLists random_lists(const Geometry& g, Index key_block, Index batch, Index heads,
                        unsigned seed) {
  RandomSequence random(seed);
  BlockLists lists{1, key_block, {0}, {}, batch, heads};
  for (Index row = 0; row < batch * heads * g.len_q; ++row) {
    const Index of = row % 7 == 3 ? 0 : row % 11 == 5 ? 1 : 3;
    for (Index k = 0; k < (g.len_kv + key_block - 1) / key_block; ++k)
      if (of > 0 && random.below(of) == 0) lists.indices.push_back(k);
    lists.start.push_back(Index(lists.indices.size()));
  }
  return lists;
}
// The same pairs as a boolean tensor.
std::unique_ptr<bool[]> pairs_of(const BlockLists& l, const Geometry& g) {
  std::unique_ptr<bool[]> allowed(new bool[std::size_t(g.batch * g.heads * g.len_q * g.len_kv)]());
  bool* row = allowed.get();
  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i, row += g.len_kv) {
        const Index at = ((l.batch == 1 ? 0 : b) * l.heads + (l.heads == 1 ? 0 : h)) * g.len_q + i;
        for (Index n = l.start[std::size_t(at)]; n < l.start[std::size_t(at + 1)]; ++n)
          for (Index j = l.indices[std::size_t(n)] * l.key_block;
               j < std::min(g.len_kv, (l.indices[std::size_t(n)] + 1) * l.key_block); ++j)
            row[j] = true;
      }
  return allowed;
}

template <class T>
void check(const Geometry& g, const BlockLists& lists, const Mask<T>& beside, double tolerance,
           bool cap = false) {
  const auto allowed = pairs_of(lists, g);
  Mask<T> listed = beside & block_lists<T>(lists),
          tensor = beside & boolean<T>({allowed.get(), Shape{g.batch, g.heads, g.len_q, g.len_kv}});
  if (cap) listed.soft_cap = tensor.soft_cap = T(1.5);
  OpCall<ScaledDot<T>> found({}, g, listed), expected({}, g, tensor);
  const std::vector<NamedTensor> got = results_of(found), want = results_of(expected);
  REQUIRE(got.size() == want.size());
  for (std::size_t n = 0; n < got.size(); ++n) {
    INFO(got[n].name << ", blocks of " << lists.key_block << ", " << lists.heads << " heads");
    CHECK(deviation(got[n].values, want[n].values, 1e-3) < tolerance);
  }
  CHECK(deviation(found.saved.lse, expected.saved.lse, 1e-3) < tolerance);
}

}  // namespace

TEST_CASE("queries read the keys of their lists, of all heads and of their own", "[listed_keys]") {
  for (const Index block : {1, 3, 16}) {
    const Geometry g{2, 4, 4, 2, 37, 90, 6, 5};
    for (const Index heads : {1, 4}) {
      const BlockLists lists = random_lists(g, block, heads == 1 ? 1 : 2, heads, unsigned(block));
      check<double>(g, lists, {}, 1e-12);
      check<double>(g, lists, causal<double>(Align::bottom_right), 1e-12, true);
      check<double>(g, lists, window<double>(9, 20) & key_lengths<double>({77, 0}), 1e-12);
      check<float>(g, lists, causal<float>(), 2e-5);
    }
  }
}

TEST_CASE("many heads read copies of the keys of a list", "[listed_keys]") {
  const Geometry g{1, 24, 24, 2, 20, 61, 16, 7};
  check<float>(g, random_lists(g, 1, 1, 1, 3), causal<float>(Align::bottom_right), 2e-5);
  check<double>(g, random_lists(g, 5, 1, 1, 3), window<double>(13, 0, Align::bottom_right), 1e-12);
}

TEST_CASE("scores of one's own read lists of keys", "[listed_keys]") {
  const Geometry g{1, 4, 4, 2, 20, 40, 6, 5};
  const BlockLists lists = random_lists(g, 1, 1, 1, 8);
  const auto allowed = pairs_of(lists, g);
  const auto compare = [&](const auto& op) {
    using Op = std::decay_t<decltype(op)>;
    OpCall<Op> found(op, g, block_lists<double>(lists)),
        expected(op, g, boolean<double>({allowed.get(), Shape{1, 4, 20, 40}}));
    found.forward();
    expected.forward();
    CHECK(deviation(found.out, expected.out, 1e-3) < 1e-12);
  };
  OwnAttention<Sharp, double> op;
  op.score.factor = {0.5, 1, 2, 4};  // heads with numbers of their own keep them
  compare(op);
  compare(OwnAttention<Far, double>{});
}

TEST_CASE("lists of keys have the same bits on any number of threads", "[listed_keys]") {
  const Geometry g{1, 4, 4, 2, 150, 150, 8, 8};
  check_bits_on_threads(OpCall<ScaledDot<float>>(
      {}, g, causal<float>() & block_lists<float>(random_lists(g, 1, 1, 4, 5))));
}

TEST_CASE("lists speak of the keys of a cache, whatever its storage and pages", "[listed_keys]") {
  constexpr Index heads = 4, kv_heads = 2, len = 150, dim = 8, queries = 5;
  const Geometry g{1, heads, heads, kv_heads, queries, len, dim, dim};
  OpCall<ScaledDot<float>> whole({}, g);
  const TensorView<const float> query(whole.query.data(), g.query_shape()),
      key(whole.key.data(), g.key_shape()), value(whole.value.data(), g.value_shape());
  const auto run = [&](const Inputs<float>& in, const Mask<float>& mask) {
    std::vector<float> out(std::size_t(heads * queries * dim));
    forward(ScaledDot<float>{}, in, mask, {out.data(), {1, heads, queries, dim}});
    return out;
  };
  for (const Index block : {1, 4}) {
    const BlockLists lists = random_lists(g, block, 1, 1, 9);
    const auto allowed = pairs_of(lists, g);
    const Mask<float> bottom = causal<float>(Align::bottom_right),
                      listed = bottom & block_lists<float>(lists),
                      tensor =
                          bottom & boolean<float>({allowed.get(), Shape{1, heads, queries, len}});
    const auto compare = [&](auto& cache, double tolerance) {
      cache.append(key, value);
      CHECK(deviation(run(cache.inputs(query), listed), run(cache.inputs(query), tensor), 1e-3) <
            tolerance);
    };
    KvCache<float> plain(1, kv_heads, dim, dim, kPanelLanes<float>);
    compare(plain, 2e-6);
    KvCache<bfloat16> narrow(1, kv_heads, dim, dim, kPanelLanes<float>);
    compare(narrow, 2e-6);
    KvCache<std::int8_t> scaled(1, kv_heads, dim, dim, kPanelLanes<float>);
    compare(scaled, 2e-6);
  }
}

TEST_CASE("keys that no list names may hold anything", "[listed_keys]") {
  const Geometry g{1, 2, 2, 1, 30, 40, 8, 8};
  BlockLists lists{1, 1, {0}, {}};
  for (Index i = 0; i < g.len_q; ++i) {
    for (Index j = i % 2; j < g.len_kv; j += 4) lists.indices.push_back(j);
    lists.start.push_back(Index(lists.indices.size()));
  }
  OpCall<ScaledDot<float>> call({}, g, block_lists<float>(lists));
  const auto wanted = results_of(call);
  for (Index j = 0; j < g.len_kv; ++j)
    for (std::vector<float>* rows : {&call.key, &call.value})
      if (j % 4 > 1) std::fill_n(rows->begin() + j * 8, 8, std::numeric_limits<float>::quiet_NaN());
  check_results(call, wanted);
}

TEST_CASE("tables of single keys need no memory for pairs", "[listed_keys]") {
  // 20,000 by 20,000 pairs are more than a table of kinds may have.
  const Geometry g{1, 1, 1, 1, 20000, 20000, 4, 4};
  BlockLists lists{1, 1, {0}, {}};
  for (Index i = 0; i < g.len_q; ++i) {
    if (i > 0) lists.indices.push_back(i / 2);
    if (i > 1) lists.indices.push_back(i);
    lists.start.push_back(Index(lists.indices.size()));
  }
  OpCall<ScaledDot<float>> call({}, g, causal<float>() & block_lists<float>(lists));
  call.forward();
  CHECK(call.out[0] == 0);
  const float* const last = call.value.data() + (g.len_kv - 1) * 4;
  const float* const half = call.value.data() + (g.len_kv - 1) / 2 * 4;
  const float mixed = call.out[std::size_t((g.len_q - 1) * 4)];
  CHECK(mixed >= std::min(last[0], half[0]));
  CHECK(mixed <= std::max(last[0], half[0]));
  const Explanation e = explain(call.op, g, call.mask);
  CHECK(e.units == g.len_q);
  CHECK(e.computed_flops == 16.0 * double(lists.indices.size()));
  CHECK(e.text().find("each query has a list of keys of its own") != std::string::npos);
  CHECK(BlockMask<float>(block_lists<float>(lists), g).bytes() == 0);
}
