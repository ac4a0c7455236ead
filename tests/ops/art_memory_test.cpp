// SPDX-License-Identifier: Apache-2.0
#include <heed/io/safetensors.hpp>
#include <heed/models/art_memory_file.hpp>
#include <heed/ops/prototype/art_memory.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

using heed::ArtEvent;
using heed::ArtFound;
using heed::ArtMatching;
using heed::ArtMemory;
using heed::ArtOptions;
using heed::ArtOutcome;
using heed::Index;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
ArtOptions<T> options(ArtMatching matching, Index capacity, Index dim, double vigilance,
                      double eta) {
  return {.capacity = capacity,
          .dim = dim,
          .matching = matching,
          .vigilance = T(vigilance),
          .learning_rate = T(eta)};
}

template <class T>
std::vector<T> values(std::span<const T> s) {
  return {s.begin(), s.end()};
}

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The text of the exception that `call` throws; empty when it throws none or another type.
template <class Error = std::invalid_argument, class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  } catch (...) {
  }
  return {};
}

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The reference: the search written out with a stable sort, in the order of the definition.
template <class T>
struct NaiveMemory {
  ArtOptions<T> o;
  std::vector<std::vector<T>> w;

  T choice(const std::vector<T>& x, const std::vector<T>& p, T* match) const {
    T dot = 0, xx = 0, pp = 0, both = 0, xs = 0, ps = 0;
    for (std::size_t c = 0; c < x.size(); ++c) {
      dot += p[c] * x[c], xx += x[c] * x[c], pp += p[c] * p[c];
      both += std::min(x[c], p[c]), xs += x[c], ps += p[c];
    }
    if (o.matching == ArtMatching::cosine)
      return *match = dot / (std::sqrt(pp) + o.eps) / (std::sqrt(xx) + o.eps);
    *match = xs > 0 ? both / xs : 0;
    return both / (o.choice_alpha + ps);
  }

  ArtEvent<T> learn(const std::vector<T>& x) {
    std::vector<T> choices(w.size()), matches(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) choices[i] = choice(x, w[i], &matches[i]);
    std::vector<Index> order(w.size());
    std::iota(order.begin(), order.end(), Index(0));
    std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) {
      return choices[std::size_t(a)] > choices[std::size_t(b)];
    });
    if (o.matching == ArtMatching::cosine && order.size() > 1) order.resize(1);
    ArtEvent<T> event;
    event.match = order.empty() ? T(0) : matches[std::size_t(order[0])];
    for (const Index i : order) {
      ++event.searched;
      if (matches[std::size_t(i)] < o.vigilance) continue;
      event.index = i, event.outcome = ArtOutcome::resonance, event.match = matches[std::size_t(i)];
      auto& p = w[std::size_t(i)];
      for (std::size_t c = 0; c < x.size(); ++c)
        p[c] = p[c] + o.learning_rate * (std::min(x[c], p[c]) - p[c]);
      return event;
    }
    if (Index(w.size()) < o.capacity) {
      event.index = Index(w.size()), event.outcome = ArtOutcome::created;
      w.push_back(x);
    }
    return event;
  }
};

// Rows in [0,1] (fuzzy, complement coded) or in [-2,2]; a coarse grid makes ties frequent.
template <class T>
std::vector<std::vector<T>> random_rows(ArtMatching matching, Index rows, Index dim, unsigned seed,
                                        int grid) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> cell(0, grid);
  std::vector<std::vector<T>> result;
  for (Index r = 0; r < rows; ++r) {
    const bool fuzzy = matching == ArtMatching::fuzzy;
    std::vector<T> row(std::size_t(fuzzy ? dim / 2 : dim));
    for (T& x : row) x = T(cell(random)) / T(grid);
    if (fuzzy)
      row = ArtMemory<T>::complement_code(row);
    else
      for (T& x : row) x = 4 * x - 2;
    result.push_back(std::move(row));
  }
  return result;
}

}  // namespace

TEST_CASE("Cosine memory agrees with numbers by hand", "[art]") {
  // vigilance 0.7, eta 0.5, room for 2.
  // (3,4)   empty memory: creates 0 = (3,4), match 0
  // (4,3)   cos = (12+12)/(5*5) = 0.96 >= 0.7: W0 += .5 (min((4,3),(3,4)) - W0)
  //         min = (3,3); W0 = (3,4) + .5 (0,-1) = (3,3.5)
  // (-4,3)  cos = (-12+10.5)/(5*sqrt(21.25)) = -0.06507914: creates 1 = (-4,3)
  // (0,-2)  cos0 = -7/(2*4.60977223) = -0.75925660, cos1 = -6/10: full, match of the best: -0.6
  ArtMemory<double> memory(options<double>(ArtMatching::cosine, 2, 2, 0.7, 0.5));
  CHECK(memory.learn(std::vector{3.0, 4.0}) == ArtEvent<double>{0, ArtOutcome::created, 0, 0});

  const auto second = memory.learn(std::vector{4.0, 3.0});
  CHECK(second.index == 0);
  CHECK(second.outcome == ArtOutcome::resonance);
  CHECK(std::abs(second.match - 0.96) < 1e-8);  // eps moves it by 0.96 * 4e-9
  CHECK(second.searched == 1);
  CHECK(values(memory.prototypes()) == std::vector{3.0, 3.5});

  const auto third = memory.learn(std::vector{-4.0, 3.0});
  CHECK(third.index == 1);
  CHECK(third.outcome == ArtOutcome::created);
  CHECK(std::abs(third.match + 0.06507914) < 2e-8);

  const auto fourth = memory.learn(std::vector{0.0, -2.0});
  CHECK(fourth.index == -1);
  CHECK(fourth.outcome == ArtOutcome::full);
  CHECK(std::abs(fourth.match + 0.6) < 1e-8);
  CHECK(values(memory.prototypes()) == std::vector{3.0, 3.5, -4.0, 3.0});
  CHECK(memory.winner(std::vector{0.0, -2.0}).index == 1);
}

