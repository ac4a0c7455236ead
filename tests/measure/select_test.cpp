// SPDX-License-Identifier: Apache-2.0
// Keys that queries choose: against plain loops over all scores, ties and NaN included; on any number of threads, from a
// cache, and joined with other masks.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/attention.hpp>
#include <heed/kv_cache.hpp>
#include <heed/measure/select.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

struct Tensor4 {
  Shape shape;
  std::vector<double> numbers;
  Tensor4(const Shape& s, double by)
      : shape(s), numbers(std::size_t(s.batch * s.heads * s.len * s.dim)) {
    for (std::size_t n = 0; n < numbers.size(); ++n)
      numbers[n] = std::sin(by * double(n + 1)) + 0.3 * std::cos(double(n * n % 97));
  }
  [[nodiscard]] TensorView<const double> view() const { return {numbers.data(), shape}; }
  [[nodiscard]] TensorView<double> view() { return {numbers.data(), shape}; }
};

[[nodiscard]] double dot(const double* a, const double* b, Index n) {
  return std::inner_product(a, a + n, b, 0.0);
}

using Kept = std::vector<std::vector<Index>>;  // of each (batch, head, query)

[[nodiscard]] Kept kept_by(const BlockLists& lists) {
  Kept all;
  for (std::size_t n = 0; n + 1 < lists.start.size(); ++n)
    all.emplace_back(lists.indices.begin() + lists.start[n],
                     lists.indices.begin() + lists.start[n + 1]);
  return all;
}

