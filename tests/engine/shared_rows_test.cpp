// SPDX-License-Identifier: Apache-2.0
// Normalisers whose source() gives rows of query or key to several heads or maps, or to none: gradients are sums
// over the readers, the same bits for any number of threads.

#include "catch.hpp"
#include "door_case.hpp"
#include "message_of.hpp"

#include <heed/plug/own_score.hpp>

#include <cstring>

using namespace heed;
using namespace heed_test;

namespace {

// The columns that one map of a head reads, by a rule that a test chooses.
enum class Rule {
  neighbours,   // map m of head h reads the whole of query head h + m: talking heads
  same_twice,   // both maps read the same columns
  half_unread,  // both maps read the left half of the row
  other_group,  // map 1 reads keys of another group
};

// Weight of a pair: the product of the sigmoids of its two scores.
template <class T>
struct BothAgree : PlainRows {
  static constexpr int maps = 2;
  Rule rule = Rule::neighbours;
  using P = Pack<T>;

  static constexpr auto parameters = std::tuple{option("rule", &BothAgree::rule)};
  [[nodiscard]] Source source(const Geometry& g, Index h, int m) const {
    const Index next = (h + m) % g.heads, half = std::max<Index>(1, g.dim_qk / 2);
    switch (rule) {
      case Rule::neighbours: return {next, g.kv_head(next), 0, 0, g.dim_qk};
      case Rule::same_twice: return {h, g.kv_head(h), 0, 0, g.dim_qk};
      case Rule::half_unread: return {h, g.kv_head(h), 0, m * half, half};
      case Rule::other_group: return {h, (g.kv_head(h) + m) % g.kv_heads, 0, 0, g.dim_qk};
    }
    return {};
  }
  void forward(const RowBlock<T>& block) const {
    for_pairs(block, [&](Index j, int v, auto hidden, P a, P b) {
      block.scores[0].store(j, v, select(hidden, P(T(0)), a * b));
    });
    for (int m = 0; m < maps; ++m) std::fill_n(block.lse[std::size_t(m)], block.lanes(), T(0));
  }
  void vjp(const RowBlock<T>& block, BothAgree&) const {
    for_pairs(block, [&](Index j, int v, auto hidden, P a, P b) {
      const P zero = T(0), G = block.dweights.load(j, v), slope = G * a * b;
      block.weights.store(j, v, select(hidden, zero, a * b));
      block.dscores[0].store(j, v, select(hidden, zero, slope * (T(1) - a)));
      block.dscores[1].store(j, v, select(hidden, zero, slope * (T(1) - b)));
    });
  }
  template <class S>
  [[nodiscard]] std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (std::size_t j = 0; j < row.scores[0].size(); ++j)
      weights.push_back(math::sigmoid(row.scores[0][j]) * math::sigmoid(row.scores[1][j]));
    return weights;
  }

 private:
  template <class F>
  void for_pairs(const RowBlock<T>& block, F&& f) const {
    for (int v = 0; v < block.vectors; ++v)
      for (Index j = 0; j < block.keys(); ++j) {
        const P a = block.scores[0].load(j, v), b = block.scores[1].load(j, v);
        f(j, v, a == P(-kInfinity<T>), math::sigmoid(a), math::sigmoid(b));
      }
  }
};

// A softmax whose head h reads query head h / 2 and the keys of the last group.
template <class T>
struct Doubled : Softmax<T> {
  [[nodiscard]] Source source(const Geometry& g, Index h, int) const {
    return {h / 2, g.kv_heads - 1, 0, 0, g.dim_qk};
  }
};

// A softmax whose heads all read query head 0, each with the keys of its group.
template <class T>
struct OneQuery : Softmax<T> {
  [[nodiscard]] Source source(const Geometry& g, Index h, int) const {
    return {0, g.kv_head(h), 0, 0, g.dim_qk};
  }
};

// A softmax whose heads take the key-value heads in turn.
template <class T>
struct InTurn : Softmax<T> {
  [[nodiscard]] Source source(const Geometry& g, Index h, int) const {
    return {h, h % g.kv_heads, 0, 0, g.dim_qk};
  }
};

// A row normaliser whose maps read by the test's rule.
template <class T>
struct Anywhere : Softmax<T> {
  Source where;
  [[nodiscard]] Source source(const Geometry&, Index, int) const { return where; }
};

template <class T>
struct Cosine {
  using Features = InverseNorms;
  Param<T> sharpness = T(3);
  static constexpr auto parameters = std::tuple{named("sharpness", &Cosine::sharpness)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit + p[0] * cosine(pair);
  }
};

