// SPDX-License-Identifier: Apache-2.0
// A layer that takes tokens in steps gives the rows of the whole sequence, in whatever way its op reads positions.

#include "catch.hpp"

#include <heed/engine/doors.hpp>
#include <heed/nn/projected_attention.hpp>
#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace heed;

// A score with slopes of distances, as in ALiBi and KERPLE.
template <class T>
struct Fading {
  Param<T> slope = T(0.3), rate = T(0.6);
  static constexpr auto parameters =
      std::tuple{named("slope", &Fading::slope), named("rate", &Fading::rate)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * distance(pair) - math::log(S(1.0 + p[1] * distance(pair)));
  }
};

// A score with a bucket for each distance up to 9, as in T5.
template <class T>
struct Buckets {
  Param<T> table = Param<T>({1, 10}, {0.4, -0.3, 0.9, 0.1, -0.8, 0.2, 0.6, -0.5, 0.3, -0.2});
  std::vector<Index> shape(const Geometry&) const { return {-1, 10}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Buckets::table, &Buckets::shape)};
  static constexpr auto positions = &Buckets::table;
  Index bucket(Index distance) const { return std::min<Index>(std::abs(distance), 9); }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.position;
  }
};

// A score with a bucket for each pair of places in rows of three.
template <class T>
struct Grid {
  Param<T> table = Param<T>({1, 9}, {0.4, -0.3, 0.9, 0.1, -0.8, 0.2, 0.6, -0.5, 0.3});
  std::vector<Index> shape(const Geometry&) const { return {-1, 9}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Grid::table, &Grid::shape)};
  static constexpr auto positions = &Grid::table;
  Index bucket(Index i, Index j) const { return i % 3 * 3 + j % 3; }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.position;
  }
};

// A score with a vector for each distance up to 2, as in Shaw.
template <class T>
struct Relative {
  Param<T> rows = Param<T>({1, 5, 4}, {0.4, -0.3, 0.9, 0.1,  -0.8, 0.2,  0.6, -0.5, 0.3, 0.7,
                                       0.5, -0.1, 0.2, -0.6, 0.8,  -0.4, 0.1, 0.9,  0.6, -0.7});
  std::vector<Index> shape(const Geometry& g) const { return {-1, -1, g.dim_qk}; }
  static constexpr auto parameters = std::tuple{tensor("rows", &Relative::rows, &Relative::shape)};
  static constexpr auto relative_rows = &Relative::rows;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.table;
  }
};

template <class T>
struct Turned {
  using Transform = Rotation<T>;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

// A temperature that grows with the position.
struct Rising : NothingDerived {
  static constexpr int query_features = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = math::log1p(row.index()) + S(1.0);
  }
};
template <class T>
struct Warming {
  using Features = Rising;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0];
  }
};

// softmax(s - |i - j| / 4) / (1 + i / 10)
template <class T>
struct FadingRows : PlainRows {
  auto forward(const auto& row) const {
    const auto apart = math::absolute(row.query_index() - row.key_index());
    return row.softmax(row.score() - T(0.25) * apart) / (1 + T(0.1) * row.query_index());
  }
};

constexpr Index kWidth = 16, kLen = 23, kBatch = 2;

template <class Op>
void check(const Op& op) {
  nn::AttentionOptions options = nn::AttentionOptions::even(kWidth, 4);
  options.heads.kv_heads = 2;
  nn::ProjectedAttention<Op> layer(options, op, causal<double>());
  int n = 0;
  layer.visit([&](const std::string& name, Param<double>& weight, Param<double>&) {
    const bool projects = name.find("c_") == 0;
    for (Index i = 0; i < weight.size() && projects; ++i) weight[i] = std::sin(double(++n));
  });
  nn::Context<double> c;
  nn::Matrix<double> x(kBatch * kLen, kWidth), whole(kBatch * kLen, kWidth);
  for (Index i = 0; i < kBatch * kLen * kWidth; ++i) x.view().row(0)[i] = std::cos(3.0 * double(i));
  const auto row_of = [](auto& rows, Index b, Index t) { return rows.view().row(b * kLen + t); };
  layer.forward(c, kBatch, std::as_const(x).view(), whole.view());
  REQUIRE(layer.can_step());
  // Steps of few tokens, steps of many, and a prompt with single tokens behind it.
  for (const std::vector<Index>& steps :
       {std::vector<Index>(23, 1), {3, 3, 3, 4, 4, 3, 3}, {9, 14}, {18, 1, 1, 1, 1, 1}, {23}}) {
    KvCache<double> cache = layer.new_cache(kBatch);
    double largest = 0;
    for (const Index count : steps) {
      const Index from = cache.len();
      nn::Matrix<double> part(kBatch * count, kWidth), y(kBatch * count, kWidth);
      for (Index b = 0; b < kBatch; ++b)
        for (Index t = 0; t < count; ++t)
          std::copy_n(row_of(x, b, from + t), kWidth, part.view().row(b * count + t));
      layer.step(c, kBatch, std::as_const(part).view(), y.view(), cache);
      for (Index b = 0; b < kBatch; ++b)
        for (Index t = 0; t < count; ++t)
          for (Index k = 0; k < kWidth; ++k)
            largest = std::max(
                largest, std::abs(y.view().row(b * count + t)[k] - row_of(whole, b, from + t)[k]));
    }
    INFO("steps of " << steps[0] << " tokens and so on");
    REQUIRE(cache.len() == kLen);
    CHECK(largest < 1e-12);
  }
  // Whole sequences begin at position 0 again.
  nn::Matrix<double> again(kBatch * kLen, kWidth);
  layer.forward(c, kBatch, std::as_const(x).view(), again.view());
  for (Index k = 0; k < kWidth; ++k)
    CHECK(row_of(again, kBatch - 1, kLen - 1)[k] == row_of(whole, kBatch - 1, kLen - 1)[k]);
}
template <template <class> class Formula>
void check_score() {
  check(OwnAttention<Formula, double>());
}

}  // namespace

TEST_CASE("A layer's steps read the distances of their tokens in the whole sequence") {
  SECTION("slopes") { check_score<Fading>(); }
  SECTION("a table by distance") { check_score<Buckets>(); }
  SECTION("a table by pair") { check_score<Grid>(); }
  SECTION("relative rows") { check_score<Relative>(); }
}
TEST_CASE("A layer rotates the rows of a step by their places behind the cache") {
  OwnAttention<Turned, double> op;
  op.score.log_base = 1.5;
  check(op);
}
TEST_CASE("A layer's steps tell features and normalisers where their tokens stand") {
  SECTION("features of rows") { check_score<Warming>(); }
  SECTION("a formula of rows") {
    check(Attention<double, DotScore<double>, FadingRows<double>, Identity<double>>());
  }
}
