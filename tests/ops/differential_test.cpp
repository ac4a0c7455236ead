// SPDX-License-Identifier: Apache-2.0

// Differential attention: the row normaliser Difference, its lambdas and pairings, and the norm of
// its heads, run by hand one panel at a time.

#include "catch.hpp"

#include <heed/autodiff/complex_step.hpp>
#include <heed/autodiff/tape.hpp>
#include <heed/io/safetensors.hpp>
#include <heed/ops/differential.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <cmath>
#include <complex>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace heed;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

static_assert(AttentionOp<Differential<float>> && AttentionOp<DifferentialV1<double>> &&
              AttentionOp<DifferentialV2<float>>);
static_assert(DifferentialV2<float>::uses_extra && !Differential<float>::uses_extra);

// A RowBlock and its memory. Scores start hidden. A copy has numbers of its own, but the block of
// the original.
template <class T>
struct Panel {
  Index keys, lanes;
  std::vector<T> scores[2], score_max[2], lse[2], dscores[2], extra, dextra, dweights, weights;
  RowBlock<T> block;

  Panel(Index n, int vectors, Index valid) : keys(n), lanes(vectors * kLanes<T>) {
    const auto size = std::size_t(keys * lanes), row = std::size_t(lanes);
    for (std::size_t m = 0; m < 2; ++m) {
      scores[m].assign(size, -kInfinity<T>);
      dscores[m].assign(size, T(77));
      score_max[m].assign(row, -kInfinity<T>);
      lse[m].assign(row, T(77));
      block.scores[m] = {scores[m].data(), keys, lanes};
      block.dscores[m] = {dscores[m].data(), keys, lanes};
      block.score_max[m] = score_max[m].data();
      block.lse[m] = lse[m].data();
    }
    extra.assign(row, T(0));
    dextra.assign(row, T(77));
    dweights.assign(size, T(0));
    weights.assign(size, T(77));
    block.vectors = vectors;
    block.valid_lanes = valid;
    block.extra = extra.data();
    block.dextra = dextra.data();
    block.dweights = {dweights.data(), keys, lanes};
    block.weights = {weights.data(), keys, lanes};
  }

  [[nodiscard]] std::size_t at(Index j, Index lane) const { return std::size_t(j * lanes + lane); }

  void set(std::size_t map, Index j, Index lane, T score) {
    scores[map][at(j, lane)] = score;
    T& top = score_max[map][std::size_t(lane)];
    if (score > top) top = score;
  }
  void hide(Index j, Index lane) {
    for (auto& map : scores) map[at(j, lane)] = -kInfinity<T>;
    for (std::size_t m = 0; m < 2; ++m) {
      score_max[m][std::size_t(lane)] = -kInfinity<T>;
      for (Index k = 0; k < keys; ++k) set(m, k, lane, scores[m][at(k, lane)]);
    }
  }
  void alias_outputs() {
    block.weights = block.dweights;
    block.dscores = block.scores;
  }
  // Visible scores of one lane, as the reference reads them.
  template <class S>
  [[nodiscard]] std::vector<std::vector<S>> rows(Index lane) const {
    std::vector<std::vector<S>> out(2);
    for (Index j = 0; j < keys; ++j)
      for (std::size_t m = 0; m < 2; ++m)
        if (scores[m][at(j, lane)] != -kInfinity<T>) out[m].push_back(S(scores[m][at(j, lane)]));
    return out;
  }
};

// Random scores, gradients and extra inputs; lane i hides the keys j with (7 i + 3 j) % 5 == 0, and
// lane 2 hides all. The gradient of a hidden weight is a NaN.
template <class T>
Panel<T> random_panel(Index keys, int vectors, unsigned seed, double spread = 3.0) {
  Panel<T> p(keys, vectors, vectors * kLanes<T> - 1);
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (Index i = 0; i < p.lanes; ++i) {
    p.extra[std::size_t(i)] = T(normal(random));
    for (Index j = 0; j < keys; ++j) {
      p.set(0, j, i, T(spread * normal(random)));
      p.set(1, j, i, T(spread * normal(random)));
      p.dweights[p.at(j, i)] = T(normal(random));
    }
    for (Index j = 0; j < keys; ++j)
      if ((7 * i + 3 * j) % 5 == 0 || i == 2) {
        p.hide(j, i);
        p.dweights[p.at(j, i)] = T(kNan);
      }
  }
  return p;
}

ReparameterisedLambda<double> example_v1_lambda() {
  ReparameterisedLambda<double> lambda;
  lambda.lambda_q1 = {0.3, -0.2, 0.5};
  lambda.lambda_k1 = {0.7, 0.4, -0.1};
  lambda.lambda_q2 = {-0.6, 0.1, 0.2};
  lambda.lambda_k2 = {0.25, -0.35, 0.9};
  lambda.lambda_init = lambda_init_at(3);
  return lambda;
}

template <class Lambda>
Difference<double, Lambda> with(const Lambda& lambda) {
  Difference<double, Lambda> normaliser;
  static_cast<Lambda&>(normaliser) = lambda;
  return normaliser;
}

template <class Part>
Part zeros_of(Part part) {
  visit_parameters(part, [](const char*, auto& param) { param.set_zero(); });
  return part;
}

