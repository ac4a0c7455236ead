// SPDX-License-Identifier: Apache-2.0
// Scores that read positions: learnt tables by distance or by pair of positions, positions of rows,
// counts of visible keys; against the reference.

#include "catch.hpp"
#include "message_of.hpp"

#include <heed/check/op_check.hpp>
#include <heed/plug/own_score.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using heed_test::message_of;

// Distances 0 ... 3 one by one, further ones by powers of two; those to the other side in buckets of their own.
template <class Real>
struct Buckets {
  Param<Real> table = Param<Real>(std::vector<Index>{1, 16});
  std::vector<Index> shape(const Geometry&) const { return {-1, 16}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Buckets::table, &Buckets::shape)};
  static constexpr auto positions = &Buckets::table;

  Index bucket(Index distance) const {
    const Index far = std::abs(distance), side = distance < 0 ? 8 : 0;
    if (far < 4) return side + far;
    return side + std::min<Index>(7, 2 + Index(std::log2(double(far))));
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit + pair.position;
  }
};

// Tokens of an image `width` wide: one entry for each offset of rows and columns. Read times the logit, so that its
// gradient depends on the pair.
template <class Real>
struct Image {
  Index width = 4, reach = 20;
  Param<Real> table = Param<Real>(std::vector<Index>{1, 41 * 7});
  std::vector<Index> shape(const Geometry&) const { return {-1, (2 * reach + 1) * 7}; }
  static constexpr auto parameters =
      std::tuple{tensor("table", &Image::table, &Image::shape), option("width", &Image::width),
                 option("reach", &Image::reach)};
  static constexpr auto positions = &Image::table;

  Index bucket(Index i, Index j) const {
    const Index rows = std::clamp(i / width - j / width, -reach, reach) + reach;
    return rows * 7 + (i % width - j % width) + 3;
  }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * (S(1.0) + pair.position) + pair.position;
  }
};

// A score that forgets that keys may stand behind the query.
template <class Real>
struct Nearest {
  Param<Real> table = Param<Real>(std::vector<Index>{1, 4});
  std::vector<Index> shape(const Geometry&) const { return {-1, 4}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Nearest::table, &Nearest::shape)};
  static constexpr auto positions = &Nearest::table;
  Index bucket(Index i, Index j) const { return std::min<Index>(i - j, 3); }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.position;
  }
};

// A table of distances from 0 on.
template <class Real>
struct Behind {
  Param<Real> table = Param<Real>(std::vector<Index>{1, 9});
  std::vector<Index> shape(const Geometry&) const { return {-1, 9}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Behind::table, &Behind::shape)};
  static constexpr auto positions = &Behind::table;
  Index bucket(Index distance) const { return distance; }
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.position;
  }
};

template <class Real>
struct Fixed {
  Param<Real> weights = {Real(1), Real(2), Real(3)};
  static constexpr auto parameters = std::tuple{fixed("weights", &Fixed::weights)};
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit;
  }
};

// Scalable softmax: s log n (q . k), n the number of keys that the query sees.
template <class Real>
struct Scalable {
  using Features = LogVisible;
  Param<Real> scale = Real(0.4);
  static constexpr auto parameters = std::tuple{named("scale", &Scalable::scale)};
  template <class S>
  S score(const auto& pair, const auto& p) const {
    return p[0] * pair.query[0] * pair.logit;
  }
};

// q . k (1 + i / 10) / (1 + j): factors of rows, by their places.
struct Places : NothingDerived {
  static constexpr int query_features = 1, key_features = 1;
  template <class Row, class S>
  void query_features_of(const Row& row, S* f) const {
    f[0] = math::constant<S>(1) + row.index() * math::constant<S>(0.1);
  }
  template <class Row, class S>
  void key_features_of(const Row& row, S* f) const {
    f[0] = math::constant<S>(1) / (math::constant<S>(1) + row.index());
  }
};
template <class Real>
struct Placed {
  using Features = Places;
  template <class S>
  S score(const auto& pair, const auto&) const {
    return pair.logit * pair.query[0] * pair.key[0];
  }
};

template <class Op>
void fill(Op& op, Index heads) {
  auto& table = op.score.table;
  const Index entries = table.extent(1);
  table = std::remove_cvref_t<decltype(table)>(std::vector<Index>{heads, entries});
  for (Index n = 0; n < table.size(); ++n)
    table[n] = typename Op::Scalar(std::sin(double(3 * n + 1)));
}

template <class Op>
void check(Op op) {
  for (const Geometry& g :
       {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 70, 131, 6, 3}})
    for (const Index heads : {Index(1), g.heads}) {
      fill(op, heads);
      // Additional sizes with other numbers of heads are refused, and the report says so.
      const OpReport report = check_op(op, g, {.max_entries_per_tensor = 24});
      INFO(report.text());
      CHECK(report.passed());
      CHECK(report.cases.size() >= 8);
    }
}

}  // namespace

