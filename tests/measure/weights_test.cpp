// SPDX-License-Identifier: Apache-2.0
// measure_weights() against plain loops over the weights of the reference: every variant, own
// parts, every mask; with hidden keys, several threads, ties and numbers that are not finite.

#include "catch.hpp"
#include "message_of.hpp"
#include "moving_dialectical.hpp"
#include "random_call.hpp"
#include "tolerances.hpp"

#include <heed/check/op_problem.hpp>
#include <heed/kv_cache.hpp>
#include <heed/measure/weights.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>
#include <heed/plug/streaming.hpp>
#include <heed/plug/transform.hpp>
#include <heed/reference/reference.hpp>
#include <heed/variants.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Weights whose rows do not add up to one.
template <class Real>
struct Sigmoids : StreamedRows<Real> {
  using typename StreamedRows<Real>::P, typename StreamedRows<Real>::State;
  P weight(const State&, P score) const { return math::sigmoid(score); }
  P dscore(const State&, P, P weight, P pull, P) const {
    return weight * (P(Real(1)) - weight) * pull;
  }
  template <class S>
  std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (const S& s : row.scores[0]) weights.push_back(math::sigmoid(s));
    return weights;
  }
};

// A formula of whole rows that reads positions, the query and a learnt number, and has weights below 0.
template <class Real>
struct Signed : PlainRows {
  static constexpr bool uses_query = true;
  Param<Real> slope = Real(0.3);
  static constexpr auto parameters = std::tuple{named("slope", &Signed::slope)};
  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto distance = math::absolute(row.query_index() - row.key_index());
    const auto p = row.softmax(s - row.learnt(slope) * distance);
    return p * math::sin(3 * s + row.query(0)) / row.visible();
  }
  // The measure of rounding errors: a sine near 0 has as large an error as any other.
  template <class S>
  std::vector<double> weight_terms(const std::vector<std::vector<S>>&,
                                   const std::vector<S>& weights) const {
    return std::vector<double>(weights.size(), 1 / double(weights.size()));
  }
};

