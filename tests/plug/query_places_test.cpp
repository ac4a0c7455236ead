// SPDX-License-Identifier: Apache-2.0
// Inputs::first_query: some queries of a sequence, given their position, have the rows and the
// gradients that they have among all queries, whichever part reads positions.

#include "catch.hpp"
#include "message_of.hpp"
#include "turned_scores.hpp"

#include <heed/check/op_call.hpp>
#include <heed/engine/jvp.hpp>
#include <heed/explain.hpp>
#include <heed/kv_cache.hpp>
#include <heed/ops/scaled_dot.hpp>
#include <heed/partial.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>
#include <heed/plug/streaming.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

// Scores that read positions by pairs, rows, tables, transforms and sums, one kind at a time.
template <class T>
struct Fading {
  Param<T> slope = T(0.2);
  static constexpr auto parameters = std::tuple{named("slope", &Fading::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * distance(pair);
  }
};

template <class T>
struct Buckets {
  Param<T> table = Param<T>(std::vector<Index>{1, 12});
  std::vector<Index> shape(const Geometry&) const { return {-1, 12}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Buckets::table, &Buckets::shape)};
  static constexpr auto positions = &Buckets::table;
  Index bucket(Index distance) const { return std::clamp<Index>(distance, -5, 6) + 5; }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * (S(1.0) + pair.position);
  }
};

template <class T>
struct Grid {
  Param<T> table = Param<T>(std::vector<Index>{1, 49});
  std::vector<Index> shape(const Geometry&) const { return {-1, 49}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Grid::table, &Grid::shape)};
  static constexpr auto positions = &Grid::table;
  Index bucket(Index i, Index j) const { return i % 7 * 7 + j % 7; }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * (S(1.0) + pair.position);
  }
};

struct Rising : NothingDerived {
  static constexpr int query_features = 1, key_features = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[0] * math::log1p(row.index()) + S(1.0);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = S(1.0) / (S(1.0) + row.index());
  }
};
template <class T>
struct Warming {
  using Features = Rising;
  Param<T> rise = T(0.3);
  static constexpr auto parameters = std::tuple{named("rise", &Warming::rise)};
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0] - pair.key[0] * pair.query[0];
  }
};

template <class T>
struct Relative {
  Param<T> rows = Param<T>(std::vector<Index>{1, 9, 6});
  std::vector<Index> shape(const Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters = std::tuple{tensor("rows", &Relative::rows, &Relative::shape)};
  static constexpr auto relative_rows = &Relative::rows;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + S(0.4) * pair.table * (S(1.0) + S(0.1) * pair.table);
  }
};

template <class T>
struct Forgetting {
  using Features = CumulativeInputs<1, LogSigmoid>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * math::sigmoid(S(pair.query[0] - pair.key[0] + S(4.0)));
  }
};

// Weights of whole rows, by a formula: softmax(s - slope |i - j|) / (1 + i / 50).
template <class T>
struct FadingRows : PlainRows {
  Param<T> slope = T(0.2);
  static constexpr auto parameters = std::tuple{named("slope", &FadingRows::slope)};
  auto forward(const auto& row) const {
    const auto apart = math::absolute(row.query_index() - row.key_index());
    return row.softmax(row.score() - row.learnt(slope) * apart) / (1 + T(0.02) * row.query_index());
  }
};

// sigmoid(s - log(1 + i)), streaming.
template <class T>
struct Sigmoids : StreamedRows<T, 1> {
  using Base = StreamedRows<T, 1>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  State begin(const Queries& queries) const { return {P(T(0)), {math::log1p(P(queries.index))}}; }
  P weight(const State& state, P score) const { return math::sigmoid(P(score - state.own[0])); }
  P dscore(const State&, P, P weight, P pull, P) const {
    return weight * (P(T(1)) - weight) * pull;
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (const S& score : row.scores[0])
      weights.push_back(math::sigmoid(S(score - math::constant<S>(std::log1p(double(row.query))))));
    return weights;
  }
};

template <template <class> class Normaliser>
using Normalised = Attention<double, DotScore<double>, Normaliser<double>, Identity<double>>;

constexpr Index kLen = 70;
constexpr Geometry kWhole{2, 4, 4, 2, kLen, kLen, 6, 5};

