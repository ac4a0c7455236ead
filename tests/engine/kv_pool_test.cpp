// SPDX-License-Identifier: Apache-2.0
// Sequences in a pool have the bits of caches of their own, whatever they share and whichever sequences decode beside them.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/compiled.hpp>
#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>
#include <heed/kv_cache.hpp>
#include <heed/kv_pool.hpp>
#include <heed/mask/visible.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/plug/features.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

using namespace heed;
using namespace heed_test;

namespace {

// Whole panels; long enough for the parts of pages below.
constexpr Index kPage = std::max<Index>(32, kPanelLanes<float>);

// A score that no library contains: kv_pool.hpp brings the code of its calls along.
template <class T>
struct Closeness {
  using Features = SquaredNorms;
  Param<T> pull = T(0.3);
  static constexpr auto parameters = std::tuple{named("pull", &Closeness::pull)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * squared_distance(pair);
  }
};

// Rows of tokens by their numbers: number n has the same rows in every tensor that holds it.
std::vector<float> rows_of_tokens(const std::vector<Index>& tokens, Index heads, Index dim,
                                  std::uint64_t stream) {
  std::vector<float> rows;
  for (Index h = 0; h < heads; ++h)
    for (const Index token : tokens)
      for (Index c = 0; c < dim; ++c)
        rows.push_back(
            float(CounterRandom(3, stream).normal(std::uint64_t((token * heads + h) * dim + c))));
  return rows;
}

// A pool beside caches of each of its sequences.
template <class Stored, class Op>
class Twin {
 public:
  Twin(Op with, const Geometry& g, Index pages)
      : op(std::move(with)), g_(g), pool(g.kv_heads, g.dim_qk, g.dim_v, pages, kPage) {}

  Op op;

  [[nodiscard]] Index add() {
    const Index number = pool.add();
    tokens[number];
    caches[number] = new_cache();
    return number;
  }
  [[nodiscard]] Index fork(Index from) {
    const Index number = pool.fork(from);
    tokens[number] = tokens[from];
    caches[number] = new_cache();
    const std::vector<float> key = rows_of_tokens(tokens[from], g_.kv_heads, g_.dim_qk, 1),
                             value = rows_of_tokens(tokens[from], g_.kv_heads, g_.dim_v, 2);
    const Index len = Index(tokens[from].size());
    caches[number]->append(view(key, g_.kv_heads, len, g_.dim_qk),
                           view(value, g_.kv_heads, len, g_.dim_v));
    return number;
  }
  void remove(Index number) {
    pool.remove(number);
    tokens.erase(number);
    caches.erase(number);
  }
  void truncate(Index number, Index len) {
    pool.truncate(number, len);
    caches[number]->truncate(len);
    tokens[number].resize(std::size_t(len));
  }
  // Adds counts[n] tokens to each sequence, and makes a call with them as queries.
  void grow(const std::vector<Index>& numbers, const std::vector<Index>& counts, int threads) {
    std::vector<Index> at(1, 0), fresh;
    for (const Index count : counts) {
      at.push_back(at.back() + count);
      for (Index n = 0; n < count; ++n) fresh.push_back(next_++);
    }
    const auto append_to = [&](auto&& append, const std::vector<Index>& of) {
      const Index len = Index(of.size());
      const std::vector<float> key = rows_of_tokens(of, g_.kv_heads, g_.dim_qk, 1),
                               value = rows_of_tokens(of, g_.kv_heads, g_.dim_v, 2);
      append(view(key, g_.kv_heads, len, g_.dim_qk), view(value, g_.kv_heads, len, g_.dim_v));
    };
    append_to([&](const auto& key, const auto& value) { pool.append(numbers, key, value, at); },
              fresh);
    const Options options{.threads = threads};
    const auto mask = causal<float>(Align::bottom_right);
    const Index total = at.back(), extra_dim = op.extra_dim(g_);
    const std::vector<float> query = rows_of_tokens(fresh, g_.query_heads, g_.dim_qk, 3),
                             extra = rows_of_tokens(fresh, g_.heads, extra_dim, 4);
    std::vector<float> out(std::size_t(g_.heads * total * g_.dim_v), -1.0F);
    StoredView<const float> extra_view;
    if (extra_dim > 0) extra_view = view(extra, g_.heads, total, extra_dim);
    const PackedInputs<float> in =
        pool.inputs(numbers, view(query, g_.query_heads, total, g_.dim_qk), extra_view, at);
    forward(op, in, mask, {out.data(), {1, g_.heads, total, g_.dim_v}}, nullptr, options);
    for (std::size_t n = 0; n < numbers.size(); ++n) {
      const std::vector<Index> own(fresh.begin() + at[n], fresh.begin() + at[n + 1]);
      const Index count = counts[n];
      KvCache<Stored>& cache = *caches[numbers[n]];
      append_to([&](const auto& key, const auto& value) { cache.append(key, value); }, own);
      tokens[numbers[n]].insert(tokens[numbers[n]].end(), own.begin(), own.end());
      const std::vector<float> q = rows_of_tokens(own, g_.query_heads, g_.dim_qk, 3),
                               e = rows_of_tokens(own, g_.heads, extra_dim, 4);
      std::vector<float> alone(std::size_t(g_.heads * count * g_.dim_v), -2.0F);
      StoredView<const float> own_extra;
      if (extra_dim > 0) own_extra = view(e, g_.heads, count, extra_dim);
      forward(op, cache.inputs(view(q, g_.query_heads, count, g_.dim_qk), own_extra), mask,
              {alone.data(), {1, g_.heads, count, g_.dim_v}}, nullptr, options);
      bool same = true;
      for (Index h = 0; h < g_.heads; ++h)
        same =
            same && (count == 0 || std::memcmp(out.data() + (h * total + at[n]) * g_.dim_v,
                                               alone.data() + h * count * g_.dim_v,
                                               std::size_t(count * g_.dim_v) * sizeof(float)) == 0);
      INFO("sequence " << numbers[n] << " of " << cache.len() << " tokens");
      CHECK(same);
    }
  }