// A score of positions, numbers of tokens, and rows that a rotation turns.
template <class Real>
struct Turning {
  using Features = TokenInputs<1, 1>;
  using Transform = Rotation<Real>;
  Param<Real> slope = Real(0.2);
  static constexpr auto parameters = std::tuple{named("slope", &Turning::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * pair.query[0] + pair.key[0] - p[0] * distance(pair);
  }
};

// One row, in plain loops.
struct PlainRow {
  double entropy = 0, total = 0, size = 0, distance = 0;
  std::vector<double> sizes;  // |w|, the largest first
};
[[nodiscard]] PlainRow plain_row(const double* w, Index keys, Index position) {
  PlainRow row;
  for (Index j = 0; j < keys; ++j) {
    row.total += w[j];
    row.size += std::abs(w[j]);
    row.sizes.push_back(std::abs(w[j]));
  }
  for (Index j = 0; j < keys && row.size > 0; ++j) {
    const double p = std::abs(w[j]) / row.size;
    if (p > 0) row.entropy -= p * std::log(p);
    row.distance += p * std::abs(double(position - j));
  }
  std::sort(row.sizes.rbegin(), row.sizes.rend());
  return row;
}

// Sets of each kind: with ranges that overlap, with a list per sequence, with one per query.
[[nodiscard]] std::vector<KeySet> some_sets(const Geometry& g) {
  const Index n = g.len_kv;
  const auto range = [n](Index begin, Index end) {
    return KeyRange{std::min(begin, n), std::min(end, n)};
  };
  KeySet shared{{{range(9, 70), range(1, 3), range(2, 5), range(2, 2), range(1, 2)}}};
  KeySet of_sequences, of_queries;
  for (Index b = 0; b < g.batch; ++b) of_sequences.ranges.push_back({range(b, b + 4)});
  for (Index row = 0; row < g.batch * g.len_q; ++row) {
    const Index key = row * 7 % std::max<Index>(1, n);
    of_queries.ranges.push_back(
        {range(key, key + 1), range(0, row % 3), range(key / 2, key / 2 + 1)});
  }
  return {shared, of_sequences, of_queries};
}
[[nodiscard]] bool holds(const KeySet& set, const Geometry& g, Index b, Index i, Index key) {
  const std::size_t lists = set.ranges.size();
  const auto& list = set.ranges[lists == 1                      ? 0
                                : lists == std::size_t(g.batch) ? std::size_t(b)
                                                                : std::size_t(b * g.len_q + i)];
  return std::any_of(list.begin(), list.end(),
                     [key](const KeyRange& keys) { return keys.begin <= key && key < keys.end; });
}

// Further numbers that a call reads beside those of a Call.
template <class Real>
struct TokenNumbers {
  Tensor<Real> query, key;
};

template <class Op, class Real>
void check_call(const Op& op, const Call<Real>& call, const TokenNumbers<Real>& numbers = {}) {
  const Geometry& g = call.geometry;
  Inputs<Real> in = call.inputs();
  in.query_inputs = numbers.query.view();
  in.key_inputs = numbers.key.view();

  // With values of one, weighted_abs_value is the sum of the sizes of a row's weights, or of their terms.
  const auto twin_op = reference::cast_whole_op<double>(op);
  auto problem = problem_of<double>(g, in, call.mask.mask, call.options);
  problem.dropout = {};
  std::fill(problem.value.begin(), problem.value.end(), 1.0);
  const auto twin = reference::forward(twin_op, problem, {true, true, true});

  Tensor<Real> out(g.out_shape());
  Saved<Real> saved;
  forward(op, in, call.mask.mask, out.view(), &saved, call.options);
  const WeightRequest request{.links = 3, .sets = some_sets(g)};
  const WeightMeasures read = measure_weights(op, in, call.mask.mask, saved, request, call.options);
  REQUIRE(read.rows() == g.query_rows());
  REQUIRE(read.links_per_row == std::min<Index>(3, std::max<Index>(1, g.len_kv)));

  for (Index b = 0; b < g.batch; ++b)
    for (Index h = 0; h < g.heads; ++h)
      for (Index i = 0; i < g.len_q; ++i) {
        const Index row = read.row(b, h, i);
        const auto at = std::size_t(row);
        const double* w = twin.weights.data() + row * g.len_kv;
        const PlainRow plain = plain_row(w, g.len_kv, g.query_position(i));
        double s = twin.error_scale.s_row[at];
        for (const auto& map : twin.scores)
          for (Index j = 0; j < g.len_kv; ++j)
            if (const double x = map[std::size_t(row * g.len_kv + j)]; std::isfinite(x))
              s = std::max(s, std::abs(x));
        const double terms = twin.error_scale.weighted_abs_value[at * std::size_t(g.dim_v)];
        // Each weight, and each sum of some, is off by this; an entropy by its slope times it, |log p| < 40; a mean
        // distance by the longest one times it.
        const double off = tolerance::forward<Real>(s, terms) + std::numeric_limits<double>::min();
        const double of_p = plain.size > 0 ? 2 * off / plain.size : 0;
        INFO("row " << b << ", " << h << ", " << i << ": off " << off);
        CHECK(std::abs(read.total[at] - plain.total) <= off);
        CHECK(std::abs(read.size[at] - plain.size) <= off);
        CHECK(std::abs(read.entropy[at] - plain.entropy) <= 40 * of_p);
        CHECK(std::abs(read.distance[at] - plain.distance) <= double(g.len_kv + g.len_q) * of_p);
        for (std::size_t set = 0; set < request.sets.size(); ++set) {
          double mass = 0, share = 0;
          for (Index j = 0; j < g.len_kv; ++j)
            if (holds(request.sets[set], g, b, i, j)) {
              mass += w[j];
              share += plain.size > 0 ? std::abs(w[j]) / plain.size : 0;
            }
          INFO("set " << set);
          CHECK(std::abs(read.mass[set][at] - mass) <= off);
          CHECK(std::abs(read.share[set][at] - share) <= 2 * of_p);
        }
        const auto links = read.links_of(row);
        for (std::size_t n = 0; n < links.size(); ++n) {
          INFO("link " << n << ": key " << links[n].key << ", weight " << links[n].weight);
          const double largest = n < plain.sizes.size() ? plain.sizes[n] : 0;
          CHECK(std::abs(std::abs(links[n].weight) - largest) <= off);
          CHECK((links[n].key < 0) == (links[n].weight == 0));
          if (links[n].key < 0) continue;
          REQUIRE(links[n].key < g.len_kv);
          CHECK(std::abs(links[n].weight - w[links[n].key]) <= off);
          if (n == 0) continue;
          const double before = std::abs(links[n - 1].weight), own = std::abs(links[n].weight);
          CHECK((own < before || (own == before && links[n - 1].key < links[n].key)));
        }
      }
}

// Calls f(name, op, geometry) for all variants that can run on `g`, and for modes that the list leaves out.
template <class Real, class F>
void for_each_op(const Geometry& g, F&& f) {
  for_each_variant<Real>(g,
                         [&]<class Op>(const Variant<Op>& variant) {
                           if (variant.traits.even_dim_qk && g.dim_qk % 2 != 0) return;
                           if (variant.traits.equal_widths && g.dim_qk != g.dim_v) return;
                           if (Op::ReadoutType::uses_own_rows && g.len_q > g.len_kv) return;
                           f(variant.name, variant.op, variant.geometry);
                         },
                         {.prototypes = 3});
  Dar<Real> per_head;
  per_head.score.strength = Param<Real>({g.heads}, std::vector<Real>(std::size_t(g.heads), 2));
  f("dar per head", per_head, g);
  for (const FlowMode mode : {FlowMode::lagrange, FlowMode::lagrange_equilibrium}) {
    ResonantOde<Real> ode;
    ode.normaliser.mode = mode;
    f("ode-lagrange", ode, g);
  }
  if (g.dim_qk == g.dim_v)
    f("dialectical-batch",
      moving_dialectical<Real>(g, {.halt_eps = 0.1, .halting = Halting::batch}), g);
}

template <class Real, class Op>
[[nodiscard]] Call<Real> call_of(const Op& op, const Geometry& g, Layout layout = Layout::dense) {
  return random_call<Real>(g, op.extra_dim(g), 1, layout);
}

}  // namespace