// Queries of neighbouring tokens.
struct Some {
  Index first, count;
};
[[nodiscard]] Geometry sizes_of(const Some& some) {
  Geometry g = kWhole;
  g.len_q = some.count;
  g.first_query = some.first;
  return g;
}
// The rows of these queries in a tensor of all queries, `width` numbers each.
[[nodiscard]] std::vector<double> rows_of_some(const std::vector<double>& all, const Some& some,
                                               Index width) {
  std::vector<double> rows;
  for (auto head = all.begin(); head != all.end(); head += kLen * width)
    rows.insert(rows.end(), head + some.first * width, head + (some.first + some.count) * width);
  return rows;
}

[[nodiscard]] double gap(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double gap = 0, size = 1;
  for (std::size_t n = 0; n < a.size(); ++n) {
    gap = std::max(gap, std::abs(a[n] - b[n]));
    size = std::max(size, std::abs(b[n]));
  }
  return gap / size;
}

// The whole sequence, with a loss that depends on some of its rows; and a call on their queries.
template <class Op>
struct Calls {
  OpCall<Op> whole, part;

  Calls(const Op& op, const Some& some)
      : whole(op, kWhole, causal<double>()),
        part(op, sizes_of(some), causal<double>(Align::top_left, some.first), {},
             numbers_of(whole, some)) {
    for (std::size_t n = 0; n < whole.grad_out.size(); ++n) {
      const Index row = Index(n) / kWhole.dim_v % kLen;
      if (row < some.first || row >= some.first + some.count) whole.grad_out[n] = 0;
    }
  }

 private:
  [[nodiscard]] static CallNumbers<double> numbers_of(const OpCall<Op>& whole, const Some& some) {
    CallNumbers<double> numbers;
    numbers.query = rows_of_some(whole.query, some, kWhole.dim_qk);
    numbers.key = whole.key;
    numbers.value = whole.value;
    numbers.grad_out = rows_of_some(whole.grad_out, some, kWhole.dim_v);
    numbers.key_inputs = whole.key_inputs;
    return numbers;
  }
};

// Forward mode, with all inputs and parameters moved.
template <class Op>
void check_jvp(Calls<Op>& calls, const Some& some) {
  const auto wave = [](std::size_t size, double at) {
    std::vector<double> x(size);
    for (std::size_t n = 0; n < size; ++n) x[n] = std::sin(at + 3 * double(n));
    return x;
  };
  const auto query = wave(calls.whole.query.size(), 1), key = wave(calls.whole.key.size(), 2),
             value = wave(calls.whole.value.size(), 3),
             inputs = wave(calls.whole.key_inputs.size(), 4);
  const auto of_part = rows_of_some(query, some, kWhole.dim_qk);
  Op direction = calls.whole.op;
  direction.visit([](const char*, auto& param) {
    for (Index i = 0; i < param.size(); ++i) param[i] = std::cos(double(i));
  });
  const auto tangent = [&](OpCall<Op>& call, const std::vector<double>& of_query) {
    const Geometry& g = call.geometry();
    Tangents<double> d{{of_query.data(), g.query_shape()},
                       {key.data(), g.key_shape()},
                       {value.data(), g.value_shape()}};
    if (!inputs.empty()) d.key_inputs = {inputs.data(), call.inputs().key_inputs.shape()};
    std::vector<double> to(call.out.size());
    jvp(call.op, call.inputs(), call.mask, call.saved, call.out_view(), d,
        TensorView<double>(to.data(), g.out_shape()), &direction);
    return to;
  };
  const std::vector<double> all = tangent(calls.whole, query);
  CHECK(gap(tangent(calls.part, of_part), rows_of_some(all, some, kWhole.dim_v)) < 1e-12);
}

template <class Op>
void check(const Op& op) {
  // Few queries and many, the last ones and others.
  for (const Some& some : {Some{69, 1}, {67, 3}, {66, 4}, {21, 4}, {50, 20}, {11, 40}, {3, 67}}) {
    INFO(some.count << " queries from " << some.first << " on");
    Calls<Op> calls(op, some);
    calls.whole.forward();
    calls.part.forward();
    CHECK(gap(calls.part.out, rows_of_some(calls.whole.out, some, kWhole.dim_v)) < 1e-12);
    calls.whole.backward();
    calls.part.backward();
    const auto of_whole = calls.whole.gradients(), of_part = calls.part.gradients();
    REQUIRE(of_whole.size() == of_part.size());
    for (std::size_t n = 0; n < of_part.size(); ++n) {
      INFO("gradient of " << of_part[n].name);
      const auto& wanted = of_whole[n].values;
      const bool query = of_part[n].name == "query";
      CHECK(gap(of_part[n].values, query ? rows_of_some(wanted, some, kWhole.dim_qk) : wanted) <
            1e-12);
    }
    check_jvp(calls, some);
  }
}