// Compares W of all valid rows: by the reference, by forward and by vjp. Compares d sum_j X_j W_j
// for scores, extra and parameters: by the tape and by vjp.
template <class Lambda>
void check_vjp(const Lambda& lambda, bool aliased) {
  const auto op = with(lambda);
  Panel<double> p = random_panel<double>(131, 2, 20);
  p.block.head = 1;
  const Panel<double> before = p;
  Panel<double> forward = random_panel<double>(131, 2, 20);
  forward.block.head = 1;
  op.forward(forward.block);
  if (aliased) p.alias_outputs();
  auto grad = zeros_of(op);
  op.vjp(p.block, grad);

  Tape<double> tape;
  auto taped = cast_part<Var<double>>(op);
  std::vector<Var<double>> params;
  visit_parameters(taped, [&](const char*, auto& param) {
    for (Index i = 0; i < param.size(); ++i) {
      param[i] = tape.variable(param[i].value);
      params.push_back(param[i]);
    }
  });
  Var<double> loss = 0.0;
  std::vector<Var<double>> extras;
  std::vector<std::vector<std::vector<Var<double>>>> inputs;
  for (Index i = 0; i < p.lanes; ++i) {
    auto rows = before.rows<Var<double>>(i);
    for (auto& row : rows)
      for (auto& s : row) s = tape.variable(s.value);
    extras.push_back(tape.variable(before.extra[std::size_t(i)]));
    const auto weights =
        taped.reference(LongHandRow<Var<double>>{rows, {}, 1, 0, extras.back(), {}});
    std::size_t next = 0;
    for (Index j = 0; j < p.keys && i < p.block.valid_lanes; ++j) {
      if (before.scores[0][p.at(j, i)] == -kInfinity<double>) continue;
      loss += weights[next++] * Var<double>(before.dweights[p.at(j, i)]);
    }
    inputs.push_back(rows);
  }
  const auto adjoint = tape.gradient(loss);
  const auto exact = [&](const Var<double>& x) { return adjoint[std::size_t(x.index)]; };

  std::size_t next_param = 0;
  visit_parameters(grad, [&](const char* name, const Param<double>& param) {
    INFO(name);
    for (Index i = 0; i < param.size(); ++i)
      CHECK(std::abs(param[i] - exact(params[next_param++])) < 1e-12);
  });
  for (Index i = 0; i < p.block.valid_lanes; ++i) {
    const auto weights = op.reference(
        LongHandRow<double>{before.rows<double>(i), {}, 1, 0, before.extra[std::size_t(i)], {}});
    if (Lambda::uses_extra)
      CHECK(std::abs(p.dextra[std::size_t(i)] - exact(extras[std::size_t(i)])) < 1e-12);
    std::size_t next = 0;
    for (Index j = 0; j < p.keys; ++j) {
      const bool hidden = before.scores[0][p.at(j, i)] == -kInfinity<double>;
      for (std::size_t m = 0; m < 2; ++m) {
        const double expected = hidden ? 0.0 : exact(inputs[std::size_t(i)][m][next]);
        REQUIRE(std::abs(p.block.dscores[m].row(j)[i] - expected) <= (hidden ? 0.0 : 1e-12));
      }
      const double weight = hidden ? 0.0 : weights[next];
      REQUIRE(std::abs(p.block.weights.row(j)[i] - weight) <= (hidden ? 0.0 : 1e-14));
      REQUIRE(std::abs(forward.scores[0][p.at(j, i)] - weight) <= (hidden ? 0.0 : 1e-14));
      next += hidden ? 0 : 1;
    }
  }
}

}  // namespace

TEST_CASE("two keys by hand: the second map is subtracted lambda times") {
  // Map 1: exp 1 : 3, P1 = (0.25, 0.75). Map 2: exp 4 : 1, P2 = (0.8, 0.2). lambda = 0.5.
  // W = (0.25 - 0.4, 0.75 - 0.1) = (-0.15, 0.65). X = (2, 6): r1 = 5, r2 = 2.8.
  // dS1 = (0.25 * -3, 0.75 * 1); dS2 = -0.5 * (0.8 * -0.8, 0.2 * 3.2) = (0.32, -0.32);
  // dlambda = -2.8.
  Difference<double, GivenLambda<double>> op;
  op.lambda = 0.5;
  Panel<double> p(2, 1, 1);
  p.set(0, 0, 0, std::log(1.0));
  p.set(0, 1, 0, std::log(3.0));
  p.set(1, 0, 0, std::log(4.0));
  p.set(1, 1, 0, std::log(1.0));
  p.dweights[p.at(0, 0)] = 2.0;
  p.dweights[p.at(1, 0)] = 6.0;
  auto grad = zeros_of(op);
  op.vjp(p.block, grad);
  CHECK(p.weights[p.at(0, 0)] == Approx(-0.15));
  CHECK(p.weights[p.at(1, 0)] == Approx(0.65));
  CHECK(p.dscores[0][p.at(0, 0)] == Approx(-0.75));
  CHECK(p.dscores[0][p.at(1, 0)] == Approx(0.75));
  CHECK(p.dscores[1][p.at(0, 0)] == Approx(0.32));
  CHECK(p.dscores[1][p.at(1, 0)] == Approx(-0.32));
  CHECK(grad.lambda[0] == Approx(-2.8));
  op.forward(p.block);
  CHECK(p.scores[0][p.at(0, 0)] == Approx(-0.15));
  CHECK(p.scores[0][p.at(1, 0)] == Approx(0.65));
  CHECK(p.lse[0][0] == Approx(std::log(4.0)));
  CHECK(p.lse[1][0] == Approx(std::log(5.0)));
}

TEST_CASE("the gradients of scores, lambdas and extra input are those of the tape") {
  for (const bool aliased : {false, true}) {
    GivenLambda<double> per_head;
    per_head.lambda = {0.9, -0.4, 0.2};
    check_vjp(GivenLambda<double>(), aliased);
    check_vjp(per_head, aliased);
    check_vjp(example_v1_lambda(), aliased);
    check_vjp(TokenLambda<double>(), aliased);
  }
}