TEST_CASE("Fuzzy memory agrees with numbers by hand and searches on past the first choice",
          "[art]") {
  // vigilance 0.75, eta 0.5, choice_alpha 0.001, prototypes (.25,.25,0,0) and (.5,.25,.5,.5).
  // h = (.5,.25,.5,.75), |h| = 2.
  // |min(h,W0)| = .5,   choice0 = .5/.501     = .998003992, match0 = .25
  // |min(h,W1)| = 1.75, choice1 = 1.75/1.751  = .999428898, match1 = .875
  // 1 is the first choice and resonates; min(h,W1) = W1: nothing moves.
  // h = (.25,.25,.25,.25), |h| = 1.
  // |min(h,W0)| = .5, choice0 = .998003992, match0 = .5  < .75
  // |min(h,W1)| = 1,  choice1 = 1/1.751 = .571102228, match1 = 1: second choice resonates,
  // W1 += .5 ((.25,.25,.25,.25) - W1) = (.375,.25,.375,.375)
  ArtMemory<double> memory(options<double>(ArtMatching::fuzzy, 3, 4, 0.75, 0.5));
  memory.set_prototypes(std::vector{.25, .25, 0., 0., .5, .25, .5, .5}, 2);
  CHECK(memory.learn(std::vector{.5, .25, .5, .75}) ==
        ArtEvent<double>{1, ArtOutcome::resonance, .875, 1});
  CHECK(values(memory.prototypes()) == std::vector{.25, .25, 0., 0., .5, .25, .5, .5});

  const std::vector row{.25, .25, .25, .25};
  const auto winner = memory.winner(row);
  CHECK(winner.index == 0);
  CHECK(std::abs(winner.choice - .998003992) < 1e-9);
  CHECK(winner.match == .5);
  CHECK(memory.find(row) == ArtFound<double>{1, 1.0, 2});
  CHECK(memory.learn(row) == ArtEvent<double>{1, ArtOutcome::resonance, 1.0, 2});
  CHECK(values(memory.prototypes()) == std::vector{.25, .25, 0., 0., .375, .25, .375, .375});

  // h = (1,1,1,1): |min(h,W0)| = .5, match .125; |min(h,W1)| = 1.375, match .34375; no match is
  // .75. First choice: 1.375/1.376 > .5/.501, so the match reported is .34375.
  CHECK(memory.learn(std::vector{1., 1., 1., 1.}) ==
        ArtEvent<double>{2, ArtOutcome::created, .34375, 2});
  // h = (0,0,0,1) has min sums 0, .375, 1, choices 0, .375/1.376 = .27253, 1/4.001 = .24994 and
  // matches 0, .375, 1: prototype 2 resonates as the second choice.
  CHECK(memory.learn(std::vector{0., 0., 0., 1.}) ==
        ArtEvent<double>{2, ArtOutcome::resonance, 1.0, 2});
}

TEST_CASE("A match exactly at the vigilance resonates and the next number above does not",
          "[art]") {
  SECTION("fuzzy, an exact fraction") {
    // |min((.5,.5),(.5,.25))| / |(.5,.5)| = .75
    for (const double vigilance : {.75, std::nextafter(.75, 1.0)}) {
      ArtMemory<double> memory(options<double>(ArtMatching::fuzzy, 2, 2, vigilance, 0.5));
      memory.set_prototypes(std::vector{.5, .25}, 1);
      const auto event = memory.learn(std::vector{.5, .5});
      CHECK(event.match == .75);
      CHECK(event.outcome == (vigilance == .75 ? ArtOutcome::resonance : ArtOutcome::created));
    }
  }
  SECTION("cosine, the computed match") {
    const std::vector<float> row{0.3f, -0.7f, 0.2f};
    const std::vector<float> prototype{0.1f, -0.9f, 0.5f};
    ArtMemory<float> probe(options<float>(ArtMatching::cosine, 2, 3, 0.0, 0.5));
    probe.set_prototypes(prototype, 1);
    const float match = probe.find(row).match;
    for (const bool above : {false, true}) {
      auto o = probe.options();
      o.vigilance = above ? std::nextafter(match, 1.0f) : match;
      ArtMemory<float> memory(o);
      memory.set_prototypes(prototype, 1);
      CHECK(memory.find(row).index == (above ? -1 : 0));
      CHECK(memory.learn(row).outcome == (above ? ArtOutcome::created : ArtOutcome::resonance));
    }
  }
}

