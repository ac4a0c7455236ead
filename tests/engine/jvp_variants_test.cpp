// SPDX-License-Identifier: Apache-2.0
// Forward mode of every variant, against backward and central differences.

#include "direction.hpp"
#include "forgetting_score.hpp"

#include <heed/compiled.hpp>
#include <heed/plug/features.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>
#include <heed/plug/streaming.hpp>

#include <limits>

using namespace heed;
using namespace heed_test;

namespace {

// Sigmoid of the score less a learnt height.
template <class T>
struct Sigmoids : StreamedRows<T, 1> {
  using P = Pack<T>;
  using State = typename StreamedRows<T, 1>::State;
  using Queries = typename StreamedRows<T, 1>::Queries;
  Param<T> height = T(0.4);
  static constexpr auto parameters = std::tuple{named("height", &Sigmoids::height)};

  // The state holds e^-height, which all weights of the row carry.
  [[nodiscard]] State begin(const Queries& queries) const {
    return {P(T(0)), {P(T(std::exp(-height.head(queries.head))))}};
  }
  [[nodiscard]] P weight(const State& state, P score) const {
    return state.own[0] * math::sigmoid(score);
  }
  [[nodiscard]] P dscore(const State&, P score, P weight, P pull, P) const {
    return weight * math::sigmoid(P(-score)) * pull;
  }
  void vjp(const Queries& queries, const State&, P delta, auto& grad) const {
    grad.height.head(queries.head) -= T(sum_valid_lanes(delta, 0, queries.valid));
  }
  template <class S>
  [[nodiscard]] std::vector<S> reference(const LongHandRow<S>& row) const {
    std::vector<S> weights;
    for (const S& score : row.scores[0])
      weights.push_back(math::exp(S(-height.head(row.head))) * math::sigmoid(score));
    return weights;
  }
};

// A softmax that shares with a sink of learnt height, as a formula.
template <class T>
struct Sink : PlainRows {
  Param<T> height = T(0.3);
  static constexpr auto parameters = std::tuple{named("height", &Sink::height)};
  [[nodiscard]] auto forward(const auto& row) const {
    const auto s = row.score();
    const auto top = row.largest(s);
    const auto e = math::exp(s - top);
    return e / (row.sum(e) + math::exp(row.learnt(height) - top));
  }
};

// What lies less than 1 below the largest score, and nothing else. No comparison with a NaN holds: it hides one.
template <class T>
struct Hinge : PlainRows {
  [[nodiscard]] auto forward(const auto& row) const {
    const auto s = row.score();
    const auto above = s - row.largest(s) + 1.0;
    const auto e = math::select(above > 0.0, above, 0.0);
    return e / (row.sum(e) + 0.1);
  }
};

// Numbers of tokens: one per key and two per query.
template <class T>
struct Scored {
  using Features = TokenInputs<2, 1>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0] + pair.key[0] * pair.query[1];
  }
};

// A temperature of the query's place.
struct Temperature : NothingDerived {
  static constexpr int query_features = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[0] * math::log(S(row.index() + 1.0)) + p[1];
  }
};
template <class T>
struct Tempered {
  using Features = Temperature;
  Param<T> rise = T(0.3), base = T(0.8);
  static constexpr auto parameters =
      std::tuple{named("rise", &Tempered::rise), named("base", &Tempered::base)};
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0];
  }
};

template <class Op>
void check(const char* name, const Op& op, const Geometry& g, const Mask<double>& mask,
           const Options& options) {
  OpCall<Op> call(op, g, mask, options);
  const Direction<Op> direction(call, 7);
  const auto saved = run_jvp(call, direction, true), found = run_jvp(call, direction, false);
  INFO(name);
  CHECK(distance(found.out, saved.out) < 1e-12);
  CHECK(distance(found.out_tangent, saved.out_tangent) < 1e-11);
  CHECK(transpose_gap(call, direction, saved) < 1e-12);
  CHECK(distance(saved.out_tangent, difference_quotient(call, direction, 1e-6)) < 1e-7);
}

}  // namespace