TEMPLATE_TEST_CASE("weights are within the stated bound of a wider scalar", "", float, double) {
  using T = TestType;
  using Wide = std::conditional_t<std::is_same_v<T, float>, double, long double>;
  Difference<T, GivenLambda<T>> op;
  op.lambda = T(0.625);
  auto plus = op;  // P1 + |lambda| P2, the bound's measure
  plus.lambda = T(-0.625);
  for (const Index keys : {1, 2, 63, 64, 65, 1999})
    for (const double spread : {0.1, 3.0, 40.0}) {
      Panel<T> p = random_panel<T>(keys, kPanelVectors, unsigned(keys), spread);
      const Panel<T> before = p;
      op.forward(p.block);
      for (Index i = 0; i < p.lanes; ++i) {
        const auto rows = before.template rows<Wide>(i);
        const LongHandRow<Wide> row{rows, {}, 0, 0, Wide(0), {}};
        const auto exact = op.reference(row), size = plus.reference(row);
        Wide range = 0;
        for (const auto& scores : rows)
          for (const Wide s : scores)
            range = std::max(range, *std::max_element(scores.begin(), scores.end()) - s);
        std::size_t next = 0;
        for (Index j = 0; j < keys; ++j) {
          const T weight = p.scores[0][p.at(j, i)];
          if (before.scores[0][p.at(j, i)] == -kInfinity<T>) {
            REQUIRE(weight == T(0));
            continue;
          }
          const Wide bound =
              (8 + Wide(1.2) * range) * std::numeric_limits<T>::epsilon() * size[next] +
              std::numeric_limits<T>::min();
          REQUIRE(std::abs(Wide(weight) - exact[next]) <= bound);
          ++next;
        }
        Wide lse = 0;
        for (std::size_t m = 0; m < 2; ++m) {
          const Wide top = rows[m].empty() ? 0 : *std::max_element(rows[m].begin(), rows[m].end());
          lse = 0;
          for (const Wide s : rows[m]) lse += std::exp(s - top);
          lse = top + std::log(lse);
          const T found = p.lse[m][std::size_t(i)];
          if (rows[m].empty())
            REQUIRE(found == -kInfinity<T>);
          else
            REQUIRE(std::abs(Wide(found) - lse) <=
                    8 * std::numeric_limits<T>::epsilon() * (1 + std::abs(lse)));
        }
      }
    }
}

TEST_CASE("float gradients follow the double ones") {
  const auto wide = with(example_v1_lambda());
  const auto narrow = cast_part<float>(wide);
  const Panel<float> p = random_panel<float>(200, 1, 5);
  Panel<double> q(200, int(p.lanes / kLanes<double>), p.block.valid_lanes);
  for (Index i = 0; i < p.lanes; ++i)
    for (Index j = 0; j < p.keys; ++j) {
      q.dweights[q.at(j, i)] = p.dweights[p.at(j, i)];
      for (std::size_t m = 0; m < 2; ++m) q.set(m, j, i, p.scores[m][p.at(j, i)]);
    }
  auto dnarrow = zeros_of(narrow);
  auto dwide = zeros_of(wide);
  narrow.vjp(p.block, dnarrow);
  wide.vjp(q.block, dwide);
  for (std::size_t m = 0; m < 2; ++m)
    for (std::size_t n = 0; n < p.dscores[m].size(); ++n)
      REQUIRE(std::abs(p.dscores[m][n] - q.dscores[m][n]) < 2e-6);
  for (Index c = 0; c < 3; ++c) {
    CHECK(std::abs(dnarrow.lambda_q1[c] - dwide.lambda_q1[c]) < 1e-5);
    CHECK(std::abs(dnarrow.lambda_k2[c] - dwide.lambda_k2[c]) < 1e-5);
  }
}

TEST_CASE("a lane that sees no key has weights and gradients 0 and lse -infinity") {
  // Lane 2 of a random panel sees no key; its extra input may even be a NaN.
  const Difference<double, TokenLambda<double>> op;
  Panel<double> p = random_panel<double>(9, 2, 3), q = random_panel<double>(9, 2, 3);
  p.extra[2] = q.extra[2] = kNan;
  auto grad = op;
  op.vjp(p.block, grad);
  op.forward(q.block);
  for (Index j = 0; j < p.keys; ++j) {
    CHECK(p.weights[p.at(j, 2)] == 0.0);
    CHECK(p.dscores[0][p.at(j, 2)] == 0.0);
    CHECK(p.dscores[1][p.at(j, 2)] == 0.0);
    CHECK(q.scores[0][q.at(j, 2)] == 0.0);
  }
  CHECK(p.dextra[2] == 0.0);
  CHECK(q.lse[0][2] == -kInfinity<double>);
  CHECK(q.lse[1][2] == -kInfinity<double>);
  Panel<double> none(0, 1, 1);
  op.forward(none.block);
  op.vjp(none.block, grad);
  CHECK(none.lse[0][0] == -kInfinity<double>);
  CHECK(none.dextra[0] == 0.0);
}

TEST_CASE("weights of a row sum to 1 - lambda and may be negative") {
  const auto op = with(example_v1_lambda());
  const double lambda = op.lambda_of(0, 0.0);
  Panel<double> p = random_panel<double>(40, 1, 8);
  op.forward(p.block);
  double smallest = 1.0;
  for (Index i = 0; i < p.lanes; ++i) {
    double sum = 0.0;
    for (Index j = 0; j < p.keys; ++j) {
      sum += p.scores[0][p.at(j, i)];
      smallest = std::min(smallest, p.scores[0][p.at(j, i)]);
    }
    CHECK(std::abs(sum - (i == 2 ? 0.0 : 1.0 - lambda)) < 1e-14);
  }
  CHECK(smallest < -0.01);
}