TEST_CASE("An empty memory finds nothing and creates its first prototype at any vigilance",
          "[art]") {
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy}) {
    ArtMemory<double> memory(options<double>(matching, 1, 2, 0.0, 1.0));
    CHECK(memory.count() == 0);
    CHECK(memory.prototypes().empty());
    CHECK(memory.find(std::vector{.5, .5}) == ArtFound<double>{-1, 0.0, 0});
    CHECK(memory.winner(std::vector{.5, .5}).index == -1);
    CHECK(memory.learn(std::vector{.5, .5}) == ArtEvent<double>{0, ArtOutcome::created, 0.0, 0});
    CHECK(memory.count() == 1);
    memory.reset();
    CHECK(memory.count() == 0);
    CHECK(memory.learn(std::vector{.25, 1.}).outcome == ArtOutcome::created);
    CHECK(values(memory.prototypes()) == std::vector{.25, 1.});
  }
}

TEST_CASE("A full memory still resonates and otherwise changes nothing", "[art]") {
  ArtMemory<double> memory(options<double>(ArtMatching::fuzzy, 2, 2, 0.9, 1.0));
  memory.set_prototypes(std::vector{1., 0., 0., 1.}, 2);
  const auto before = values(memory.prototypes());
  // |min| = .5 with both, matches .5, choices equal: two searched, the first reported.
  CHECK(memory.learn(std::vector{.5, .5}) == ArtEvent<double>{-1, ArtOutcome::full, .5, 2});
  CHECK(values(memory.prototypes()) == before);
  CHECK(memory.count() == 2);
  CHECK(memory.learn(std::vector{0., .5}) == ArtEvent<double>{1, ArtOutcome::resonance, 1., 1});
  CHECK(values(memory.prototypes()) == std::vector{1., 0., 0., .5});
}

TEST_CASE("Ties go to the lowest index in both modes", "[art]") {
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy}) {
    ArtMemory<double> memory(options<double>(matching, 3, 2, 0.5, 0.5));
    memory.set_prototypes(std::vector{0., 1., 1., 0., 1., 0.}, 3);
    CHECK(memory.winner(std::vector{1., 0.}).index == 1);
    CHECK(memory.find(std::vector{1., 0.}).index == 1);
    CHECK(memory.learn(std::vector{1., 0.}).index == 1);
  }
  // choice_alpha .5, h = (.25,.5,0): choices .25/(.5+.5) = .5/(.5+1.5), matches 1/3 and 2/3. The
  // first of the equals is tested first and fails.
  auto o = options<double>(ArtMatching::fuzzy, 3, 3, 0.5, 0.5);
  o.choice_alpha = 0.5;
  ArtMemory<double> memory(o);
  memory.set_prototypes(std::vector{.5, 0., 0., 0., .5, 1.}, 2);
  const std::vector row{.25, .5, 0.};
  CHECK(memory.winner(row).index == 0);
  CHECK(memory.find(row).index == 1);
  CHECK(memory.find(row).searched == 2);
}

TEST_CASE("Learning rate 0 leaves prototypes alone and 1 shrinks them to the minimum", "[art]") {
  for (const double eta : {0.0, 1.0}) {
    ArtMemory<double> memory(options<double>(ArtMatching::fuzzy, 1, 2, 0.0, eta));
    memory.set_prototypes(std::vector{.75, .25}, 1);
    CHECK(memory.learn(std::vector{.5, .5}).outcome == ArtOutcome::resonance);
    CHECK(values(memory.prototypes()) == (eta == 0 ? std::vector{.75, .25} : std::vector{.5, .25}));
  }
}

// On a grid of halves or quarters with eta = 1 every sum is exact: ties are ties whatever the
// compiler fuses. Off the grid only double is compared, where no two choices are that close.
template <class T>
void check_against_twin(ArtMatching matching, int grid, unsigned seed, Index* deep_searches) {
  const Index dim = 2 * Index(1 + seed % 4);
  const bool exact = grid <= 4;
  const auto o =
      options<T>(matching, 1 + Index(seed), dim, seed % 2 ? 0.85 : 0.6, exact ? 1.0 : 0.3);
  const double tolerance = exact ? 0 : 1e-13;
  ArtMemory<T> memory(o);
  NaiveMemory<T> naive{o, {}};
  INFO("seed " << seed << " grid " << grid << " fuzzy " << int(matching));
  for (const auto& row : random_rows<T>(matching, 80, dim, seed, grid)) {
    const ArtFound<T> found = memory.find(row);
    const ArtEvent<T> event = memory.learn(row), expected = naive.learn(row);
    REQUIRE(event.index == expected.index);
    REQUIRE(event.outcome == expected.outcome);
    REQUIRE(event.searched == expected.searched);
    REQUIRE(std::abs(double(event.match) - double(expected.match)) <= tolerance);
    REQUIRE(found.match == event.match);
    REQUIRE(found.searched == event.searched);
    REQUIRE(found.index == (event.outcome == ArtOutcome::resonance ? event.index : -1));
    *deep_searches += event.outcome == ArtOutcome::resonance && event.searched > 1;
  }
  std::vector<T> w;
  for (const auto& p : naive.w) w.insert(w.end(), p.begin(), p.end());
  REQUIRE(memory.prototypes().size() == w.size());
  for (std::size_t i = 0; i < w.size(); ++i)
    REQUIRE(std::abs(double(memory.prototypes()[i]) - double(w[i])) <= tolerance);
}