TEST_CASE("Forward mode of every variant is the transpose of backward", "[jvp]") {
  const Geometry g{2, 4, 4, 2, 13, 13, 6, 6};
  for_each_variant<double>(g, [&]<class Op>(const Variant<Op>& variant) {
    check(variant.name, variant.op, variant.geometry, causal<double>(), {});
    check(variant.name, variant.op, variant.geometry, window<double>(4, 2),
          {.threads = 3, .key_tile = 1, .panel_vectors = 1, .dropout = {.rate = 0.2, .seed = 3}});
  });
}

TEST_CASE("Forward mode of a streaming normaliser of one's own is the transpose of backward",
          "[jvp]") {
  using Op = Attention<double, DotScore<double>, Sigmoids<double>, Identity<double>>;
  Op op;
  op.normaliser.height = {0.3, -0.2, 0.1, 0.5};
  check("sigmoids", op, {2, 4, 4, 2, 19, 23, 6, 5}, causal<double>(), {});
}

TEST_CASE(
    "Forward mode of numbers of tokens, features with parameters and row formulas is the transpose "
    "of backward",
    "[jvp]") {
  const Geometry g{2, 4, 4, 2, 13, 17, 6, 5};
  check("sums over tokens", OwnAttention<Forgetting, double>{}, g, causal<double>(), {});
  check("numbers of tokens", OwnAttention<Scored, double>{}, g, causal<double>(), {});
  OwnAttention<Tempered, double> tempered;
  tempered.score.base = {0.8, 0.5, 0.3, 1.1};
  check("features with parameters", tempered, g, causal<double>(), {});
  Attention<double, DotScore<double>, Sink<double>, Identity<double>> sink;
  check("a row formula", sink, g, causal<double>(), {.threads = 2, .key_tile = 1});
}

TEST_CASE("A query of NaN makes the tangents of its own row NaN, and of no other", "[jvp]") {
  const auto look = []<class Op>(const char* name, const Op& op, const Geometry& g) {
    INFO(name);
    OpCall<Op> call(op, g, causal<double>(Align::top_left, -1));
    const Direction<Op> direction(call, 7);
    const auto row = std::size_t((g.len_q + 5) * g.dim_v), end = row + std::size_t(g.dim_v);
    OpCall<Op> spoilt = call;
    const Index query_head = g.query_heads / g.heads;  // the first of the second output head
    spoilt.query[std::size_t((query_head * g.len_q + 5) * g.dim_qk)] =
        std::numeric_limits<double>::quiet_NaN();
    for (const bool saved : {true, false}) {
      const auto clean = run_jvp(call, direction, saved),
                 touched = run_jvp(spoilt, direction, saved);
      for (std::size_t n = 0; n < clean.out_tangent.size(); ++n) {
        if (n < row || n >= end)
          CHECK(touched.out_tangent[n] == clean.out_tangent[n]);
        else
          CHECK(std::isnan(touched.out_tangent[n]));
      }
      // The first query of a head sees nothing: its row is 0, but where a readout adds to it.
      for (std::size_t n = 0; n < std::size_t(g.dim_v); ++n)
        CHECK((clean.out[n] != 0.0 || clean.out_tangent[n] == 0.0));
    }
  };
  const Geometry g{2, 4, 4, 2, 13, 13, 6, 6};
  for_each_variant<double>(g, [&]<class Op>(const Variant<Op>& variant) {
    look(variant.name, variant.op, variant.geometry);
  });
  look("a row formula", Attention<double, DotScore<double>, Sink<double>, Identity<double>>{}, g);
  look("a comparison", Attention<double, DotScore<double>, Hinge<double>, Identity<double>>{}, g);
}

TEST_CASE("A first query of NaN makes its row NaN where a comparison hides its keys", "[jvp]") {
  using Op = Attention<double, DotScore<double>, Hinge<double>, Identity<double>>;
  OpCall<Op> call({}, {1, 1, 1, 1, 3, 5, 4, 4});
  call.query[0] = std::numeric_limits<double>::quiet_NaN();
  const auto moved = run_jvp(call, Direction<Op>(call, 7), false);
  CHECK(std::isnan(moved.lse[0]));
  CHECK(std::isfinite(moved.lse[1]));
  CHECK(std::isnan(moved.out[0]));
  CHECK(std::isnan(moved.out_tangent[0]));
}
