// SPDX-License-Identifier: Apache-2.0
// Row normalisers given by forward(row) alone: against the reference and difference quotients, and
// against derivatives by hand; with hidden pairs, several threads and several score maps.

#include "catch.hpp"
#include "message_of.hpp"
#include "own_op.hpp"

#include <heed/plug/own_score.hpp>
#include <heed/plug/row_formula.hpp>
#include <heed/plug/row_kit.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace {

using namespace heed;
using namespace heed_test;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A formula that reads everything of a row except tables and further maps: positions, counts, the
// query, the extra input, parameters.
template <class T>
struct Everything : PlainRows {
  static constexpr bool uses_extra = true, uses_query = true;
  Param<T> slope = T(0.3), bends;
  double bend = 0.5;
  std::vector<Index> bends_shape(const Geometry&) const { return {3, 2}; }
  static constexpr auto parameters =
      std::tuple{named("slope", &Everything::slope),
                 tensor("bends", &Everything::bends, &Everything::bends_shape),
                 option("bend", &Everything::bend)};

  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto distance = math::absolute(row.query_index() - row.key_index());
    const auto x = s - row.learnt(slope) * math::log1p(distance) + row.learnt(bends, 4) * s * s;
    const auto p = row.softmax(x * math::sigmoid(row.query(1)));
    const auto older = row.sum_up_to(p);
    const auto size = math::sqrt(row.sum(p * p)) + bend * row.extra() / row.visible();
    return math::select(older < 0.5, p, p * row.learnt(bends, 1)) * math::exp(-size) +
           0.1 * row.product_behind(1 - p) / (1 + row.sum_from(p));
  }
};

// A formula with every word, each with a weight of its own.
template <class T>
struct Words : PlainRows {
  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto n = row.sum(math::sigmoid(s));  // per query, above 0
    const auto of_pairs = math::exp(s) + 0.3 * math::expm1(s) - 0.2 * math::log(2 + s * s) +
                          math::log1p(s * s) + math::sqrt(1 + s * s) - math::sin(s) +
                          0.4 * math::cos(s) + math::tanh(s) + 0.6 * math::erf(s) +
                          math::sigmoid(-s) + 0.7 * math::softplus(s) + math::pow(1 + s * s, 1.5) +
                          math::pow(n, s) + math::maximum(s, 0.1) - math::minimum(0.2, s) +
                          math::absolute(s) + math::select(s <= 0.3, s * s, s) + (2 - s) / n +
                          0.8 * math::minimum(s, -0.1);
    const auto of_rows = math::exp(-n) + math::tanh(n) + math::log(n) + math::maximum(n, 1) +
                         math::select(n >= 2.0, n, n * n) - n / 3;
    return 0.0005 * of_pairs * of_rows;
  }
};

// Softmax with a sink, by formula and by hand.
template <class T>
struct Sink : PlainRows {
  Param<T> height = T(0);
  static constexpr auto parameters = std::tuple{named("height", &Sink::height)};
  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto top = row.largest(s);
    const auto e = math::exp(s - top);
    return e / (row.sum(e) + math::exp(row.learnt(height) - top));
  }
};
template <class T>
struct SinkByHand : PlainRows {
  using P = Pack<T>;
  Param<T> height = T(0);
  static constexpr auto parameters = std::tuple{named("height", &SinkByHand::height)};
  void forward(const RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) (void)weigh(block, v, block.scores[0]);
  }
  void vjp(const RowBlock<T>& block, SinkByHand& grad) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P share = weigh(block, v, block.dscores[0]);
      const P r = softmax_row_vjp(block, v);
      grad.height.head(block.head) -= T(sum_valid_lanes(P(share * r), v, block.valid_lanes));
    }
  }
  P weigh(const RowBlock<T>& block, int v, const LaneTile<T>& weights) const {
    const auto [top, sum] = exponentiate_row(block, v, weights);
    const P b = height.head(block.head);
    scale_row(weights, v, P(T(1) / (sum + math::exp(P(b - top)))));
    return T(1) / (T(1) + sum * math::exp(P(top - b)));
  }
};

// All heads talk with all: w_h = sum_n out_hn softmax(sum_m in_nm s_m). Every output head reads all query heads.
template <class T>
struct Talk : PlainRows {
  static constexpr int maps = 3;
  Param<T> in, out;
  std::vector<Index> shape(const Geometry&) const { return {maps, maps}; }
  static constexpr auto parameters =
      std::tuple{tensor("in", &Talk::in, &Talk::shape), tensor("out", &Talk::out, &Talk::shape)};
  Source source(const Geometry& g, Index, int map) const { return whole_head(g, map); }
  auto forward(const auto& row) const {
    const auto softmax = [&](int n) {
      return row.softmax(row.learnt(in, n * maps) * row.score(0) +
                         row.learnt(in, n * maps + 1) * row.score(1) +
                         row.learnt(in, n * maps + 2) * row.score(2));
    };
    const Index h = row.head() * maps;
    return row.learnt(out, h) * softmax(0) + row.learnt(out, h + 1) * softmax(1) +
           row.learnt(out, h + 2) * softmax(2);
  }
};