TEST_CASE("The memory equals its slow twin with a stable sort, ties included", "[art]") {
  Index deep_searches = 0;
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy})
    for (unsigned seed = 1; seed <= 12; ++seed) {
      for (const int grid : {2, 4, 1000})
        check_against_twin<double>(matching, grid, seed, &deep_searches);
      for (const int grid : {2, 4}) check_against_twin<float>(matching, grid, seed, &deep_searches);
    }
  CHECK(deep_searches > 50);
}

TEMPLATE_TEST_CASE("Permuting the prototypes permutes the answer", "[art]", float, double) {
  using T = TestType;
  const Index dim = 6, count = 9;
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy}) {
    const auto prototypes = random_rows<T>(matching, count, dim, 3, 100000);
    std::vector<Index> order(std::size_t{count});
    std::iota(order.begin(), order.end(), Index(0));
    std::shuffle(order.begin(), order.end(), std::mt19937(7));
    std::vector<T> straight, permuted;
    for (Index i = 0; i < count; ++i) {
      const auto& a = prototypes[std::size_t(i)];
      const auto& b = prototypes[std::size_t(order[std::size_t(i)])];
      straight.insert(straight.end(), a.begin(), a.end());
      permuted.insert(permuted.end(), b.begin(), b.end());
    }
    ArtMemory<T> first(options<T>(matching, count, dim, 0.7, 0.5)), second(first.options());
    first.set_prototypes(straight, count);
    second.set_prototypes(permuted, count);
    Index resonant = 0;
    for (const auto& row : random_rows<T>(matching, 60, dim, 4, 100000)) {
      const auto a = first.find(row), b = second.find(row);
      CHECK(a.match == b.match);
      CHECK(a.searched == b.searched);
      CHECK(a.index == (b.index < 0 ? -1 : order[std::size_t(b.index)]));
      CHECK(first.winner(row).index == order[std::size_t(second.winner(row).index)]);
      resonant += a.index >= 0;
    }
    CHECK(resonant > 5);
  }
}

TEST_CASE("Learning the same rows again gives bitwise the same memory", "[art]") {
  const auto rows = random_rows<float>(ArtMatching::cosine, 100, 16, 5, 9973);
  ArtMemory<float> first(options<float>(ArtMatching::cosine, 20, 16, 0.4, 0.3));
  ArtMemory<float> second(first.options());
  for (const auto& row : rows) first.learn(row);
  for (const auto& row : rows) second.learn(row);
  CHECK(first.count() > 3);
  CHECK(same_bits(first.prototypes(), second.prototypes()));

  SECTION("a copy goes on by itself, and a moved-from memory stays whole") {
    ArtMemory<float> copy = first;
    for (const auto& row : rows) copy.learn(row);
    CHECK(same_bits(first.prototypes(), second.prototypes()));
    ArtMemory<float> moved = std::move(copy);
    CHECK(same_bits(copy.prototypes(), moved.prototypes()));
  }
  SECTION("after reset nothing of the past is left") {
    first.reset();
    for (const auto& row : rows) first.learn(row);
    CHECK(same_bits(first.prototypes(), second.prototypes()));
  }
}

TEST_CASE("A view is learned in the order (batch, token) of one head, with strides", "[art]") {
  const Index batch = 3, heads = 2, len = 5, dim = 4;
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  std::vector<double> memory_bthd(std::size_t(batch * len * heads * dim));
  for (double& x : memory_bthd) x = normal(random);
  const auto rows = heed::view_bthd<const double>(memory_bthd.data(), batch, len, heads, dim);
  const auto o = options<double>(ArtMatching::cosine, 4, dim, 0.5, 0.5);
  for (Index head = 0; head < heads; ++head) {
    ArtMemory<double> whole(o), single(o);
    std::vector<ArtEvent<double>> events(std::size_t(batch * len));
    const heed::ArtTally tally = whole.learn(rows, head, events);
    heed::ArtTally counted;
    for (Index b = 0; b < batch; ++b)
      for (Index t = 0; t < len; ++t) {
        const auto event = single.learn(std::span(rows.row(b, head, t), std::size_t(dim)));
        CHECK(event == events[std::size_t(b * len + t)]);
        counted.resonance += event.outcome == ArtOutcome::resonance;
        counted.created += event.outcome == ArtOutcome::created;
        counted.full += event.outcome == ArtOutcome::full;
      }
    CHECK(tally == counted);
    CHECK(tally.created == 4);
    CHECK(tally.resonance + tally.full == batch * len - 4);
    CHECK(same_bits(whole.prototypes(), single.prototypes()));
  }
}