constexpr Geometry kGeometries[] = {{2, 4, 4, 4, 19, 19, 6, 5},
                                    {2, 4, 4, 2, 37, 21, 6, 6},
                                    {1, 4, 4, 2, 1, 23, 6, 6},
                                    {1, 2, 2, 2, 70, 70, 4, 4}};

template <class Op>
void check_sums(const Op& op) {
  for (const Geometry& g : kGeometries)
    for (const Mask<double>& mask : {Mask<double>{}, causal<double>(Align::bottom_right)})
      check_twin(op, g, mask, 7);
}

}  // namespace

TEST_CASE("gradients of rows that several maps or heads read are sums over all of them") {
  for (const Rule rule :
       {Rule::neighbours, Rule::same_twice, Rule::half_unread, Rule::other_group}) {
    INFO("rule " << int(rule));
    Attention<double, DotScore<double>, BothAgree<double>, Identity<double>> plain;
    plain.normaliser.rule = rule;
    check_sums(plain);
    Attention<double, OwnScore<Cosine, double>, BothAgree<double>, Identity<double>> featured;
    featured.normaliser.rule = rule;
    check_sums(featured);
  }
}

TEST_CASE("a streaming softmax whose heads share a query head sums its gradients") {
  check_sums(Attention<double, DotScore<double>, Doubled<double>, Identity<double>>{});
  check_sums(Attention<double, OwnScore<Cosine, double>, Doubled<double>, Identity<double>>{});
  check_sums(Attention<double, OwnScore<Cosine, double>, OneQuery<double>, Identity<double>>{});
}

TEST_CASE(
    "a key's derived values are those of the head that source() names, whatever group the query "
    "head "
    "is in") {
  check_sums(Attention<double, OwnScore<Cosine, double>, InTurn<double>, Identity<double>>{});
}

TEMPLATE_TEST_CASE("sums over the readers of a row have the same bits for any number of threads",
                   "", BothAgree<float>, OneQuery<float>) {
  const Index kv_heads = std::is_same_v<TestType, OneQuery<float>> ? 4 : 2;
  const Geometry g{2, 4, 4, kv_heads, 90, 90, 8, 8};
  Attention<float, OwnScore<Cosine, float>, TestType, Identity<float>> op;
  const auto problem = random_problem<float>(g, 0, 3);
  const std::vector<float> grad_out(std::size_t(g.query_rows() * g.dim_v), 0.25F);
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 4, 7, 1, 2, 3, 4, 7}) {
    Options options{.threads = threads, .key_tile = 1, .panel_vectors = 1};
    const auto r = run_doors(op, problem, causal<float>(), grad_out, options);
    std::vector<float> all;
    for (const auto* part : {&r.out, &r.grad_query, &r.grad_key, &r.grad_value})
      all.insert(all.end(), part->begin(), part->end());
    all.push_back(r.grad_op.score.sharpness[0]);
    if (first.empty()) first = all;
    CHECK(std::memcmp(all.data(), first.data(), all.size() * sizeof(float)) == 0);
  }
}

TEST_CASE(
    "a source() that leaves the rows is refused in a sentence with head, map and both values") {
  Attention<double, DotScore<double>, Anywhere<double>, Identity<double>> op;
  const Geometry g = kGeometries[0];
  const auto problem = random_problem<double>(g, 0, 3);
  const std::pair<Source, const char*> refusals[] = {
      {{4, 0, 0, 0, 6}, "map 0 of head 0 the query head 4, it must lie in [0, 3]"},
      {{-1, 0, 0, 0, 6}, "map 0 of head 0 the query head -1, it must lie in [0, 3]"},
      {{0, 4, 0, 0, 6}, "map 0 of head 0 the key-value head 4, it must lie in [0, 3]"},
      {{0, 0, 1, 0, 6}, "map 0 of head 0 the query column 1, it must lie in [0, 0]"},
      {{0, 0, 0, 3, 4}, "map 0 of head 0 the key column 3, it must lie in [0, 2]"},
      {{0, 0, 0, 0, 7}, "map 0 of head 0 the width 7, it must lie in [1, 6]"},
      {{0, 0, 0, 0, 0}, "map 0 of head 0 the width 0, it must lie in [1, 6]"}};
  for (const auto& [where, sentence] : refusals) {
    op.normaliser.where = where;
    CHECK(message_of([&] {
            (void)run_doors(op, problem, {},
                            std::vector<double>(std::size_t(g.query_rows() * g.dim_v)));
          }).find(sentence) != std::string::npos);
  }
}