TEST_CASE("lambda = 0 gives the softmax of map 1 whatever map 2 holds, and lambda has a gradient") {
  Difference<float, GivenLambda<float>> op;
  op.lambda = 0.0F;
  Panel<float> p = random_panel<float>(70, 2, 4), q = random_panel<float>(70, 2, 4);
  for (Index i = 0; i < q.lanes; ++i)
    for (Index j = 0; j < q.keys; ++j)
      if (q.scores[1][q.at(j, i)] != -kInfinity<float>)
        q.set(1, j, i, (j % 3 == 0 ? -1e30F : 1e30F));
  auto grad = zeros_of(op);
  Panel<float> r = random_panel<float>(70, 2, 4);
  op.vjp(r.block, grad);
  CHECK(std::abs(grad.lambda[0]) > 0.1F);
  for (const float d : r.dscores[1]) REQUIRE(d == 0.0F);
  op.forward(p.block);
  op.forward(q.block);
  for (std::size_t n = 0; n < p.scores[0].size(); ++n) REQUIRE(p.scores[0][n] == q.scores[0][n]);
  for (Index i = 0; i < p.lanes; ++i) {
    const auto softmax = long_hand_softmax(random_panel<float>(70, 2, 4).rows<double>(i)[0]);
    std::size_t next = 0;
    for (Index j = 0; j < p.keys; ++j)
      if (r.scores[0][r.at(j, i)] != -kInfinity<float>)
        REQUIRE(std::abs(p.scores[0][p.at(j, i)] - softmax[next++]) < 4e-6);
  }
}

TEST_CASE("a visible NaN makes its row NaN and no other; hidden pairs stay 0") {
  const auto op = with(GivenLambda<double>());
  for (const std::size_t map : {0U, 1U}) {
    Panel<double> clean = random_panel<double>(12, 1, 6), spoilt = random_panel<double>(12, 1, 6);
    Panel<double> backward = random_panel<double>(12, 1, 6),
                  clean_back = random_panel<double>(12, 1, 6);
    const Panel<double> before = clean;
    const Index lane = 1, key = 5;
    REQUIRE(before.scores[0][before.at(key, lane)] != -kInfinity<double>);
    spoilt.scores[map][spoilt.at(key, lane)] = kNan;
    backward.scores[map][backward.at(key, lane)] = kNan;
    auto grad = zeros_of(op), clean_grad = grad;
    op.forward(clean.block);
    op.forward(spoilt.block);
    op.vjp(backward.block, grad);
    op.vjp(clean_back.block, clean_grad);
    CHECK(std::isnan(spoilt.lse[map][std::size_t(lane)]));
    for (Index i = 0; i < clean.lanes; ++i)
      for (Index j = 0; j < clean.keys; ++j) {
        const std::size_t n = clean.at(j, i);
        if (before.scores[0][n] == -kInfinity<double>) {
          REQUIRE(spoilt.scores[0][n] == 0.0);
          REQUIRE(backward.weights[n] == 0.0);
          REQUIRE(backward.dscores[map][n] == 0.0);
        } else if (i == lane) {
          REQUIRE(std::isnan(spoilt.scores[0][n]));
          REQUIRE(std::isnan(backward.weights[n]));
          REQUIRE(std::isnan(backward.dscores[map][n]));
        } else {
          REQUIRE(spoilt.scores[0][n] == clean.scores[0][n]);
          REQUIRE(backward.dscores[0][n] == clean_back.dscores[0][n]);
          REQUIRE(backward.dscores[1][n] == clean_back.dscores[1][n]);
        }
      }
  }
}

TEST_CASE("a NaN gradient of a visible weight reaches its row even where the weight underflows") {
  const auto op = with(GivenLambda<double>());
  Panel<double> p(3, 1, 1);
  for (const std::size_t m : {0U, 1U}) {
    p.set(m, 0, 0, 0.0);
    p.set(m, 1, 0, -1e30);
  }
  p.dweights[p.at(1, 0)] = kNan;
  auto grad = zeros_of(op);
  op.vjp(p.block, grad);
  CHECK(std::isnan(p.dscores[0][p.at(0, 0)]));
  CHECK(std::isnan(p.dscores[1][p.at(1, 0)]));
  CHECK(p.dscores[0][p.at(2, 0)] == 0.0);
  CHECK(std::isnan(grad.lambda[0]));
}

TEST_CASE("huge scores and shifts of a row give the same finite weights") {
  Difference<double, GivenLambda<double>> op;
  op.lambda = 0.3;
  for (const double shift : {0.0, 1024.0, -1e6, 1e30}) {
    Panel<double> p(2, 1, 1);
    p.set(0, 0, 0, shift);
    p.set(0, 1, 0, shift - 1e30);
    p.set(1, 0, 0, shift);
    p.set(1, 1, 0, shift);
    op.forward(p.block);
    CHECK(p.scores[0][p.at(0, 0)] == Approx(0.85));
    CHECK(p.scores[0][p.at(1, 0)] == Approx(-0.15));
  }
}

TEST_CASE("lambda_init follows the depth, which counts from 1") {
  CHECK(lambda_init_at(1) == Approx(0.2));
  CHECK(lambda_init_at(3) == Approx(0.8 - 0.6 * 0.54881163609402643));
  CHECK(lambda_init_at(1000) == Approx(0.8));
  CHECK_THROWS_AS(lambda_init_at(0), std::invalid_argument);
  // exp(0.21 - 0.08 - 0.05) - exp(-0.15 - 0.035 + 0.18) + lambda_init
  const double expected = std::exp(0.08) - std::exp(-0.005) + lambda_init_at(3);
  CHECK(example_v1_lambda().lambda_of(7, 0.0) == Approx(expected));
  CHECK(TokenLambda<double>().lambda_of(0, std::log(3.0)) == Approx(0.75));
}