TEST_CASE("A view with a bad row is refused as a whole and an empty view is no work", "[art]") {
  std::vector<double> data(2 * 2 * 3 * 2, 0.5);
  const heed::TensorView<const double> rows(data.data(), {2, 2, 3, 2});
  ArtMemory<double> memory(options<double>(ArtMatching::cosine, 8, 2, 0.99, 0.5));
  memory.learn(std::vector{1.0, -1.0});
  const auto before = values(memory.prototypes());
  data[std::size_t(&rows(1, 0, 2, 1) - data.data())] = kNan;  // head 0, the last row
  const std::string text = refusal([&] { memory.learn(rows, 0); });
  CHECK(holds(text, "token 2 of batch 1"));
  CHECK(holds(text, "value 1"));
  CHECK(values(memory.prototypes()) == before);
  CHECK(memory.learn(rows, 1).created == 1);  // the NaN of head 0 is not seen

  CHECK(memory.learn(heed::TensorView<const double>(nullptr, {0, 1, 3, 2}), 0) == heed::ArtTally{});
  CHECK(memory.learn(heed::TensorView<const double>(data.data(), {2, 1, 0, 2}), 0) ==
        heed::ArtTally{});
  CHECK(holds(refusal([&] { memory.learn(rows, 2); }), "head 2"));
  CHECK(holds(refusal([&] { memory.learn(rows, -1); }), "head -1"));
  CHECK(holds(refusal([&] {
                memory.learn(heed::TensorView<const double>(data.data(), {1, 1, 2, 3}), 0);
              }),
              "dim 3"));
  CHECK(holds(refusal([&] {
                memory.learn(heed::TensorView<const double>(nullptr, {1, 1, 2, 2}), 0);
              }),
              "null"));
  CHECK(holds(refusal([&] {
                memory.learn(heed::TensorView<const double>(data.data(), {1, 1, -2, 2}), 0);
              }),
              "negative"));
  std::vector<ArtEvent<double>> few(5);
  CHECK(holds(refusal([&] { memory.learn(rows, 1, few); }), "5 entries"));
}

TEST_CASE("Rows that are not finite, too short, too long or negative under fuzzy are refused",
          "[art]") {
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy}) {
    ArtMemory<double> memory(options<double>(matching, 4, 3, 0.5, 0.5));
    memory.learn(std::vector{.1, .2, .3});
    const auto before = values(memory.prototypes());
    for (const double bad : {kNan, kInf, -kInf})
      for (std::size_t at = 0; at < 3; ++at) {
        std::vector<double> row{.1, .2, .3};
        row[at] = bad;
        CHECK(holds(refusal([&] { memory.learn(row); }), "value " + std::to_string(at)));
        CHECK(holds(refusal([&] { (void)memory.find(row); }), "finite"));
        CHECK(holds(refusal([&] { (void)memory.winner(row); }), "finite"));
        CHECK(holds(refusal([&] { memory.set_prototypes(row, 1); }), "prototype 0"));
      }
    CHECK(holds(refusal([&] { memory.learn(std::vector{1., 2.}); }), "has 2 values"));
    CHECK(holds(refusal([&] { memory.learn(std::vector<double>{}); }), "has 0 values"));
    CHECK(holds(refusal([&] { memory.learn(std::vector{1., 2., 3., 4.}); }), "has 4 values"));
    if (matching == ArtMatching::fuzzy) {
      CHECK(holds(refusal([&] { memory.learn(std::vector{.1, -.2, .3}); }), "at least 0"));
      CHECK(holds(refusal([&] { memory.learn(std::vector(3, 1e308)); }), "finite sum"));
    }
    CHECK(holds(refusal([&] { memory.set_prototypes(std::vector(15, .5), 5); }), "count 5"));
    CHECK(holds(refusal([&] { memory.set_prototypes(std::vector<double>{}, -1); }), "count -1"));
    CHECK(holds(refusal([&] { memory.set_prototypes(std::vector(5, .5), 2); }), "need 6"));
    CHECK(values(memory.prototypes()) == before);
  }
}

TEST_CASE("Options out of range are refused by name", "[art]") {
  const auto says = [](auto change, const std::string& part,
                       ArtMatching matching = ArtMatching::cosine) {
    auto o = options<double>(matching, 4, 3, 0.5, 0.5);
    change(o);
    return holds(refusal([&] { ArtMemory<double> memory(o); }), part);
  };
  using O = ArtOptions<double>;
  CHECK(says([](O& o) { o.capacity = 0; }, "capacity 0"));
  CHECK(says([](O& o) { o.capacity = -3; }, "capacity -3"));
  CHECK(says([](O& o) { o.dim = 0; }, "dim 0"));
  CHECK(says([](O& o) { o.dim = std::numeric_limits<Index>::max(); }, "dim"));
  CHECK(says([](O& o) { o.capacity = o.dim = Index(1) << 32; }, "overflows"));
  CHECK(says([](O& o) { o.capacity = Index(1) << 59, o.dim = 2; }, "exceeds the address space"));
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy}) {
    CHECK(says([](O& o) { o.vigilance = std::nextafter(1.0, 2.0); }, "vigilance", matching));
    CHECK(says([](O& o) { o.vigilance = -1.5; }, "vigilance -1.5", matching));
    CHECK(says([](O& o) { o.vigilance = kNan; }, "vigilance nan", matching));
    CHECK(says([](O& o) { o.vigilance = O{}.vigilance; }, "vigilance", matching));
  }
  CHECK(says([](O& o) { o.vigilance = -0.25; }, "[0, 1]", ArtMatching::fuzzy));
  CHECK_FALSE(says([](O& o) { o.vigilance = -0.25; }, "vigilance"));
  CHECK(says([](O& o) { o.learning_rate = 1.5; }, "learning_rate 1.5"));
  CHECK(says([](O& o) { o.learning_rate = -0.5; }, "learning_rate -0.5"));
  CHECK(says([](O& o) { o.learning_rate = kNan; }, "learning_rate nan"));
  CHECK(says([](O& o) { o.choice_alpha = 0; }, "choice_alpha 0"));
  CHECK(says([](O& o) { o.choice_alpha = kInf; }, "choice_alpha inf"));
  CHECK(says([](O& o) { o.eps = 0; }, "eps 0"));
  CHECK(says([](O& o) { o.eps = kNan; }, "eps nan"));
  CHECK(says([](O& o) { o.matching = ArtMatching(7); }, "matching 7"));
}