template <class Op>
[[nodiscard]] Op filled() {
  Op op;
  op.visit([](const char*, auto& param) {
    for (Index i = 0; i < param.size() && param.size() > 1; ++i)
      param[i] = 0.5 * std::sin(1 + 3 * double(i));
  });
  return op;
}
template <template <class> class Formula>
void check_score() {
  check(filled<OwnAttention<Formula, double>>());
}

}  // namespace

TEST_CASE("Some queries of a sequence know their positions in pairs and rows", "[plug]") {
  SECTION("distances") { check_score<Fading>(); }
  SECTION("features of rows") { check_score<Warming>(); }
}
TEST_CASE("Some queries of a sequence know their positions in tables", "[plug]") {
  SECTION("by distance") { check_score<Buckets>(); }
  SECTION("by pair") { check_score<Grid>(); }
  SECTION("of relative rows") { check_score<Relative>(); }
}
TEST_CASE("Some queries of a sequence are turned by their positions", "[plug]") {
  check_score<heed_test::Turned>();
}
TEST_CASE("Some queries of a sequence read the sums of their own tokens", "[plug]") {
  check_score<Forgetting>();
}
TEST_CASE("Some queries of a sequence know their positions in normalisers", "[plug]") {
  SECTION("a formula of rows") { check(Normalised<FadingRows>{}); }
  SECTION("a streaming one") { check(Normalised<Sigmoids>{}); }
}

TEST_CASE("Parts of the keys merge for queries that stand behind a cache", "[plug]") {
  OpCall<OwnAttention<Fading, double>> call({}, sizes_of({67, 3}),
                                            causal<double>(Align::bottom_right));
  call.forward();
  const auto part = [&](Index begin, Index end) {
    return forward_partial(call.op, call.inputs(), call.mask & key_range<double>(begin, end));
  };
  CHECK(gap(merge(part(0, 31), part(31, kLen)).out, call.out) < 1e-13);
}

TEST_CASE("Nothing but positions depends on first_query, not in its last bit", "[plug]") {
  for (const Index len_q : {1, 5, 40}) {
    Geometry g{2, 4, 4, 2, len_q, 50, 6, 5};
    const Mask<float> mask = window<float>(9, 3) & alibi<float>({0.1F, 0.2F, 0.3F, 0.4F});
    OpCall<ScaledDot<float>> first({}, g, mask);
    g.first_query = 17;
    OpCall<ScaledDot<float>> behind({}, g, mask);
    for (auto* call : {&first, &behind}) {
      call->forward();
      call->backward();
    }
    CHECK(first.out == behind.out);
    CHECK(first.grad_query == behind.grad_query);
    CHECK(first.grad_key == behind.grad_key);
  }
}

TEST_CASE("Places that queries cannot have are refused", "[plug]") {
  Geometry g{1, 2, 2, 2, 3, 9, 4, 4};
  OpCall<OwnAttention<Fading, float>> call({}, g);
  call.forward();
  Inputs<float> in = call.inputs();
  in.first_query = -1;
  CHECK(message_of([&] { forward(call.op, in, {}, call.out_view()); }) ==
        "heed::forward: first_query is -1, it must lie in [0, 9007199254740992]");
  g.first_query = (Index(1) << 53) + 1;
  CHECK(message_of([&] { (void)explain(call.op, g); }) ==
        "heed::explain: first_query is 9007199254740993, it must lie in [0, 9007199254740992]");

  in.first_query = 4;
  CHECK(message_of([&] {
          backward(call.op, in, {}, call.saved, call.out_view(), call.grad_out_view(), {});
        }) == "heed::backward: saved is of a call with first_query 0, this one has 4");

  KvCache<float> cache(1, 2, 4, 4);
  cache.append(call.inputs().key, call.inputs().value);
  CHECK(cache.inputs(call.inputs().query).first_query == 6);
  cache.truncate(2);
  CHECK(message_of([&] { (void)cache.inputs(call.inputs().query); }) ==
        "KvCache::inputs: query has len 3, the cache holds 2 tokens; queries are its last tokens, "
        "whose keys are appended first");
}