 private:
  [[nodiscard]] std::unique_ptr<KvCache<Stored>> new_cache() const {
    return std::make_unique<KvCache<Stored>>(1, g_.kv_heads, g_.dim_qk, g_.dim_v, kPage);
  }
  [[nodiscard]] static StoredView<const float> view(const std::vector<float>& rows, Index heads,
                                                    Index len, Index dim) {
    return {rows.data(), Shape{1, heads, len, dim}};
  }

  Geometry g_;
  Index next_ = 0;

 public:
  KvPool<Stored> pool;
  std::map<Index, std::vector<Index>> tokens;
  std::map<Index, std::unique_ptr<KvCache<Stored>>> caches;
};

// Sequences of all lengths that share, part, shrink and go.
template <class Stored, class Op>
void live(const Op& op, const Geometry& g) {
  Twin<Stored, Op> twin(op, g, 16);
  const Index a = twin.add(), b = twin.add();
  twin.grow({a, b}, {kPage + 9, 3}, 2);
  const Index c = twin.fork(a), d = twin.fork(a), e = twin.fork(b);
  CHECK(twin.pool.free_pages() == 13);       // two of a, one of b
  twin.grow({c, a, b, d}, {1, 1, 1, 2}, 1);  // all write behind shared rows; one keeps the page
  CHECK(twin.pool.free_pages() == 10);       // a, c and d share one page of four; b and e none
  twin.grow({e, c, d}, {1, 5, 1}, 4);
  twin.remove(a);
  twin.grow({c, b, e}, {kPage - 15, 2 * kPage, 0}, 3);
  twin.truncate(c, kPage + 2);
  twin.truncate(b, 0);
  const Index f = twin.fork(c);  // c's last page was cut, and is shared again
  twin.grow({f, b, c}, {2, 4, 1}, 2);
  twin.remove(d);
  for (int n = 0; n < 3; ++n) twin.grow({b, c, e, f}, {1, 1, 1, 1}, n + 1);
  for (const Index last : {b, c, e, f}) twin.remove(last);
  CHECK(twin.pool.free_pages() == 16);
  CHECK(twin.pool.sequences() == 0);
}

}  // namespace