namespace {

Geometry heads_of(Index heads, Index kv_heads, Index dim_qk = 6) {
  return {1, heads, heads, kv_heads, 4, 4, dim_qk, 6};
}

// Key half-heads repeated for every query half-head, as a list: entry s is the half-head that half-head s reads.
std::vector<Index> repeated(Index half_heads, Index times) {
  std::vector<Index> out;
  for (Index s = 0; s < half_heads; ++s) out.insert(out.end(), std::size_t(times), s);
  return out;
}

}  // namespace

TEST_CASE("every pairing reads the heads and columns that it names") {
  DifferenceOptions options;
  for (const auto& [heads, kv_heads] :
       {std::pair<Index, Index>{1, 1}, {4, 4}, {4, 2}, {4, 1}, {6, 2}}) {
    const Geometry g = heads_of(heads, kv_heads);
    const Index r = heads / kv_heads;
    for (Index h = 0; h < heads; ++h)
      for (const int map : {0, 1}) {
        options.pairing = HeadPairing::halves;
        Source s = options.source(g, h, map);
        CHECK((s.query_head == h && s.query_column == 3 * map && s.width == 3));
        CHECK((s.kv_head == h / r && s.key_column == 3 * map));

        options.pairing = HeadPairing::halves_repeated_keys;
        s = options.source(g, h, map);
        const Index key_half = repeated(2 * kv_heads, r)[std::size_t(2 * h + map)];
        CHECK((s.query_head == h && s.query_column == 3 * map && s.width == 3));
        CHECK(s.kv_head == key_half / 2);
        CHECK(s.key_column == 3 * (key_half % 2));
        CHECK(s.kv_head == g.kv_head(h));

        options.pairing = HeadPairing::halves_apart;
        s = options.source(g, h, map);
        CHECK((2 * s.query_head + s.query_column / 3 == h + map * heads && s.width == 3));
        CHECK((s.kv_head == h / r && s.key_column == 3 * map));
        CHECK(options.query_heads(heads) == heads);

        options.pairing = HeadPairing::heads;
        s = options.source(g, h, map);
        CHECK((s.query_head == 2 * h + map && s.query_column == 0 && s.width == 6));
        CHECK((s.kv_head == h / r && s.key_column == 0));
        CHECK(options.query_heads(heads) == 2 * heads);

        options.pairing = HeadPairing::heads_apart;
        s = options.source(g, h, map);
        CHECK((s.query_head == h + map * heads && s.query_column == 0 && s.width == 6));
        CHECK((s.kv_head == h / r && s.key_column == 0));
      }
  }
  CHECK(DifferentialV2<float>().normaliser.pairing == HeadPairing::heads);
  CHECK(Differential<float>().normaliser.pairing == HeadPairing::halves);
}

TEST_CASE("differential attention refuses what cannot be meant") {
  const Geometry g = heads_of(3, 3);
  const auto refuses = [](const auto& op, const Geometry& geometry, const std::string& text) {
    CHECK_THROWS_WITH(op.validate(geometry, "test"), text);
  };
  Differential<double> op;
  CHECK_NOTHROW(op.validate(g, "test"));
  refuses(op, heads_of(3, 3, 5), "test: dim_qk is 5, it must be even: both maps read half a head");
  op.normaliser.lambda = {0.1, 0.2};
  refuses(op, g,
          "test: lambda has 2 values, the call has 3 heads; it needs 1 value, or one per head");
  op.normaliser.lambda = {0.1, kNan, 0.2};
  refuses(op, g, "test: lambda is nan, it must be finite");

  auto v1 = make_differential_v1<double>(3, 2);
  CHECK_NOTHROW(v1.validate(g, "test"));
  v1.readout.weight = Param<double>({5}, std::vector<double>(5, 1.0));
  refuses(v1, g, "test: weight has shape (5), it must be (6) for heads of width 6, or empty");
  v1.readout.weight = {};
  CHECK_NOTHROW(v1.validate(g, "test"));
  v1.readout.eps = 0.0;
  refuses(v1, g, "test: eps is 0, it must be finite and positive in the scalar at hand");
  v1 = make_differential_v1<double>(3, 2);
  v1.readout.factor = kNan;
  refuses(v1, g, "test: factor is nan, it must be finite");
  v1 = make_differential_v1<double>(4, 2);
  refuses(v1, g, "test: lambda_q1 has shape (4), it must be (3) for heads of width 6");
  v1 = make_differential_v1<double>(3, 2, false);
  v1.normaliser.lambda_k2 = Param<double>();
  refuses(v1, g, "test: lambda_k2 has shape (), it must be (3) for heads of width 6");
  v1 = make_differential_v1<double>(3, 2, false);
  v1.normaliser.lambda_init = kNan;
  refuses(v1, g, "test: lambda_init is nan, it must be finite");
  v1.normaliser.lambda_init = 0.2;
  v1.normaliser.lambda_q1 = v1.normaliser.lambda_k1 = {30.0, 0.0, 0.0};
  refuses(v1, g, "test: lambda is inf, it must be finite");

  CHECK_NOTHROW(DifferentialV2<double>().validate(heads_of(3, 3, 5), "test"));
  CHECK_THROWS_WITH((make_differential_v1<double>(0, 1)),
                    "make_differential_v1: width is 0, it must be at least 1");
  CHECK_THROWS_WITH((make_differential_v1<double>(2, 1, true, {std::vector<double>{1.0}})),
                    "make_differential_v1: lambda_q1 has 1 values, it must have one per column of "
                    "a map (2)");
}