TEMPLATE_TEST_CASE("the weights of every variant are measured as plain loops measure its twin's",
                   "[weights]", float, double) {
  for (const auto& [len_q, len_kv] : {std::pair<Index, Index>{21, 21}, {5, 40}, {1, 9}, {33, 2}})
    for_each_op<TestType>(Geometry{2, 4, 4, 2, len_q, len_kv, 8, 8},
                          [&](const char* name, const auto& op, const Geometry& g) {
                            INFO(name << ", " << g.len_q << " queries, " << g.len_kv << " keys");
                            auto call = call_of<TestType>(op, g, Layout::bthd);
                            check_call(op, call);
                            call.options = small_tiles();
                            call.mask = owned(causal<TestType>(Align::bottom_right));
                            check_call(op, call);
                          });
}

TEST_CASE("weights are measured under every mask", "[weights]") {
  for (const auto& mask : mask_cases<double>())
    for (const bool small : {false, true}) {
      INFO(mask.name << (small ? ", small tiles" : ""));
      const Geometry g{2, 2, 2, 1, 19, 23, 8, 8};
      const auto check = [&](const auto& op, const Geometry& own) {
        auto call = call_of<double>(op, own);
        if (small) call.options = small_tiles();
        call.mask = mask.make(own);
        check_call(op, call);
      };
      check(Dar<double>{}, g);
      check(Differential<double>{}, g);
      check(ResonantOde<double>{}, g);
    }
}

TEMPLATE_TEST_CASE("weights of own scores, normalisers and formulas of rows are measured",
                   "[weights]", float, double) {
  using Real = TestType;
  Geometry g{2, 4, 4, 2, 17, 30, 4, 4};
  for (const Index first : {0, 13}) {
    g.first_query = first;
    INFO("first_query " << first);
    const auto check = [&](const auto& op) {
      auto call = call_of<Real>(op, g);
      call.mask = owned(causal<Real>(Align::top_left, first));
      check_call(op, call);
      call.options = small_tiles();
      call.options.scale = 0.7;
      check_call(op, call);
    };
    check(Attention<Real, DotScore<Real>, Sigmoids<Real>, Identity<Real>>{});
    check(Attention<Real, DarScore<Real>, Signed<Real>, Identity<Real>>{});
    OwnAttention<Turning, Real> turning;
    Call<Real> call = call_of<Real>(turning, g);
    TokenNumbers<Real> numbers{Tensor<Real>({2, 4, 17, 1}), Tensor<Real>({2, 1, 30, 1})};
    numbers.query.randomise(71);
    numbers.key.randomise(72);
    check_call(turning, call, numbers);
  }
}