// Eight maps, the left columns of eight query heads.
template <class T>
struct Eight : PlainRows {
  static constexpr int maps = kMostMaps;
  Source source(const Geometry& g, Index h, int map) const {
    const Index head = (h + map) % g.heads;
    return {head, g.kv_head(head), 0, 0, 2};
  }
  auto forward(const auto& row) const {
    return row.softmax(row.score(0) * row.score(1) + row.score(2) * row.score(3) - row.score(4) +
                       row.score(5) * row.score(7) - row.score(6));
  }
};

// A position that counts, as in contextual position encoding.
template <class T>
struct Counted : PlainRows {
  static constexpr bool uses_query = true;
  Param<T> table;
  std::vector<Index> shape(const Geometry& g) const { return {4, g.dim_qk}; }
  static constexpr auto parameters = std::tuple{tensor("table", &Counted::table, &Counted::shape)};
  auto forward(const auto& row) const {
    const auto s = row.score();
    return row.softmax(s +
                       row.interpolate(row.products(table), row.sum_from(math::sigmoid(s)) - 1));
  }
};

// Scores below 0 have no gradient, though the root that is not taken has an infinite slope there.
template <class T>
struct Roots : PlainRows {
  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto root = math::sqrt(math::maximum(s, 0));
    return math::select(s > 0.2, root, 0 * s) + 0.0 / math::maximum(s, 0.5);
  }
};

// Uniform weights, with the number of keys as a diagnostic.
template <class T>
struct Counting : PlainRows {
  static constexpr int diagnostics = 1;
  [[nodiscard]] static const char* diagnostic_name(int) { return "keys"; }
  auto forward(const auto& row) const {
    row.report(0, row.visible());
    return 0 * row.score() + 1 / row.visible();
  }
};

template <template <class> class Normaliser, class T>
using With = Attention<T, DotScore<T>, Normaliser<T>, Identity<T>>;

template <class T>
[[nodiscard]] Param<T> numbers(std::vector<Index> shape) {
  Param<T> param(std::move(shape));
  for (Index n = 0; n < param.size(); ++n) param[n] = T(0.4 + 0.5 * std::sin(double(5 * n + 1)));
  return param;
}

template <class Op>
void check(const Op& op, const Geometry& g, std::size_t least_cases = 8) {
  check_passes(op, g, 6, least_cases);
}

constexpr Geometry kSmall{2, 4, 4, 2, 11, 11, 6, 6}, kOdd{1, 2, 2, 1, 9, 131, 5, 3};

[[nodiscard]] std::vector<double> flattened(auto& call) {
  std::vector<double> all(call.out.begin(), call.out.end());
  for (const NamedTensor& tensor : call.gradients())
    all.insert(all.end(), tensor.values.begin(), tensor.values.end());
  return all;
}

}  // namespace

TEST_CASE("Formulas of rows agree with their twins and with difference quotients", "[plug]") {
  SECTION("all that a row has") {
    With<Everything, double> op;
    op.normaliser.bends = numbers<double>({3, 2});
    op.normaliser.slope = {0.3, 0.2, 0.1, 0.4};
    check(op, kSmall);
    op.normaliser.slope = 0.25;
    check(op, kOdd, 7);
  }
  SECTION("every word") { check(With<Words, double>{}, kSmall); }
  SECTION("a table along the query") {
    With<Counted, double> op;
    op.normaliser.table = numbers<double>({4, 6});
    check(op, kSmall);
    op.normaliser.table = numbers<double>({4, 5});
    check(op, kOdd, 7);
  }
  SECTION("sides that are not taken") { check(With<Roots, double>{}, kSmall); }
}

TEST_CASE("Output heads may share query heads in several score maps", "[plug]") {
  SECTION("talking heads") {
    With<Talk, double> op;
    op.normaliser.in = op.normaliser.out = numbers<double>({3, 3});
    check(op, {2, 3, 3, 3, 11, 11, 6, 6}, 7);
    check(op, {1, 3, 3, 1, 9, 40, 5, 3}, 7);
  }
  SECTION("as many maps as there may be") {
    check(With<Eight, double>{}, {1, 4, 4, 2, 11, 11, 6, 4});
  }
}

TEMPLATE_TEST_CASE("A formula's gradients are those by hand", "[plug]", float, double) {
  const auto gradients = [](auto op, const Mask<TestType>& mask) {
    op.normaliser.height = {TestType(-1), TestType(0.5), TestType(1), TestType(2)};
    OpCall call(op, Geometry{2, 4, 4, 2, 41, 77, 6, 5}, mask);
    call.forward();
    call.backward();
    return flattened(call);
  };
  for (const Mask<TestType>& mask :
       {Mask<TestType>(), causal<TestType>(Align::bottom_right), window<TestType>(9, 2)}) {
    const auto derived = gradients(With<Sink, TestType>{}, mask),
               by_hand = gradients(With<SinkByHand, TestType>{}, mask);
    REQUIRE(derived.size() == by_hand.size());
    double largest = 0;
    for (std::size_t n = 0; n < derived.size(); ++n)
      largest = std::max(largest, std::abs(derived[n] - by_hand[n]));
    // A few roundings of numbers up to some tens (the gradient of the height, a sum over 82 rows).
    CHECK(largest < 100 * double(std::numeric_limits<TestType>::epsilon()));
  }
}