TEST_CASE("make_differential_v1 ties lambda_init to the norm's factor, and a cast keeps both") {
  const auto op = make_differential_v1<double>(2, 3, true, {std::vector<double>{1.0, 2.0}});
  CHECK(op.normaliser.lambda_init == Approx(0.47071301834358415));
  CHECK(op.readout.factor == Approx(1.0 - 0.47071301834358415));
  CHECK(op.normaliser.lambda_q1[1] == 2.0);
  CHECK(op.normaliser.lambda_k1[1] == 0.0);
  CHECK(op.readout.weight.size() == 4);
  auto apart = op;
  apart.normaliser.pairing = HeadPairing::halves_apart;
  const auto narrow = cast_op<float>(apart);
  CHECK(narrow.normaliser.pairing == HeadPairing::halves_apart);
  CHECK(narrow.normaliser.lambda_init == op.normaliser.lambda_init);
  CHECK(narrow.normaliser.lambda_q1[0] == 1.0F);
  CHECK(narrow.readout.factor == op.readout.factor);
  const auto complex = cast_op<std::complex<double>>(op);
  CHECK(complex.normaliser.lambda_of(0, std::complex<double>(0)).real() ==
        op.normaliser.lambda_of(0, 0.0));
}

namespace {

// One ReadoutPanel over dense rows (row i in lane i), gradients included.
struct NormPanel {
  ReadoutPanel<double> panel;
  std::vector<double> tile, saved, work, delta;

  // rows * dim_v mixed values; grad_out empty for the forward pass.
  NormPanel(const double* mixed, const double* grad_out, Index valid, Index dim_v, int vectors) {
    const Index lanes = vectors * kLanes<double>;
    tile.assign(std::size_t(dim_v * lanes), 3.0);
    saved.assign(tile.size(), 5.0);
    work.assign(std::size_t(3 * lanes), 7.0);
    delta.assign(std::size_t(lanes), 9.0);
    for (Index i = 0; i < valid; ++i)
      for (Index c = 0; c < dim_v; ++c) {
        tile[std::size_t(c * lanes + i)] = (grad_out ? grad_out : mixed)[i * dim_v + c];
        saved[std::size_t(c * lanes + i)] = mixed[i * dim_v + c];
      }
    panel.geometry.dim_v = dim_v;
    panel.valid_lanes = valid;
    panel.vectors = vectors;
    panel.tile = {tile.data(), dim_v, lanes};
    panel.saved = {saved.data(), dim_v, lanes};
    panel.work = {work.data(), 3, lanes};
    panel.delta = delta.data();
  }
  [[nodiscard]] double at(Index i, Index c) const { return panel.tile.row(c)[i]; }
};

HeadNorm<double> example_norm(bool with_weight) {
  HeadNorm<double> norm;
  norm.factor = 0.7;
  if (with_weight) norm.weight = {0.5, -1.5, 2.0, 1.0, 0.25};
  return norm;
}

}  // namespace

TEST_CASE("the head norm by hand: 3 and 4 have the root mean square 5 / sqrt(2)") {
  // eps 12.5 makes the mean square 25, its root 5: out = 0.5 * (3, 4) / 5 * (1, 10) = (0.3, 4).
  HeadNorm<double> norm;
  norm.factor = 0.5;
  norm.eps = 12.5;
  norm.weight = {1.0, 10.0};
  const double mixed[] = {3.0, 4.0};
  const NormPanel p(mixed, nullptr, 1, 2, 1);
  norm.forward(p.panel);
  CHECK(p.at(0, 0) == Approx(0.3));
  CHECK(p.at(0, 1) == Approx(4.0));
}

TEST_CASE("the head norm and its gradients are those of its long hand on the tape") {
  constexpr Index dim_v = 5;
  const int vectors = 2;
  const Index rows = vectors * kLanes<double> - 1;
  std::mt19937 random(11);
  std::normal_distribution<double> normal;
  std::vector<double> mixed, grad_out;
  for (Index n = 0; n < rows * dim_v; ++n) {
    mixed.push_back(n < dim_v ? 0.0 : normal(random) * (n % 2 == 0 ? 1.0 : 0.01));
    grad_out.push_back(normal(random));
  }
  for (const bool with_weight : {false, true}) {
    const auto norm = example_norm(with_weight);
    const NormPanel forward(mixed.data(), nullptr, rows, dim_v, vectors);
    const NormPanel backward(mixed.data(), grad_out.data(), rows, dim_v, vectors);
    auto grad = zeros_of(norm);
    norm.forward(forward.panel);
    norm.vjp(backward.panel, grad);

    Tape<double> tape;
    auto taped = cast_part<Var<double>>(norm);
    for (Index c = 0; c < taped.weight.size(); ++c) taped.weight[c] = tape.variable(norm.weight[c]);
    ReadoutContext<Var<double>> context;
    context.geometry = {1, 1, 1, 1, rows, rows, 2, dim_v};
    for (const double o : mixed) context.out.push_back(tape.variable(o));
    const auto inputs = context.out;
    taped.reference(context);
    Var<double> loss = 0.0;
    for (std::size_t n = 0; n < mixed.size(); ++n)
      loss += context.out[n] * Var<double>(grad_out[n]);
    const auto adjoint = tape.gradient(loss);

    for (Index i = 0; i < rows; ++i) {
      double delta = 0.0;
      for (Index c = 0; c < dim_v; ++c) {
        const auto n = std::size_t(i * dim_v + c);
        const double exact = adjoint[std::size_t(inputs[n].index)];
        CHECK(std::abs(forward.at(i, c) - context.out[n].value) < 1e-14);
        CHECK(std::abs(backward.at(i, c) - exact) <= 1e-12 * std::max(1.0, std::abs(exact)));
        delta += exact * mixed[n];
      }
      CHECK(std::abs(backward.delta[std::size_t(i)] - delta) < 1e-12);
    }
    for (Index c = 0; c < grad.weight.size(); ++c)
      CHECK(std::abs(grad.weight[c] - adjoint[std::size_t(taped.weight[c].index)]) < 1e-12);
    // A row of zeros stays 0, its gradient is factor weight g / sqrt(eps).
    for (Index c = 0; c < dim_v; ++c) {
      CHECK(forward.at(0, c) == 0.0);
      const double slope = 0.7 * (with_weight ? norm.weight[c] : 1.0) / std::sqrt(1e-5);
      CHECK(backward.at(0, c) == Approx(slope * grad_out[std::size_t(c)]));
    }
  }
}