TEST_CASE("long rows cross tiles and blocks, and their sums keep their digits", "[weights]") {
  const Geometry g{1, 2, 2, 1, 3, 1500, 16, 16};
  check_call(ScaledDot<float>{}, call_of<float>(ScaledDot<float>{}, g));
  check_call(Differential<float>{}, call_of<float>(Differential<float>{}, g));
  check_call(ScaledDot<double>{}, call_of<double>(ScaledDot<double>{}, g));
}

TEST_CASE("of equal weights the earlier keys are the links, and n of them have the entropy log n",
          "[weights]") {
  const Geometry g{1, 1, 1, 1, 40, 200, 4, 4};
  Call<float> call = random_call<float>(g, 0);
  call.query.fill(0);
  call.mask = owned(window<float>(150, 30));
  const auto check = [&](const auto& op) {
    const auto read =
        measure_weights(op, call.inputs(), call.mask.mask, {.links = 4}, call.options);
    for (Index i = 0; i < g.len_q; ++i) {
      const double seen = double(i + 30 + 1);
      CHECK(read.entropy[std::size_t(i)] == Approx(std::log(seen)).epsilon(1e-5));
      for (Index n = 0; n < 4; ++n) {
        CHECK(read.links_of(i)[std::size_t(n)].key == n);
        CHECK(read.links_of(i)[std::size_t(n)].weight == Approx(1 / seen).epsilon(1e-5));
      }
    }
  };
  check(ScaledDot<float>{});
  ResonantOde<float> ode;
  ode.score.rho = 0.0F;
  check(ode);
}

TEST_CASE("two queries by hand", "[weights]") {
  // Query 0 sees key 0 alone. Query 1 sees scores 0 and log 3: weights 1/4 and 3/4.
  const double log3 = std::log(3.0);
  const std::vector<double> query{0, 1}, key{0, log3}, value{5, 7};
  const Inputs<double> in{
      {query.data(), {1, 1, 2, 1}}, {key.data(), {1, 1, 2, 1}}, {value.data(), {1, 1, 2, 1}}};
  const auto read = measure_weights(ScaledDot<double>{}, in, causal<double>(),
                                    {.links = 5, .sets = {KeySet{{{{1, 2}}}}}});
  CHECK(read.links_per_row == 2);
  CHECK(read.entropy[0] == Approx(0).margin(1e-15));
  CHECK(read.entropy[1] == Approx(2 * std::log(2.0) - 0.75 * log3));
  CHECK(read.distance[1] == Approx(0.25));
  CHECK(read.links_of(0)[0].key == 0);
  CHECK(read.links_of(0)[1].key == -1);
  CHECK(read.links_of(0)[1].weight == 0);
  CHECK(read.links_of(1)[0].key == 1);
  CHECK(read.links_of(1)[0].weight == Approx(0.75));
  CHECK(read.mass[0] == std::vector<double>{0, read.links_of(1)[0].weight});
  CHECK(read.mean(read.total, 0) == Approx(1));
}