TEST_CASE("sequences of a pool have the bits of caches, with every variant", "[kv_pool]") {
  const Geometry g{1, 4, 4, 2, 1, 1, 8, 8};
  for_each_variant<float>(g, [&]<class Op>(const Variant<Op>& variant) {
    INFO(variant.name);
    live<float>(variant.op, variant.geometry);
  });
  live<float>(OwnAttention<Closeness, float>{}, g);
}

TEMPLATE_TEST_CASE("pools of narrow numbers", "[kv_pool]", bfloat16, half, std::int8_t) {
  const Geometry g{1, 4, 4, 2, 1, 1, 8, 8};
  live<TestType>(ScaledDot<float>{}, g);
  live<TestType>(Dar<float>{}, g);
}

TEST_CASE("long and short sequences of a pool are read in parts as caches are", "[kv_pool]") {
  Twin<float, ScaledDot<float>> twin({}, {1, 1, 1, 1, 1, 1, 4, 4}, 3 * kPartKeys / kPage + 8);
  const Index a = twin.add(), b = twin.add(), c = twin.add();
  twin.grow({a, b, c}, {2 * kPartKeys + 5, 7, kPartKeys}, 2);
  for (const int threads : {1, 4}) twin.grow({a, b, c}, {1, 1, 1}, threads);
}

TEMPLATE_TEST_CASE("a pool is asked for no sequences", "[kv_pool]", float, std::int8_t) {
  KvPool<TestType> pool(2, 4, 6, 3, kPage);
  const StoredView<const float> query(nullptr, {1, 4, 0, 4}), key(nullptr, {1, 2, 0, 4}),
      value(nullptr, {1, 2, 0, 6});
  pool.append(std::vector<Index>{}, key, value);
  CHECK(pool.free_pages() == 3);
  const StoredView<float> out(nullptr, {1, 4, 0, 6});
  const PackedInputs<float> in = pool.inputs({}, query);
  Saved<float> saved;
  forward(Dar<float>{}, in, causal<float>(Align::bottom_right), out, &saved);
  CHECK(message_of([&] {
          forward(Dar<float>{}, pool.inputs({}, {nullptr, {1, 3, 0, 4}}), {}, out);
        }) == "heed::forward: 3 heads cannot share 2 kv_heads evenly");
  CHECK(message_of([&] {
          forward(Dar<float>{}, in, {}, StoredView<float>(nullptr, {1, 4, 0, 4}));
        }) == "heed::forward: out has shape (1,4,0,4), it must be (1,4,0,6)");
  CHECK(message_of([&] {
          (void)pool.inputs({}, {nullptr, {1, 4, 1, 4}});
        }) == "KvPool::inputs: queries ends with 0, query has len 1");
}

