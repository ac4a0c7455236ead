// SPDX-License-Identifier: Apache-2.0
// Features of rows that read the parameters of their head: against the reference, with the same
// bits for any number of threads, and kept by a cache as long as the parameters do not change.

#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/kv_cache.hpp>
#include <heed/plug/own_score.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

// A temperature that depends on the query's position and visible keys, differentiated by the library:
// f = p0 log(i + 1) + p1 + 0.1 p0 n
struct Temperature : NothingDerived {
  static constexpr int query_features = 1;
  static constexpr bool counts_visible = true;
  template <class Row, class S>
  void query_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[0] * math::log(S(row.index() + 1.0)) + p[1] + 0.1 * p[0] * row.visible();
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

// Numbers of the row, of its place and of the parameters, by hand: f = (p0 |x|^2 + p1 sqrt(i + 1)) / 32
//   df/dx = p0 x / 16       df/dp0 = |x|^2 / 32       df/dp1 = sqrt(i + 1) / 32
struct WeighedNorm {
  template <class Row, class P, class S>
  static void of(const Row& row, const P& p, S* f) {
    f[0] = (p[0] * SquaredNorm::of<S>(row) + p[1] * root<S>(row)) * S(1.0 / 32);
  }
  template <class Row, class P, class S, class Add>
  static void vjp(const Row& row, const P& p, const S* df, const Add& add, P& dp) {
    const S part = df[0] * S(1.0 / 32);
    dp[0] += part * SquaredNorm::of<S>(row);
    dp[1] += part * root<S>(row);
    SquaredNorm::vjp(row, part, S(p[0] * part), add);
  }

 private:
  template <class S, class Row>
  static S root(const Row& row) {
    return math::sqrt(S(row.index() + S(1.0)));
  }
};
struct WeighedNorms : NothingDerived {
  static constexpr int query_features = 1, key_features = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, const auto& p, S* f) const {
    WeighedNorm::of(row, p, f);
  }
  template <class Row, class P, class S, class Add>
  void query_features_vjp(const Row& row, const P& p, const S*, const S* df, const Add& add,
                          P& dp) const {
    WeighedNorm::vjp(row, p, df, add, dp);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, const auto& p, S* f) const {
    WeighedNorm::of(row, p, f);
  }
  template <class Row, class P, class S, class Add>
  void key_features_vjp(const Row& row, const P& p, const S*, const S* df, const Add& add,
                        P& dp) const {
    WeighedNorm::vjp(row, p, df, add, dp);
  }
};
template <class T>
struct Weighed {
  using Features = WeighedNorms;
  Param<T> weight = T(0.3), slope = T(-0.2);
  static constexpr auto parameters =
      std::tuple{named("weight", &Weighed::weight), named("slope", &Weighed::slope)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit * pair.query[0] - pair.key[0] + p[1] * pair.dot;
  }
};

// Features of keys that depend on the position alone, differentiated by the library.
struct Fade : NothingDerived {
  static constexpr int key_features = 1;
  template <class Row, class S>
  void key_features_of(const Row& row, const auto& p, S* f) const {
    f[0] = p[0] * math::log1p(row.index());
  }
};
template <class T>
struct Fading {
  using Features = Fade;
  Param<T> rate = T(0.4);
  static constexpr auto parameters = std::tuple{named("rate", &Fading::rate)};
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit - pair.key[0];
  }
};

template <class Op>
void spread(Op& op, Index heads) {
  visit_parameters(op.score, [&](const char*, auto& param) {
    const auto first = param[0];
    param = std::remove_cvref_t<decltype(param)>(std::vector<Index>{heads});
    for (Index h = 0; h < heads; ++h) param[h] = first * typename Op::Scalar(1 + 0.3 * double(h));
  });
}

template <class Op>
void check(Op op) {
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 70, 131, 6, 3}})
    for (const bool per_head : {false, true}) {
      if (per_head) spread(op, g.heads);
      check_passes(op, g, 24);
      op = Op{};
    }
}

}  // namespace