TEMPLATE_TEST_CASE("measures have the same bits on any number of threads and with any memory",
                   "[weights]", float, double) {
  for_each_op<TestType>(Geometry{2, 4, 4, 2, 70, 70, 8, 8}, [&](const char* name, const auto& op,
                                                                const Geometry& g) {
    INFO(name);
    auto call = call_of<TestType>(op, g);
    call.options = small_tiles();
    call.mask = owned(causal<TestType>());
    const WeightRequest request{.links = 5, .sets = some_sets(g)};
    const auto first = measure_weights(op, call.inputs(), call.mask.mask, request, call.options);
    for (const int threads : {2, 3, 7}) {
      call.options.threads = threads;
      const auto again = measure_weights(op, call.inputs(), call.mask.mask, request, call.options);
      CHECK(same_bits(again.entropy, first.entropy));
      CHECK(same_bits(again.total, first.total));
      CHECK(same_bits(again.size, first.size));
      CHECK(same_bits(again.distance, first.distance));
      for (std::size_t s = 0; s < first.mass.size(); ++s) {
        CHECK(same_bits(again.mass[s], first.mass[s]));
        CHECK(same_bits(again.share[s], first.share[s]));
      }
      bool same = again.links.size() == first.links.size();
      for (std::size_t n = 0; same && n < first.links.size(); ++n)
        same = again.links[n].key == first.links[n].key &&
               again.links[n].weight == first.links[n].weight;
      CHECK(same);
    }
  });
}

TEST_CASE("hidden keys leave no trace, and a row that is not finite spoils no other", "[weights]") {
  const Geometry g{1, 2, 2, 2, 20, 20, 4, 4};
  const auto check = [&](const auto& op) {
    Call<float> call = call_of<float>(op, g);
    call.mask = owned(causal<float>());
    call.options = small_tiles();
    const WeightRequest request{.links = 2, .sets = {KeySet{{{{0, 20}}}}}};
    const auto clean = measure_weights(op, call.inputs(), call.mask.mask, request, call.options);
    for (Index c = 0; c < 4; ++c) call.key(0, 1, 11, c) = float(kNan);
    const auto read = measure_weights(op, call.inputs(), call.mask.mask, request, call.options);
    for (Index h = 0; h < 2; ++h)
      for (Index i = 0; i < 20; ++i) {
        const auto row = std::size_t(read.row(0, h, i));
        INFO("head " << h << ", query " << i);
        const bool spoilt = h == 1 && i >= 11;
        CHECK(std::isnan(read.entropy[row]) == spoilt);
        CHECK(std::isnan(read.size[row]) == spoilt);
        CHECK(std::isnan(read.mass[0][row]) == spoilt);
        CHECK((read.links_of(Index(row))[0].key == -1) == spoilt);
        if (spoilt) continue;
        CHECK(read.entropy[row] == clean.entropy[row]);
        CHECK(read.distance[row] == clean.distance[row]);
        CHECK(read.links_of(Index(row))[1].key == clean.links_of(Index(row))[1].key);
      }
  };
  check(ScaledDot<float>{});
  check(Differential<float>{});
  check(ResonantOde<float>{});
}

TEST_CASE("a row that sees nothing measures 0, one whose scores are all -infinity NaN",
          "[weights]") {
  const Geometry g{1, 1, 1, 1, 3, 5, 2, 2};
  const auto check = [&](const auto& op) {
    Call<double> call = call_of<double>(op, g);
    call.mask =
        boolean_mask<double>({1, 1, 3, 5}, [](Index, Index, Index i, Index) { return i != 1; });
    for (Index j = 0; j < 5; ++j) call.key(0, 0, j, 0) = -1e300;
    call.query(0, 0, 0, 0) = 1e300;
    call.query(0, 0, 2, 0) = 0;
    const auto read = measure_weights(op, call.inputs(), call.mask.mask,
                                      {.links = 1, .sets = {KeySet{{{{0, 5}}}}}}, call.options);
    CHECK(std::isnan(read.entropy[0]));
    CHECK(std::isnan(read.mass[0][0]));
    CHECK(read.links_of(0)[0].key == -1);
    CHECK(read.entropy[1] == 0);
    CHECK(read.size[1] == 0);
    CHECK(read.share[0][1] == 0);
    CHECK(read.links_of(1)[0].key == -1);
    CHECK(read.links_of(1)[0].weight == 0);
    CHECK(read.size[2] > 0.3);
  };
  check(ScaledDot<double>{});
  check(Differential<double>{});
}