namespace {

// A golden case of differential attention, replayed row block by row block.
struct Golden {
  io::Safetensors file;
  Geometry g;
  double scale;
  Index left, right, offset;
  std::vector<double> q, k, v, dout, lengths, mask, dq, dk, dv;

  explicit Golden(const std::filesystem::path& path) : file(io::Safetensors::read(path)) {
    g = {number("B"),  number("H"),  number("H"), number("Hkv"),
         number("Tq"), number("Tk"), number("d"), number("dv")};
    scale = std::stod(file.metadata().at("scale"));
    left = number("left") < 0 ? g.len_q + g.len_kv : number("left");
    right = number("right") < 0 ? g.len_q + g.len_kv : number("right");
    offset = file.metadata().at("align") == "br" ? g.len_kv - g.len_q : 0;
    q = file.values<double>("q");
    k = file.values<double>("k");
    v = file.values<double>("v");
    dout = file.values<double>("dout");
    if (file.contains("lengths")) lengths = file.values<double>("lengths");
    if (file.contains("mask")) mask = file.values<double>("mask");
    dq.assign(q.size(), 0.0);
    dk.assign(k.size(), 0.0);
    dv.assign(v.size(), 0.0);
  }

  [[nodiscard]] Index number(const char* name) const { return std::stol(file.metadata().at(name)); }

  [[nodiscard]] bool visible(Index b, Index h, Index i, Index j) const {
    const Index p = i + offset;
    if (j < p - left || j > p + right) return false;
    if (!lengths.empty() && double(j) >= lengths[std::size_t(b)]) return false;
    if (mask.empty()) return true;
    const auto& shape = file.info("mask").shape;
    const Index mb = Index(shape[0]) == 1 ? 0 : b, mh = Index(shape[1]) == 1 ? 0 : h;
    return mask[std::size_t(((mb * Index(shape[1]) + mh) * g.len_q + i) * g.len_kv + j)] != 0.0;
  }
  [[nodiscard]] Index q_row(Index b, Index h, Index i) const {
    return g.row_index(b, h, i) * g.dim_qk;
  }
  [[nodiscard]] Index kv_row(Index b, Index h, Index j) const {
    return (b * g.kv_heads + g.kv_head(h)) * g.len_kv + j;
  }

  void check(const char* name, const std::vector<double>& found) const {
    INFO(name);
    const auto expected = file.values<double>(name);
    REQUIRE(expected.size() == found.size());
    double top = 0.0, error = 0.0;
    for (const double x : expected) top = std::max(top, std::abs(x));
    for (std::size_t n = 0; n < found.size(); ++n) {
      if (std::isinf(expected[n]))
        REQUIRE(found[n] == expected[n]);
      else if (found[n] != expected[n])
        error = std::max(error, std::abs(found[n] - expected[n]));
      REQUIRE_FALSE(std::isnan(found[n]));
    }
    CHECK(error <= 1e-12 * std::max(top, 1e-3));
  }
};

// Runs `op` on the rows [first, first + valid) of one head; gradients are added where they belong.
template <class Op>
struct Replay {
  Golden& c;
  const Op& op;
  Op grad;
  int vectors;
  std::vector<double> out, prenorm, lse[2];

  Replay(Golden& golden, const Op& o, int n) : c(golden), op(o), grad(zeros_like(o)), vectors(n) {
    out.assign(c.dout.size(), 0.0);
    prenorm = out;
    for (auto& l : lse) l.assign(std::size_t(c.g.query_rows()), 0.0);
    const Index lanes = vectors * kLanes<double>;
    for (Index b = 0; b < c.g.batch; ++b)
      for (Index h = 0; h < c.g.heads; ++h)
        for (Index i = 0; i < c.g.len_q; i += lanes) panel(b, h, i, std::min(lanes, c.g.len_q - i));
  }

  [[nodiscard]] Panel<double> scores(Index b, Index h, Index first, Index valid) const {
    Panel<double> p(c.g.len_kv, vectors, valid);
    p.block.head = h;
    for (const int m : {0, 1}) {
      const Source s = op.normaliser.source(c.g, h, m);
      for (Index i = 0; i < valid; ++i)
        for (Index j = 0; j < c.g.len_kv; ++j) {
          if (!c.visible(b, h, first + i, j)) continue;
          const double* q = &c.q[std::size_t(c.q_row(b, s.query_head, first + i) + s.query_column)];
          const double* k = &c.k[std::size_t(c.kv_row(b, h, j) * c.g.dim_qk + s.key_column)];
          double dot = 0.0;
          for (Index x = 0; x < s.width; ++x) dot += q[x] * k[x];
          p.set(std::size_t(m), j, i, c.scale * dot);
        }
    }
    return p;
  }

  void panel(Index b, Index h, Index first, Index valid) {
    Panel<double> forward = scores(b, h, first, valid), backward = scores(b, h, first, valid);
    op.normaliser.forward(forward.block);
    const Index n = c.g.dim_v, row = c.g.row_index(b, h, first);
    double* mixed = &prenorm[std::size_t(row * n)];
    for (Index i = 0; i < valid; ++i) {
      for (std::size_t m = 0; m < 2; ++m)
        lse[m][std::size_t(row + i)] = forward.lse[m][std::size_t(i)];
      for (Index j = 0; j < c.g.len_kv; ++j)
        for (Index x = 0; x < n; ++x)
          mixed[i * n + x] +=
              forward.scores[0][forward.at(j, i)] * c.v[std::size_t(c.kv_row(b, h, j) * n + x)];
    }
    const NormPanel ahead(mixed, nullptr, valid, n, vectors);
    const NormPanel back(mixed, &c.dout[std::size_t(row * n)], valid, n, vectors);
    op.readout.forward(ahead.panel);
    op.readout.vjp(back.panel, grad.readout);
    for (Index i = 0; i < valid; ++i)
      for (Index x = 0; x < n; ++x) out[std::size_t((row + i) * n + x)] = ahead.at(i, x);
    mix_vjp(b, h, first, valid, back, backward);
  }