TEMPLATE_TEST_CASE("Finite rows of any size give finite matches and prototypes", "[art]", float,
                   double) {
  using T = TestType;
  const T huge = std::numeric_limits<T>::max(), tiny = std::numeric_limits<T>::denorm_min();
  auto o = options<T>(ArtMatching::cosine, 8, 2, 0.9, 0.5);
  for (const T eps : {T(1e-8), std::numeric_limits<T>::min()}) {
    o.eps = eps;
    for (const T a : {huge, -huge, tiny, T(0), T(1), T(1e30)})
      for (const T b : {huge, -huge, tiny, T(0), T(1), T(1e30)})
        for (const T vigilance : {T(-1), T(0.9)}) {
          o.vigilance = vigilance;
          ArtMemory<T> memory(o);
          memory.learn(std::vector{a, b});
          const auto event = memory.learn(std::vector{b, a});
          INFO(a << " " << b << " eps " << eps);
          CHECK(std::isfinite(event.match));
          CHECK(std::abs(event.match) <= 1 + 4 * std::numeric_limits<T>::epsilon());
          for (const T w : memory.prototypes()) CHECK(std::isfinite(w));
        }
  }
  // Scaled rows keep their angle: (1e30, 1e30) and (3, 4) have cosine 7 / (5 sqrt 2).
  ArtMemory<T> memory(options<T>(ArtMatching::cosine, 8, 2, 0.5, 0.5));
  memory.set_prototypes(std::vector{T(1e30), T(1e30)}, 1);
  CHECK(std::abs(double(memory.find(std::vector{T(3), T(4)}).match) - 7 / (5 * std::sqrt(2.0))) <
        (sizeof(T) == 4 ? 1e-6 : 1e-8));
  // max/2 against -max: W + eta (min - W) in the middle of a range that T cannot span.
  ArtMemory<T> opposite(options<T>(ArtMatching::cosine, 1, 1, -1.0, 0.5));
  opposite.set_prototypes(std::vector{huge}, 1);
  CHECK(opposite.learn(std::vector{-huge}).outcome == ArtOutcome::resonance);
  CHECK(opposite.prototypes()[0] == 0);
}

TEST_CASE("A row of zeros matches nothing above vigilance 0", "[art]") {
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy}) {
    ArtMemory<double> memory(options<double>(matching, 3, 2, 0.5, 0.5));
    memory.learn(std::vector{.5, .5});
    CHECK(memory.learn(std::vector{0., 0.}) == ArtEvent<double>{1, ArtOutcome::created, 0.0, 1});
    CHECK(memory.prototypes()[1] == .5);
    CHECK(memory.prototypes()[2] == 0);
    CHECK(memory.prototypes()[3] == 0);
  }
}

TEST_CASE("Complement code appends one minus the row and refuses values outside [0,1]", "[art]") {
  using Memory = ArtMemory<double>;
  CHECK(Memory::complement_code(std::vector{0., .25, 1.}) == std::vector{0., .25, 1., 1., .75, 0.});
  CHECK(Memory::complement_code(std::vector<double>{}).empty());
  for (const double bad : {-1e-300, std::nextafter(1.0, 2.0), kNan, kInf, -kInf})
    CHECK(holds(refusal([&] { (void)Memory::complement_code(std::vector{.5, bad}); }), "value 1"));
}

namespace {

// One golden case; its numbers are double, rounded to T where a float memory reads them.
struct Golden {
  explicit Golden(const std::filesystem::path& path) : file(heed::io::Safetensors::read(path)) {}

  double meta(const std::string& key) const { return std::stod(file.metadata().at(key)); }
  std::vector<double> tensor(const std::string& name) const { return file.values<double>(name); }
  Index count0() const { return Index(tensor("count0")[0]); }

  template <class T>
  ArtMemory<T> memory() const {
    const auto shape = file.info("W0").shape;
    const bool fuzzy = file.metadata().at("mode") == "fuzzy";
    ArtOptions<T> o = options<T>(fuzzy ? ArtMatching::fuzzy : ArtMatching::cosine, shape[0],
                                 shape[1], T(meta("vigilance")), T(meta("eta")));
    o.choice_alpha = T(meta("choice_alpha"));
    o.eps = T(meta("eps"));
    ArtMemory<T> result(o);
    auto w0 = rounded<T>(tensor("W0"));
    w0.resize(std::size_t(count0() * shape[1]));
    result.set_prototypes(w0, count0());
    return result;
  }

  template <class T>
  static std::vector<T> rounded(const std::vector<double>& v) {
    std::vector<T> result;
    for (const double x : v) result.push_back(T(x));
    return result;
  }

  heed::io::Safetensors file;
};

std::vector<std::filesystem::path> golden_cases() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(HEED_GOLDEN_DIR))
    if (entry.path().filename().string().starts_with("art_") &&
        entry.path().extension() == ".safetensors")
      paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  return paths;
}