TEST_CASE("What hidden pairs hold leaves no trace in a formula's row", "[plug]") {
  // Hides keys of a document without queries, and keys behind the query.
  const auto run = [](auto op, double at_hidden) {
    const Geometry g{1, 3, 3, 3, 40, 45, 6, 6};
    std::vector<Index> of_keys(45, 0);
    for (std::size_t j = 3; j < 45; j += 7) of_keys[j] = 1;
    OpCall call(op, g, documents<float>(std::vector<Index>(40, 0), of_keys) & causal<float>());
    for (auto* tensor : {&call.key, &call.value})
      for (Index h = 0; h < 3; ++h)
        for (Index j = 0; j < 45; ++j)
          if (of_keys[std::size_t(j)] == 1 || j > 39)
            std::fill_n(tensor->begin() + (h * 45 + j) * 6, 6, float(at_hidden));
    call.forward();
    call.backward();
    return flattened(call);
  };
  const auto same = [&](const auto& op) {
    const std::vector<double> with_numbers = run(op, 0.7);
    CHECK(with_numbers == run(op, kNan));
    CHECK(with_numbers == run(op, std::numeric_limits<double>::infinity()));
    for (const double x : with_numbers)
      if (!std::isfinite(x)) FAIL("a number is not finite");
  };
  With<Everything, float> everything;
  everything.normaliser.bends = numbers<float>({3, 2});
  same(everything);
  With<Counted, float> counted;
  counted.normaliser.table = numbers<float>({4, 6});
  same(counted);
  With<Talk, float> talk;
  talk.normaliser.in = talk.normaliser.out = numbers<float>({3, 3});
  same(talk);
  same(With<Roots, float>{});
}

TEST_CASE("Formulas of rows report what they are asked to", "[plug]") {
  OpCall call(With<Counting, float>{}, Geometry{1, 2, 2, 2, 5, 40, 4, 4}, causal<float>());
  call.forward();
  CHECK(call.saved.diagnostic_names == std::vector<std::string>{"keys"});
  CHECK(call.saved.diagnostics.at(0) == std::vector<float>{1, 2, 3, 4, 5, 1, 2, 3, 4, 5});
}

TEST_CASE("A formula has the same bits for any number of threads", "[plug]") {
  With<Counted, float> counted;
  counted.normaliser.table = numbers<float>({4, 8});
  With<Talk, float> talk;
  talk.normaliser.in = talk.normaliser.out = numbers<float>({3, 3});
  const auto same = [](const auto& op) {
    OpCall call(op, Geometry{2, 3, 3, 3, 150, 170, 8, 8}, causal<float>(Align::bottom_right));
    std::vector<double> first;
    for (const int threads : {1, 2, 3, 8}) {
      call.options.threads = threads;
      call.forward();
      call.backward();
      const std::vector<double> all = flattened(call);
      if (first.empty()) first = all;
      CHECK(all == first);
    }
  };
  same(counted);
  same(talk);
}

namespace {

// Mistakes that show only in numbers.
template <class T>
struct Mistaken : PlainRows {
  int mistake = 0;
  Param<T> named_one = T(1), other = T(1), table = Param<T>(std::vector<Index>{4, 3});
  static constexpr bool uses_query = true;
  std::vector<Index> shape(const Geometry&) const { return {4, 3}; }
  static constexpr auto parameters = std::tuple{named("named_one", &Mistaken::named_one),
                                                tensor("table", &Mistaken::table, &Mistaken::shape),
                                                option("mistake", &Mistaken::mistake)};
  auto forward(const auto& row) const {
    if (mistake == 1) return row.learnt(other) * row.score();
    if (mistake == 2) return row.learnt(table, 12) * row.score();
    if (mistake == 3) return row.learnt(named_one) * row.score(1);
    if (mistake == 4) (void)row.products(table);
    if (mistake == 5 && row.head() == 1) (void)row.softmax(row.score());
    return row.learnt(named_one) * row.score();
  }
};

}  // namespace

TEST_CASE("Mistakes in a formula of rows are told in one sentence", "[plug]") {
  const auto said = [](int mistake) {
    With<Mistaken, float> op;
    op.normaliser.mistake = mistake;
    OpCall call(op, Geometry{1, 2, 2, 2, 9, 9, 4, 4});
    return message_of([&] { call.forward(); });
  };
  CHECK(said(0) == "nothing was thrown");
  CHECK(said(1).find("a learnt parameter that `parameters` does not name") != std::string::npos);
  CHECK(said(2).find("entry 12 of a learnt parameter with 12 entries") != std::string::npos);
  CHECK(said(3).find("asks for map 1 of 1") != std::string::npos);
  CHECK(said(4).find("of shape (4,3), it must be (2 or more, 4)") != std::string::npos);
  CHECK(said(5).find("keeps more columns than the 0 that it keeps in head 0") != std::string::npos);
}