  void mix_vjp(Index b, Index h, Index first, Index valid, const NormPanel& dmixed,
               Panel<double>& p) {
    const Index n = c.g.dim_v;
    for (Index i = 0; i < valid; ++i)
      for (Index j = 0; j < c.g.len_kv; ++j) {
        double& x = p.dweights[p.at(j, i)];
        for (Index e = 0; e < n; ++e)
          x += dmixed.at(i, e) * c.v[std::size_t(c.kv_row(b, h, j) * n + e)];
        if (!c.visible(b, h, first + i, j)) x = kNan;
      }
    p.alias_outputs();
    op.normaliser.vjp(p.block, grad.normaliser);
    for (Index i = 0; i < valid; ++i)
      for (Index j = 0; j < c.g.len_kv; ++j) {
        const Index kv = c.kv_row(b, h, j);
        for (Index e = 0; e < n; ++e)
          c.dv[std::size_t(kv * n + e)] += p.block.weights.row(j)[i] * dmixed.at(i, e);
        for (const int m : {0, 1}) {
          const Source s = op.normaliser.source(c.g, h, m);
          const double ds = c.scale * p.block.dscores[std::size_t(m)].row(j)[i];
          const Index at_q = c.q_row(b, s.query_head, first + i) + s.query_column;
          const Index at_k = kv * c.g.dim_qk + s.key_column;
          for (Index x = 0; x < s.width; ++x) {
            c.dq[std::size_t(at_q + x)] += ds * c.k[std::size_t(at_k + x)];
            c.dk[std::size_t(at_k + x)] += ds * c.q[std::size_t(at_q + x)];
          }
        }
      }
  }

  void check_common() const {
    c.check("out", out);
    c.check("lse1", lse[0]);
    c.check("lse2", lse[1]);
    c.check("dq", c.dq);
    c.check("dk", c.dk);
    c.check("dv", c.dv);
  }
};

std::vector<double> values_of(const Param<double>& p) { return {p.data(), p.data() + p.size()}; }

// Golden files whose name begins with `prefix`.
std::vector<std::filesystem::path> golden_files(const std::string& prefix) {
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(HEED_GOLDEN_DIR))
    if (entry.path().filename().string().starts_with(prefix)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

TEST_CASE("the golden cases of the source form: outputs and gradients") {
  const auto files = golden_files("diff_");
  REQUIRE(files.size() >= 14);
  for (const auto& path : files)
    for (const int vectors : {1, kPanelVectors}) {
      INFO(path.filename().string());
      Golden golden(path);
      Differential<double> op;
      const auto lambda = golden.file.values<double>("lambda");
      op.normaliser.lambda = Param<double>({Index(lambda.size())}, lambda);
      op.validate(golden.g, "golden");
      const Replay replay(golden, op, vectors);
      replay.check_common();
      golden.check("dlambda", values_of(replay.grad.normaliser.lambda));
    }
}

TEST_CASE("the golden cases of Microsoft's V1: outputs and gradients") {
  const auto files = golden_files("diffms_");
  REQUIRE(files.size() >= 8);
  for (const auto& path : files)
    for (const int vectors : {1, kPanelVectors}) {
      INFO(path.filename().string());
      Golden golden(path);
      const auto get = [&](const char* name) { return golden.file.values<double>(name); };
      const bool with_weight = golden.number("has_weight") != 0;
      auto op =
          make_differential_v1<double>(golden.g.dim_qk / 2, golden.number("depth"), with_weight,
                                       {get("lq1"), get("lk1"), get("lq2"), get("lk2")});
      if (with_weight) op.readout.weight = Param<double>({golden.g.dim_v}, get("weight"));
      op.validate(golden.g, "golden");
      golden.check("lam", {op.normaliser.lambda_of(0, 0.0)});
      const Replay replay(golden, op, vectors);
      replay.check_common();
      golden.check("out_prenorm", replay.prenorm);
      const auto& grad = replay.grad;
      golden.check("dlq1", values_of(grad.normaliser.lambda_q1));
      golden.check("dlk1", values_of(grad.normaliser.lambda_k1));
      golden.check("dlq2", values_of(grad.normaliser.lambda_q2));
      golden.check("dlk2", values_of(grad.normaliser.lambda_k2));
      if (with_weight) golden.check("dweight", values_of(grad.readout.weight));
    }
}

TEST_CASE("V2 on two plain heads: out = O1 - sigmoid(x) O2") {
  // One query, two keys: P1 = (0.25, 0.75) from query head 0, P2 = (0.5, 0.5) from head 1;
  // x = log 3, lambda = 0.75.
  const DifferentialV2<double> op;
  const Geometry g{1, 1, 2, 1, 1, 2, 3, 2};
  op.validate(g, "test");
  CHECK(op.extra_dim(g) == 1);
  Panel<double> p(2, 1, 1);
  p.set(0, 0, 0, 0.0);
  p.set(0, 1, 0, std::log(3.0));
  p.set(1, 0, 0, 5.0);
  p.set(1, 1, 0, 5.0);
  p.extra[0] = std::log(3.0);
  op.normaliser.forward(p.block);
  CHECK(p.scores[0][p.at(0, 0)] == Approx(0.25 - 0.75 * 0.5));
  CHECK(p.scores[0][p.at(1, 0)] == Approx(0.75 - 0.75 * 0.5));
}