// The `count` largest of the candidates, one after the other, ascending.
[[nodiscard]] std::vector<Index> largest(std::vector<std::pair<double, Index>> candidates,
                                         Index count) {
  std::vector<Index> kept;
  for (Index n = 0; n < count && !candidates.empty(); ++n) {
    std::size_t best = 0;
    for (std::size_t c = 1; c < candidates.size(); ++c)
      if (candidates[c].first > candidates[best].first) best = c;  // the earlier one of equal ones
    kept.push_back(candidates[best].second);
    candidates.erase(candidates.begin() + std::ptrdiff_t(best));
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

constexpr Index kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 21, kKeys = 37, kDim = 5,
                kFirst = 16;

// f(b, h, i) for each row.
void for_rows(Index heads, const std::function<void(Index, Index, Index)>& f) {
  for (Index b = 0; b < kBatch; ++b)
    for (Index h = 0; h < heads; ++h)
      for (Index i = 0; i < kQueries; ++i) f(b, h, i);
}

// A causal mask for queries that are the last tokens, and one key that nobody sees.
[[nodiscard]] Mask<double> holes() {
  return causal<double>(Align::bottom_right) &
         visible<double>([](auto, auto, auto, auto j) { return j != 7; });
}

}  // namespace

TEST_CASE("queries keep the keys with the largest products", "[select]") {
  const Tensor4 query({kBatch, kHeads, kQueries, kDim}, 0.7),
      key({kBatch, kKvHeads, kKeys, kDim}, 1.3);
  Inputs<double> in{query.view(), key.view(), key.view()};
  in.first_query = kFirst;
  for (const double scale : {1.0, -0.5})
    for (const Index count : {1, 4, 100}) {
      Kept wanted;
      for_rows(kHeads, [&](Index b, Index h, Index i) {
        std::vector<std::pair<double, Index>> candidates;
        for (Index j = 0; j <= kFirst + i; ++j)
          if (j != 7)
            candidates.emplace_back(
                scale * dot(query.view().row(b, h, i), key.view().row(b, h / 2, j), kDim), j);
        wanted.push_back(largest(candidates, count));
      });
      for (const int threads : {1, 3}) {
        const BlockLists lists =
            select_keys(in, holes(), count, {.scale = scale, .threads = threads});
        CHECK(lists.query_block == 1);
        CHECK(lists.key_block == 1);
        CHECK(kept_by(lists) == wanted);
      }
    }
}

TEST_CASE("equal scores keep the earlier key, and a NaN is not lost", "[select]") {
  Tensor4 query({1, 1, 2, 2}, 0.1), key({1, 1, 6, 2}, 0.1);
  std::fill(key.numbers.begin(), key.numbers.end(), 1.0);
  const Inputs<double> in{query.view(), key.view(), key.view()};
  CHECK(kept_by(select_keys(in, {}, 3)) == Kept{{0, 1, 2}, {0, 1, 2}});
  key.numbers[8] = std::numeric_limits<double>::quiet_NaN();
  CHECK(kept_by(select_keys(in, {}, 3)) == Kept{{0, 1, 4}, {0, 1, 4}});
}

TEST_CASE("queries keep their own block and those with the largest means", "[select]") {
  constexpr Index block = 4, blocks = 10;
  const Tensor4 query({kBatch, kHeads, kQueries, kDim}, 0.9),
      key({kBatch, kKvHeads, kKeys, kDim}, 0.4);
  Inputs<double> in{query.view(), key.view(), key.view()};
  in.first_query = kFirst;
  Kept wanted;
  for_rows(kHeads, [&](Index b, Index h, Index i) {
    std::vector<std::pair<double, Index>> candidates;
    const Index own = (kFirst + i) / block;
    for (Index k = 0; k <= own && k < blocks; ++k) {
      double score = 0;
      const Index end = std::min((k + 1) * block, kKeys);
      for (Index j = k * block; j < end; ++j)
        score += dot(query.view().row(b, h, i), key.view().row(b, h / 2, j), kDim) /
                 double(end - k * block);
      candidates.emplace_back(k == own ? 1e9 : score, k);
    }
    wanted.push_back(largest(candidates, 3));
  });
  CHECK(kept_by(select_blocks(in, holes(), block, 3)) == wanted);
  // A block whose keys are all hidden is no candidate.
  const auto without = visible<double>([](auto, auto, auto, auto j) { return j >= 8; });
  for (const std::vector<Index>& row : kept_by(select_blocks(in, without, block, 100)))
    CHECK((!row.empty() && row[0] == 2));
}

TEST_CASE("an indexer chooses once for all heads", "[select]") {
  constexpr Index index_heads = 3;
  const Tensor4 query({kBatch, index_heads, kQueries, kDim}, 0.6),
      key({kBatch, 1, kKeys, kDim}, 0.8), weights({kBatch, index_heads, kQueries, 1}, 1.9);
  Kept wanted;
  for_rows(1, [&](Index b, Index, Index i) {
    std::vector<std::pair<double, Index>> candidates;
    for (Index j = 0; j <= kFirst + i; ++j) {
      double score = 0;
      for (Index a = 0; a < index_heads; ++a)
        score += weights.view()(b, a, i, 0) *
                 std::max(0.0, dot(query.view().row(b, a, i), key.view().row(b, 0, j), kDim));
      if (j != 7) candidates.emplace_back(score, j);
    }
    wanted.push_back(largest(candidates, 6));
  });
  const BlockLists lists =
      select_indexed<double>({query.view(), key.view(), weights.view(), kFirst}, holes(), 6);
  CHECK(lists.heads == 1);
  CHECK(kept_by(lists) == wanted);
}

TEST_CASE("blocks are weighed by windows that their key head's queries read", "[select]") {
  constexpr Index block = 6, count = 3;
  const Windows windows{4, 2};
  const Index some = windows.count(kKeys);
  REQUIRE(some == 17);
  const Tensor4 query({kBatch, kHeads, kQueries, kDim}, 0.5),
      key({kBatch, kKvHeads, some, kDim}, 1.1);
  Inputs<double> in{query.view(), key.view(), {}};
  in.first_query = kFirst;
  Kept wanted;
  for_rows(kHeads, [&](Index b, Index h, Index i) {
    const Index position = kFirst + i, own = position / block, kv = h / 2;
    std::vector<double> importance(7, 0.0);
    for (const Index head : {2 * kv, 2 * kv + 1}) {
      std::vector<double> w;
      for (Index j = 0; j < some && 2 * j + 3 <= position; ++j)
        w.push_back(
            std::exp(0.4 * dot(query.view().row(b, head, i), key.view().row(b, kv, j), kDim)));
      const double sum = std::accumulate(w.begin(), w.end(), 0.0);
      for (Index c = 0; c <= own; ++c)
        for (Index m = 0; m < 3; ++m)
          for (Index r = 0; r < 2; ++r) {
            const Index j = 3 * c + m - r;
            if (j >= 0 && j < Index(w.size()))
              importance[std::size_t(c)] += w[std::size_t(j)] / sum;
          }
    }
    importance[0] = importance[std::size_t(own)] = 1e9;
    std::vector<std::pair<double, Index>> candidates;
    for (Index c = 0; c <= own; ++c) candidates.emplace_back(importance[std::size_t(c)], c);
    wanted.push_back(largest(candidates, count));
  });
  const BlockLists lists = select_weighed(in, windows, kKeys, block, count, {.scale = 0.4});
  CHECK(lists.heads == kHeads);
  CHECK(kept_by(lists) == wanted);
}

TEST_CASE("a cache's queries choose what they chose as rows of the whole", "[select]") {
  const Tensor4 query({1, kHeads, kKeys, kDim}, 0.7), key({1, kKvHeads, kKeys, kDim}, 1.3);
  const Inputs<double> whole{query.view(), key.view(), key.view()};
  const BlockLists all = select_keys(whole, causal<double>(), 5);
  KvCache<double> cache(1, kKvHeads, kDim, kDim, 32);
  cache.append(key.view(), key.view());
  constexpr Index last = 3;
  const TensorView<const double> tail(query.numbers.data() + (kKeys - last) * kDim,
                                      {1, kHeads, last, kDim}, {0, kKeys * kDim, kDim});
  const Kept steps =
      kept_by(select_keys(cache.inputs(tail), causal<double>(Align::bottom_right), 5));
  const Kept rows = kept_by(all);
  for (Index h = 0; h < kHeads; ++h)
    for (Index i = 0; i < last; ++i)
      CHECK(steps[std::size_t(h * last + i)] == rows[std::size_t(h * kKeys + kKeys - last + i)]);
  // The lists are a mask: keys that are not chosen have no effect.
  Tensor4 out({1, kHeads, kKeys, kDim}, 0), moved = out;
  const auto mask = causal<double>() & block_lists<double>(all);
  forward(ScaledDot<double>{}, whole, mask, out.view());
  Tensor4 other = key;
  std::vector<char> chosen(std::size_t(kKeys), 0);
  for (Index h = 0; h < 2; ++h)
    for (const Index j : rows[std::size_t(h * kKeys + kKeys - 1)]) chosen[std::size_t(j)] = 1;
  for (Index j = 0; j < kKeys; ++j)
    for (Index c = 0; !chosen[std::size_t(j)] && c < kDim; ++c) other.view().row(0, 0, j)[c] = 1e6;
  Inputs<double> changed = whole;
  changed.value = other.view();
  forward(ScaledDot<double>{}, changed, mask, moved.view());
  for (Index h = 0; h < 2; ++h)
    for (Index c = 0; c < kDim; ++c)
      CHECK(out.view()(0, h, kKeys - 1, c) == moved.view()(0, h, kKeys - 1, c));
}

TEST_CASE("choices that cannot be made end in one sentence", "[select]") {
  const Tensor4 query({1, 4, 3, 5}, 0.7), key({1, 3, 9, 5}, 1.3), one({1, 1, 9, 5}, 0.2);
  const Inputs<double> uneven{query.view(), key.view(), {}}, in{query.view(), one.view(), {}};
  const auto holds = [](const std::string& said, const std::string& part) {
    INFO(said);
    CHECK(said.find(part) != std::string::npos);
  };
  holds(message_of([&] { (void)select_keys(uneven, {}, 2); }), "heads that share keys evenly");
  holds(message_of([&] { (void)select_keys(in, {}, 0); }), "count is 0, it must be positive");
  holds(message_of([&] { (void)select_blocks(in, {}, 0, 2); }), "block is 0, it must be positive");
  holds(message_of([&] {
          (void)select_weighed(in, Windows{4, 3}, 9, 6, 2);
        }),
        "size and block must be multiples of the stride");
  holds(message_of([&] {
          (void)select_weighed(in, Windows{4, 2}, 9, 6, 2);
        }),
        "key has 9 windows, 9 keys have 3");
  holds(message_of([&] {
          (void)select_indexed<double>({query.view(), one.view(), one.view()}, {}, 2);
        }),
        "weights has shape");
}