TEST_CASE("a pool says what does not fit, and stays as it was", "[kv_pool]") {
  KvPool<float> pool(2, 4, 4, 3, kPage);
  std::vector<float> rows(std::size_t(2 * 5 * kPage * 4));
  const auto view = [&](Index len) { return StoredView<const float>(rows.data(), {1, 2, len, 4}); };
  const auto say = [&](auto&& change) { return message_of(change); };
  const Index a = pool.add(), b = pool.add();
  pool.append(a, view(kPage + 1), view(kPage + 1));
  CHECK(pool.free_pages() == 1);
  CHECK(say([&] { pool.append(b, view(kPage + 1), view(kPage + 1)); }) ==
        "KvPool::append: the pool is full: 2 pages are needed, 1 of 3 are free");
  CHECK(say([&] {
          pool.append({a, b}, view(kPage + 1), view(kPage + 1), {0, kPage, kPage + 1});
        }) == "KvPool::append: the pool is full: 2 pages are needed, 1 of 3 are free");
  CHECK(pool.len(a) == kPage + 1);
  CHECK(pool.len(b) == 0);
  const Index c = pool.fork(a), d = pool.fork(a);
  CHECK(pool.free_pages() == 1);
  CHECK(say([&] {
          pool.append({c, d}, view(2), view(2));
        }) == "KvPool::append: the pool is full: 2 pages are needed, 1 of 3 are free");
  pool.remove(a);
  pool.append({c, d}, view(2), view(2));  // one copies, the other is then the only reader
  CHECK(pool.free_pages() == 0);
  CHECK(say([&] { pool.append(b, view(1), view(1)); }) ==
        "KvPool::append: the pool is full: 1 page is needed, 0 of 3 are free");
  CHECK(say([&] { pool.remove(a); }) == "KvPool::remove: sequence 0 was removed before");
  CHECK(say([&] { (void)pool.len(7); }) ==
        "KvPool::len: sequence 7 is unknown, the pool has given 4 numbers, from 0 on");
  CHECK(say([&] { (void)pool.fork(-1); }) ==
        "KvPool::fork: sequence -1 is unknown, the pool has given 4 numbers, from 0 on");
  CHECK(say([&] {
          pool.append({c, c}, view(2), view(2));
        }) == "KvPool::append: sequence 2 is given twice");
  CHECK(say([&] {
          pool.append({c, d}, view(3), view(3));
        }) == "KvPool::append: tokens ends with 2, key has len 3");
  CHECK(
      say([&] {
        pool.append({c, d}, view(3), view(3), {0, 3});
      }) ==
      "KvPool::append: tokens has 2 numbers, there are 2 sequences; it needs one for each, and one "
      "more");
  CHECK(say([&] { pool.append(c, view(2), view(3)); }) ==
        "KvPool::append: value has len 3, key has 2");
  CHECK(say([&] { pool.truncate(c, 500); }) ==
        "KvPool::truncate: len is 500, sequence 2 holds " + std::to_string(kPage + 2) + " tokens");
  CHECK(say([&] { (void)pool.inputs({b}, view(1)); }) ==
        "KvPool::inputs: sequence 1 has 1 queries, it holds 0 tokens; queries are its last tokens, "
        "whose keys are appended first");
  CHECK(say([&] { (void)KvPool<float>(2, 4, 4, -1); }) ==
        "KvPool: pages is -1, it must not be negative");
  CHECK(say([&] { (void)KvPool<float>(2, 4, 4, 1, 7); }) ==
        "KvPool: page_rows is 7, it must be a positive multiple of " +
            std::to_string(kPanelLanes<float>));

  // Gradients of caches cannot be requested, and keys in two places are refused.
  std::vector<float> out(16);
  PackedInputs<float> in = pool.inputs({c, d}, view(2));
  const StoredView<float> to(out.data(), {1, 2, 2, 4});
  Saved<float> saved;
  forward(ScaledDot<float>{}, in, {}, to, &saved);
  CHECK(say([&] {
          backward(ScaledDot<float>{}, in, {}, saved, StoredView<const float>(to),
                   StoredView<const float>(to), {});
        }) ==
        "heed::backward: packed.caches has 2 sequences, forward() alone reads keys and values of "
        "caches; give them as tensors");
  CHECK(
      say([&] { forward(ScaledDot<float>{}, in, causal<float>(), to); }) ==
      "heed::forward (sequence 0): the queries are the last tokens of the keys, len_q is 1 and "
      "len_kv is " +
          std::to_string(kPage + 2) +
          "; the mask's bands place them at the first keys, Align::bottom_right at the last ones");
  CHECK(say([&] {
          forward(ScaledDot<float>{}, in,
                  visible<float>([](auto, auto, auto i, auto j) { return j <= i; }), to);
        }).find("functions of positions place them at the first keys") != std::string::npos);
  forward(ScaledDot<float>{}, in, causal<float>(Align::bottom_right), to);
  in.key = view(2);
  CHECK(say([&] { forward(ScaledDot<float>{}, in, {}, to); }) ==
        "heed::forward: key or value of shape (1,2,2,4) was given beside packed.caches");
}