TEST_CASE("dropout leaves the weights that are measured alone", "[weights]") {
  const Geometry g{1, 2, 2, 1, 12, 12, 4, 4};
  Call<float> call = random_call<float>(g, 0);
  const auto kept = measure_weights(ScaledDot<float>{}, call.inputs(), {}, {}, call.options);
  call.options.dropout = {0.5, 3};
  const auto dropped = measure_weights(ScaledDot<float>{}, call.inputs(), {}, {}, call.options);
  CHECK(same_bits(kept.total, dropped.total));
  CHECK(same_bits(kept.entropy, dropped.entropy));
}

TEST_CASE("a softmax of mixed precision still adds up to one", "[weights]") {
  const Geometry g{1, 2, 2, 1, 100, 130, 32, 8};
  Call<float> call = random_call<float>(g, 0);
  call.options.precision = Precision::mixed;
  const auto read =
      measure_weights(ScaledDot<float>{}, call.inputs(), causal<float>(), {}, call.options);
  for (const double total : read.total) CHECK(total == Approx(1).epsilon(1e-5));
}

TEST_CASE("what a query of a cache reads is measured on the cache's pages", "[weights]") {
  const Index batch = 2, kv_heads = 2, dim = 8, len = 150;
  const Geometry g{batch, 4, 4, kv_heads, 1, len, dim, dim};
  Call<float> call = random_call<float>(g, 0);
  const auto check = [&](auto cache, double off) {
    cache.append(std::as_const(call.key).view(), std::as_const(call.value).view());
    Inputs<float> paged = cache.inputs(std::as_const(call.query).view());
    Inputs<float> plain = call.inputs();
    plain.first_query = paged.first_query;
    const auto mask = causal<float>(Align::bottom_right);
    const WeightRequest request{.links = 2, .sets = {KeySet{{{{100, 140}}}}}};
    const auto a = measure_weights(Dar<float>{}, paged, mask, request);
    const auto b = measure_weights(Dar<float>{}, plain, mask, request);
    for (std::size_t row = 0; row < a.entropy.size(); ++row) {
      CHECK(a.entropy[row] == Approx(b.entropy[row]).epsilon(off));
      CHECK(a.distance[row] == Approx(b.distance[row]).epsilon(off));
      CHECK(a.mass[0][row] == Approx(b.mass[0][row]).epsilon(off));
      CHECK(a.links_of(Index(row))[0].weight ==
            Approx(b.links_of(Index(row))[0].weight).epsilon(off));
    }
  };
  check(KvCache<float>(batch, kv_heads, dim, dim), 1e-5);
  check(KvCache<std::int8_t>(batch, kv_heads, dim, dim), 0.1);
}

TEST_CASE("what does not fit is refused in one sentence", "[weights]") {
  const Geometry g{2, 1, 1, 1, 3, 5, 2, 2};
  const Call<float> call = random_call<float>(g, 0);
  const auto refused = [&](const WeightRequest& request) {
    return message_of([&] {
      (void)measure_weights(ScaledDot<float>{}, call.inputs(), {}, request, call.options);
    });
  };
  CHECK(refused({.links = 0}) == "heed::measure_weights: links is 0, it must be at least 1");
  CHECK(refused({.links = 1, .sets = {KeySet{{{{0, 6}}}}}}) ==
        "heed::measure_weights: sets[0] has a range [0, 6), it must lie in [0, 5] and not end "
        "before it begins");
  CHECK(refused({.links = 1, .sets = {KeySet{{{{3, 2}}}}}}) ==
        "heed::measure_weights: sets[0] has a range [3, 2), it must lie in [0, 5] and not end "
        "before it begins");
  CHECK(refused({.links = 1, .sets = {KeySet{{{}}}, KeySet{{{}, {}, {}}}}}) ==
        "heed::measure_weights: sets[1] has 3 lists of ranges, it must have 1, one per sequence "
        "(2) or one per query (6)");
  Saved<float> saved;
  CHECK(message_of([&] { (void)measure_weights(ScaledDot<float>{}, call.inputs(), {}, saved); }) ==
        "heed::measure_weights: saved holds nothing: no forward() has filled it, or the last "
        "one threw");
  Options named;
  named.name = "sdpa";
  CHECK(message_of([&] {
          (void)measure_weights(ScaledDot<float>{}, {call.inputs().query, {}, {}}, {}, {}, named);
        }).find("heed::measure_weights(sdpa): key ") == 0);
}