TEST_CASE("Features read the parameters of their head", "[plug]") {
  SECTION("of queries, by duals") { check(OwnAttention<Tempered, double>{}); }
  SECTION("of both rows, by hand") { check(OwnAttention<Weighed, double>{}); }
  SECTION("of keys, by duals") { check(OwnAttention<Fading, double>{}); }
}

TEST_CASE("Gradients through features that read parameters have the same bits on any threads",
          "[plug]") {
  for (const bool per_head : {false, true}) {
    OwnAttention<Weighed, float> op;
    if (per_head) spread(op, 4);
    OpCall<OwnAttention<Weighed, float>> call(op, {2, 4, 4, 2, 100, 150, 8, 8},
                                              causal<float>(Align::bottom_right));
    check_bits_on_threads(call);
  }
}

TEST_CASE("What a hidden key holds does not reach parameters through its features", "[plug]") {
  std::vector<Index> of_keys(45, 0);
  for (std::size_t j = 3; j < 45; j += 7) of_keys[j] = 1;  // a document without queries
  OpCall<OwnAttention<Weighed, float>> call({}, {1, 2, 2, 2, 40, 45, 4, 4},
                                            documents<float>(std::vector<Index>(40, 0), of_keys));
  for (std::size_t j = 3; j < 45; j += 7)
    for (const std::size_t row : {j, 45 + j})
      std::fill_n(call.key.begin() + Index(row * 4), 4, std::numeric_limits<float>::quiet_NaN());
  for (const float g : gradients_of(call)) CHECK(std::isfinite(g));
}

TEST_CASE("Parameters have their gradient where that of key is not asked for", "[plug]") {
  OpCall<OwnAttention<Fading, float>> call({}, {1, 2, 2, 1, 20, 20, 4, 4}, causal<float>());
  call.forward();
  call.backward();
  const float wanted = call.grad_op.score.rate[0];
  OwnAttention<Fading, float> grad;
  const Shape q{1, 2, 20, 4}, k{1, 1, 20, 4};
  backward(call.op, {{call.query.data(), q}, {call.key.data(), k}, {call.value.data(), k}},
           call.mask, call.saved, StoredView<const float>(call.out.data(), q),
           OutputGradients<float>(call.grad_out.data(), q), {}, &grad);
  CHECK(wanted != 0);
  CHECK(grad.score.rate[0] == wanted);
}

TEST_CASE("A cache keeps features of parameters, and refuses those of others", "[plug]") {
  OwnAttention<Weighed, float> op;
  const Index len = 40;
  KvCache<float> cache(1, 1, 4, 4);
  std::vector<float> rows(std::size_t(len * 4)), query(8), out(8), whole(8);
  for (std::size_t n = 0; n < rows.size(); ++n) rows[n] = float(std::sin(double(3 * n + 1)));
  for (std::size_t n = 0; n < query.size(); ++n) query[n] = float(std::cos(double(n)));
  const Shape kept{1, 1, len, 4}, one{1, 2, 1, 4};
  cache.append({rows.data(), kept}, {rows.data(), kept});
  const TensorView<const float> q(query.data(), one);
  for (int call = 0; call < 2; ++call) {
    forward(op, cache.inputs(q), {}, {out.data(), one});
    CHECK(cache.key_features().len() == len);
    Inputs<float> anew{q, cache.keys(), cache.values()};
    anew.first_query = len - 1;
    forward(op, anew, {}, {whole.data(), one});
    CHECK(out == whole);
  }
  op.score.weight = 0.5F;
  CHECK(message_of([&] {
          forward(op, cache.inputs(q), {}, {out.data(), one});
        }) ==
        "heed::forward: weight[0] is 0.5, the key_features that are kept are of an op with 0.3; "
        "KvCache::forget_features() makes room for those of this call");
}