double largest(const std::vector<double>& v) {
  double result = 0;
  for (const double x : v) result = std::max(result, std::abs(x));
  return result;
}

// Largest |a - b| over the prototypes in a; b has room for more.
template <class T>
double distance(std::span<const T> a, const double* b) {
  double result = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    result = std::max(result, std::abs(double(a[i]) - b[i]));
  return result;
}

}  // namespace

TEST_CASE("Double memory equals every golden case to 1e-12 of the tensor's max", "[art][golden]") {
  const auto paths = golden_cases();
  REQUIRE(paths.size() >= 7);
  for (const auto& path : paths) {
    INFO(path.string());
    const Golden golden(path);
    auto memory = golden.memory<double>();
    const auto h = golden.tensor("h"), index = golden.tensor("index");
    const auto event = golden.tensor("event"), match = golden.tensor("match");
    const auto history = golden.tensor("W_history"), w = golden.tensor("W");
    const Index dim = memory.dim(), rows = Index(index.size());
    double searches = 0;
    for (Index n = 0; n < rows; ++n) {
      INFO("row " << n);
      const auto got = memory.learn(std::span(h).subspan(std::size_t(n * dim), std::size_t(dim)));
      REQUIRE(double(got.index) == index[std::size_t(n)]);
      REQUIRE(double(got.outcome) == event[std::size_t(n)]);
      CHECK(std::abs(got.match - match[std::size_t(n)]) <= 1e-12 * largest(match));
      CHECK(distance(memory.prototypes(), history.data() + n * memory.capacity() * dim) <=
            1e-12 * largest(history));
      searches += got.outcome == ArtOutcome::resonance && got.searched > 1;
    }
    CHECK(double(memory.count()) == golden.tensor("count")[0]);
    CHECK(distance(memory.prototypes(), w.data()) <= 1e-12 * largest(w));
    CHECK(searches == golden.meta("searched"));
  }
}

TEST_CASE("Float memory decides as every golden case does and stays near its double twin",
          "[art][golden]") {
  // Matches: three sums of dim terms, each rounded relatively by eps. Prototypes: min is exact, an
  // update rounds three times, and a prototype sees at most one update per row.
  constexpr double eps = std::numeric_limits<float>::epsilon();
  for (const auto& path : golden_cases()) {
    INFO(path.string());
    const Golden golden(path);
    auto memory = golden.memory<float>();
    auto o = golden.memory<double>().options();
    o.vigilance = memory.options().vigilance, o.learning_rate = memory.options().learning_rate;
    o.choice_alpha = memory.options().choice_alpha, o.eps = memory.options().eps;
    ArtMemory<double> twin(o);
    const auto start = memory.prototypes();
    twin.set_prototypes(std::vector<double>(start.begin(), start.end()), memory.count());

    const auto h = Golden::rounded<float>(golden.tensor("h"));
    const auto index = golden.tensor("index"), event = golden.tensor("event");
    const double scale = largest(golden.tensor("W_history"));
    const Index dim = memory.dim(), rows = Index(index.size());
    for (Index n = 0; n < rows; ++n) {
      INFO("row " << n);
      const auto row = std::span(h).subspan(std::size_t(n * dim), std::size_t(dim));
      const auto got = memory.learn(row);
      const auto expected = twin.learn(std::vector<double>(row.begin(), row.end()));
      REQUIRE(double(got.index) == index[std::size_t(n)]);
      REQUIRE(double(got.outcome) == event[std::size_t(n)]);
      REQUIRE(got.searched == expected.searched);
      CHECK(std::abs(got.match - expected.match) <= 3 * double(dim + n + 4) * eps);
      CHECK(distance(memory.prototypes(), twin.prototypes().data()) <=
            3 * double(n + 1) * eps * scale);
    }
    CHECK(double(memory.count()) == golden.tensor("count")[0]);
  }
}

namespace {

// A path that is free, and its file gone at the end.
struct ScratchFile {
  std::filesystem::path path;
  explicit ScratchFile(const std::string& name)
      : path(std::filesystem::temp_directory_path() /
             (name + std::to_string(std::random_device()()) + ".safetensors")) {}
  ~ScratchFile() {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;
};

// The contents of a good file of one prototype (0.5, 0.25); a test changes one field.
struct Fields {
  std::map<std::string, std::string> metadata{{"format", "heed.art_memory"},
                                              {"version", "1"},
                                              {"capacity", "3"},
                                              {"dim", "2"},
                                              {"count", "1"},
                                              {"matching", "fuzzy"},
                                              {"vigilance", "0.75"},
                                              {"learning_rate", "1"},
                                              {"choice_alpha", "0.001"},
                                              {"eps", "1e-08"}};
  std::string tensor = "prototypes";
  std::vector<Index> shape{1, 2};
  std::vector<double> prototypes{0.5, 0.25};