TEST_CASE("Tables of positions agree with the twin", "[plug]") {
  SECTION("by distance") { check(OwnAttention<Buckets, double>{}); }
  SECTION("by pair") { check(OwnAttention<Image, double>{}); }
}

TEST_CASE("Features of rows know their positions and what they see", "[plug]") {
  const auto check_places = [](auto op) {
    for (const Geometry& g :
         {Geometry{2, 4, 4, 2, 11, 11, 6, 6}, Geometry{1, 2, 2, 1, 70, 131, 6, 3}}) {
      const OpReport report = check_op(op, g);
      INFO(report.text());
      CHECK(report.passed());
    }
  };
  check_places(OwnAttention<Scalable, double>{});
  check_places(OwnAttention<Placed, double>{});
}

TEST_CASE("Gradients of tables have the same bits for any number of threads", "[plug]") {
  OwnAttention<Buckets, float> op;
  fill(op, 4);
  OpCall<OwnAttention<Buckets, float>> call(op, {2, 4, 4, 2, 300, 280, 8, 8},
                                            causal<float>(Align::bottom_right));
  std::vector<float> first;
  for (const int threads : {1, 2, 3, 8}) {
    call.options.threads = threads;
    call.forward();
    call.backward();
    const auto& table = call.grad_op.score.table;
    const std::vector<float> gradient(table.data(), table.data() + table.size());
    if (first.empty()) first = gradient;
    CHECK(gradient == first);
  }
}

TEST_CASE("What a hidden key holds does not reach the table", "[plug]") {
  OwnAttention<Image, float> op;
  fill(op, 1);
  const Geometry g{1, 2, 2, 2, 40, 45, 4, 4};
  std::vector<Index> of_keys(45, 0);
  for (std::size_t j = 3; j < 45; j += 7) of_keys[j] = 1;  // a document without queries
  OpCall<OwnAttention<Image, float>> call(op, g,
                                          documents<float>(std::vector<Index>(40, 0), of_keys));
  for (std::size_t j = 3; j < 45; j += 7)
    for (const std::size_t row : {j, 45 + j})
      std::fill_n(call.key.begin() + Index(row * 4), 4, std::numeric_limits<float>::quiet_NaN());
  call.forward();
  call.backward();
  const auto& table = call.grad_op.score.table;
  for (Index n = 0; n < table.size(); ++n) CHECK(std::isfinite(table[n]));
}

TEST_CASE("Tables that do not fit are refused", "[plug]") {
  const Geometry g{1, 2, 2, 2, 9, 9, 4, 4};
  SECTION("an entry that the table does not have") {
    OpCall<OwnAttention<Nearest, float>> call({}, g);
    CHECK(
        message_of([&] { call.forward(); }) ==
        "heed: bucket() of the score gives -1 for pair (0, 1), it must lie in [0, 4): the table of "
        "positions has 4 entries per head");
  }
  SECTION("an entry that the table does not have, by distance") {
    OpCall<OwnAttention<Behind, float>> call({}, g);
    CHECK(message_of([&] { call.forward(); }) ==
          "heed: bucket() of the score gives -8 for the distance -8, it must lie in [0, 9): the "
          "table of positions has 9 entries per head");
  }
  SECTION("numbers that are not finite") {
    OwnAttention<Buckets, float> op;
    fill(op, 2);
    op.score.table[16 + 3] = std::numeric_limits<float>::quiet_NaN();
    OpCall<OwnAttention<Buckets, float>> call(op, g);
    CHECK(message_of([&] { call.forward(); }) ==
          "heed::forward: table[1,3] is nan, it must be finite");
    call.op.score.table[16 + 3] = 0;
    call.forward();
    call.op.score.table[31] = -std::numeric_limits<float>::infinity();
    CHECK(message_of([&] { call.backward(); }) ==
          "heed::backward: table[1,15] is -inf, it must be finite");
    OwnAttention<Fixed, double> of_fixed;
    CHECK(message_of([&] { of_fixed.validate(g, "f"); }) == "nothing was thrown");
    of_fixed.score.weights[2] = std::numeric_limits<double>::infinity();
    CHECK(message_of([&] { of_fixed.validate(g, "f"); }) ==
          "f: weights[2] is inf, it must be finite");
  }
  SECTION("other heads") {
    OwnAttention<Buckets, float> op;
    fill(op, 3);
    OpCall<OwnAttention<Buckets, float>> call(op, g);
    CHECK(message_of([&] { call.forward(); }) ==
          "heed::forward: table has 3 rows, the call has 2 heads; it needs 1 row, or one per head");
  }
}