  heed::io::Safetensors file() const {
    heed::io::SafetensorsWriter writer;
    for (const auto& [key, value] : metadata) writer.set_metadata(key, value);
    writer.add(tensor, shape, prototypes);
    return heed::io::Safetensors::parse(writer.bytes());
  }
  std::string refused() const {
    return refusal<std::runtime_error>(
        [&] { (void)heed::read_art_memory<double>(file(), "memory.file", 1000); });
  }
};

}  // namespace

TEMPLATE_TEST_CASE("A memory saved and loaded is the same bit for bit and learns on alike",
                   "[art][io]", float, double) {
  using T = TestType;
  for (const auto matching : {ArtMatching::cosine, ArtMatching::fuzzy})
    for (const Index learned : {0, 1, 50}) {
      auto o = options<T>(matching, 12, 6, 1.0 / 3, 0.1);
      o.choice_alpha = std::numeric_limits<T>::min() * T(1.7);
      o.eps = T(1) / T(7);
      ArtMemory<T> memory(o);
      const auto rows = random_rows<T>(matching, 80, 6, 21, 99991);
      for (Index n = 0; n < learned; ++n) memory.learn(rows[std::size_t(n)]);
      if (learned > 0 && matching == ArtMatching::cosine) {
        auto w = values(memory.prototypes());
        w[0] = -T(0), w[1] = std::numeric_limits<T>::denorm_min();
        w[2] = std::numeric_limits<T>::max();
        memory.set_prototypes(w, memory.count());
      }

      const ScratchFile scratch("heed_art_");
      heed::save_art_memory(scratch.path, memory);
      ArtMemory<T> loaded = heed::load_art_memory<T>(scratch.path);
      CHECK(loaded.options() == memory.options());
      CHECK(loaded.count() == memory.count());
      CHECK(same_bits(loaded.prototypes(), memory.prototypes()));
      for (const auto& row : rows) CHECK(loaded.learn(row) == memory.learn(row));
      CHECK(same_bits(loaded.prototypes(), memory.prototypes()));
    }
}

TEST_CASE("Metadata keep every bit of a number", "[art][io]") {
  for (const float x : {0.1f, 1.0f / 3, std::nextafter(1.0f, 0.0f), 1e-8f}) {
    CHECK(std::stof(heed::detail::round_trip_text(x)) == x);
    CHECK(std::stod(heed::detail::round_trip_text(double(x) / 3)) == double(x) / 3);
  }
}

TEST_CASE("A file of the wrong type, or none, is refused", "[art][io]") {
  const ScratchFile scratch("heed_art_");
  ArtMemory<float> memory(options<float>(ArtMatching::cosine, 2, 2, 0.5, 0.5));
  memory.learn(std::vector{1.0f, 2.0f});
  heed::save_art_memory(scratch.path, memory);
  const auto text =
      refusal<std::runtime_error>([&] { (void)heed::load_art_memory<double>(scratch.path); });
  CHECK(holds(text, scratch.path.string()));
  CHECK(holds(text, "F32"));
  CHECK_THROWS_AS(heed::load_art_memory<float>(scratch.path.string() + ".none"),
                  std::runtime_error);
  CHECK_THROWS_AS(heed::save_art_memory("/no/such/folder/art.safetensors", memory),
                  std::runtime_error);
}

TEST_CASE("A file with any field missing or wrong is refused in a sentence that names it",
          "[art][io]") {
  const Fields good;
  CHECK(good.refused().empty());
  CHECK(heed::read_art_memory<double>(good.file(), "good").count() == 1);

  for (const auto& [key, value] : good.metadata) {
    Fields fields;
    fields.metadata.erase(key);
    CHECK(fields.refused() == "memory.file: the metadata have no " + key);
    for (const char* bad : {"", "x", "0.5x", " 1", "nan", "-7", "1e999", "2 "}) {
      fields.metadata[key] = bad;
      INFO(key << " = '" << bad << "'");
      CHECK(holds(fields.refused(), key));
    }
  }
  const auto with = [](auto change) {
    Fields fields;
    change(fields);
    return fields.refused();
  };
  CHECK(holds(with([](Fields& f) { f.metadata["count"] = "4"; }), "count 4 is outside [0, 3]"));
  CHECK(holds(with([](Fields& f) { f.metadata["count"] = "2"; }), "shape (1,2)"));
  CHECK(holds(with([](Fields& f) { f.metadata["dim"] = "1"; }), "shape (1,2)"));
  // A memory of capacity prototypes of dim 2 holds capacity x (2 + 2) numbers: a scale and a norm for each.
  CHECK(holds(with([](Fields& f) { f.metadata["capacity"] = "251"; }),
              "capacity 251 x (dim 2 + 2) is more than the limit of 1000 values"));
  CHECK(with([](Fields& f) { f.metadata["capacity"] = "250"; }).empty());
  CHECK(holds(with([](Fields& f) { f.metadata["capacity"] = "99999999999999999999"; }),
              "must be an integer"));
  CHECK(holds(with([](Fields& f) { f.metadata["vigilance"] = "1.5"; }), "vigilance 1.5"));
  CHECK(holds(with([](Fields& f) { f.tensor = "W"; }), "no tensor prototypes"));
  CHECK(holds(with([](Fields& f) { f.shape = {2}; }), "1 extents"));
  CHECK(holds(with([](Fields& f) { f.shape = {2, 1}; }), "shape (2,1)"));
  CHECK(holds(with([](Fields& f) { f.prototypes[1] = kNan; }), "finite"));
  CHECK(holds(with([](Fields& f) { f.prototypes[1] = -0.5; }), "at least 0"));
}
