// SPDX-License-Identifier: Apache-2.0
#include <heed/autodiff/complex_step.hpp>
#include <heed/autodiff/dual.hpp>
#include <heed/autodiff/tape.hpp>
#include <heed/io/safetensors.hpp>
#include <heed/measure/resonance.hpp>
#include <heed/ops/dar.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"

#include <cmath>
#include <complex>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace heed;

namespace {

using Complex = std::complex<double>;
using V64 = Var<double>;
const double kNan = std::numeric_limits<double>::quiet_NaN();

// ---- one pair in plain loops ------------------------------------------------------------------

template <class S>
struct PlainRow {
  using Scalar = S;
  std::vector<S> values, projection;
  [[nodiscard]] Index dim() const { return Index(values.size()); }
  [[nodiscard]] Index rank() const { return Index(projection.size()); }
  [[nodiscard]] Index table_rows() const { return 0; }
  [[nodiscard]] S x(Index c) const { return values[std::size_t(c)]; }
  [[nodiscard]] S projected(Index c) const { return projection[std::size_t(c)]; }
  [[nodiscard]] S table(Index) const { return S(0); }
};

template <class S>
struct PlainRowGrad {
  std::vector<S>&x, &projected;
  void add_x(Index c, S g) const { x[std::size_t(c)] += g; }
  void add_projected(Index c, S g) const { projected[std::size_t(c)] += g; }
};

template <class T, class S>
PlainRow<S> make_row(const DarScore<T>& score, const std::vector<S>& x) {
  const auto& basis = score.projection();
  PlainRow<S> row{x, {}};
  const Index rank = basis.given() ? basis.extent(1) : 0;
  for (Index c = 0; c < rank; ++c) {
    S sum = math::constant<S>(0);
    for (Index i = 0; i < row.dim(); ++i) sum += row.x(i) * math::constant<S>(basis[i * rank + c]);
    row.projection.push_back(sum);
  }
  return row;
}

template <class S>
S plain_dot(const std::vector<S>& a, const std::vector<S>& b) {
  S sum = math::constant<S>(0);
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

constexpr double kScale = 0.4;

template <class T, class S>
PairOf<DarScore<T>, S> make_pair_of(const DarScore<T>& score, const PlainRow<S>& q,
                                    const PlainRow<S>& k, double scale = kScale) {
  PairOf<DarScore<T>, S> pair;
  pair.dot = plain_dot(q.values, k.values);
  pair.logit = pair.dot * math::constant<S>(scale);
  pair.projected = plain_dot(q.projection, k.projection);
  score.query_features_of(q, pair.query.data());
  score.key_features_of(k, pair.key.data());
  return pair;
}

template <class T, class S>
ScalarsOf<DarScore<T>, S> values_of_scalars(const DarScore<T>& score) {
  ScalarsOf<DarScore<T>, S> p;
  for (std::size_t i = 0; i < p.size(); ++i)
    p[i] = math::constant<S>(scalar_of<double>(score, int(i), 0));
  return p;
}

template <class T, class S>
S score_of(const DarScore<T>& score, const std::vector<S>& q, const std::vector<S>& k) {
  return score.score(make_pair_of(score, make_row(score, q), make_row(score, k)),
                     values_of_scalars<T, S>(score));
}

template <class S>
struct Gradient {
  S score;
  std::vector<S> dq, dk;
  std::array<S, 4> dp;
};

template <class S, class T>
void chain_projection(const DarScore<T>& score, const std::vector<S>& dprojected,
                      std::vector<S>& dx) {
  const Index rank = Index(dprojected.size());
  for (Index i = 0; i < Index(dx.size()); ++i)
    for (Index c = 0; c < rank; ++c)
      dx[std::size_t(i)] +=
          dprojected[std::size_t(c)] * math::constant<S>(score.projection()[i * rank + c]);
}

// Score and gradient by the hooks, with the engine's part of the chain rule added here.
template <class T, class S>
Gradient<S> by_hooks(const DarScore<T>& score, const std::vector<S>& q, const std::vector<S>& k,
                     const S& g, double scale = kScale) {
  const auto q_row = make_row(score, q), k_row = make_row(score, k);
  const auto pair = make_pair_of(score, q_row, k_row, scale);
  const auto p = values_of_scalars<T, S>(score);
  const S zero = math::constant<S>(0);
  Gradient<S> result{score.score(pair, p),
                     std::vector<S>(q.size(), zero),
                     std::vector<S>(k.size(), zero),
                     {zero, zero, zero, zero}};
  PairOf<DarScore<T>, S> d;
  for (auto* field : {&d.dot, &d.logit, &d.projected}) *field = zero;
  d.query.fill(zero);
  d.key.fill(zero);
  score.score_vjp(pair, p, g, d, result.dp);
  const S ddot = d.dot + d.logit * math::constant<S>(scale);
  std::vector<S> dqp, dkp;
  for (Index c = 0; c < q_row.rank(); ++c) {
    dqp.push_back(d.projected * k_row.projected(c));
    dkp.push_back(d.projected * q_row.projected(c));
  }
  for (std::size_t c = 0; c < q.size(); ++c) {
    result.dq[c] += ddot * k[c];
    result.dk[c] += ddot * q[c];
  }
  score.query_features_vjp(q_row, pair.query.data(), d.query.data(),
                           PlainRowGrad<S>{result.dq, dqp});
  score.key_features_vjp(k_row, pair.key.data(), d.key.data(), PlainRowGrad<S>{result.dk, dkp});
  chain_projection(score, dqp, result.dq);
  chain_projection(score, dkp, result.dk);
  return result;
}

// The same gradient by the tape, through score() and the feature functions alone.
Gradient<double> by_tape(const DarScore<double>& score, const std::vector<double>& q,
                         const std::vector<double>& k) {
  Tape<double> tape;
  std::vector<V64> vq, vk;
  for (const double x : q) vq.push_back(tape.variable(x));
  for (const double x : k) vk.push_back(tape.variable(x));
  ScalarsOf<DarScore<double>, V64> p;
  for (std::size_t i = 0; i < 4; ++i) p[i] = tape.variable(scalar_of<double>(score, int(i), 0));
  const V64 s = score.score(make_pair_of(score, make_row(score, vq), make_row(score, vk)), p);
  const auto adjoint = tape.gradient(s);
  Gradient<double> result{s.value, {}, {}, {}};
  for (const V64& x : vq) result.dq.push_back(adjoint[std::size_t(x.index)]);
  for (const V64& x : vk) result.dk.push_back(adjoint[std::size_t(x.index)]);
  for (std::size_t i = 0; i < 4; ++i) result.dp[i] = adjoint[std::size_t(p[i].index)];
  return result;
}

// ---- the formula again, from the paper -------------------------------------------------------

double plain_norm(const std::vector<double>& x) { return std::sqrt(plain_dot(x, x)); }

double textbook_gate(GateKind kind, double c, double feedback, double rho, double alpha) {
  switch (kind) {
    case GateKind::logistic: return 1 / (1 + std::exp(-alpha * (c + feedback - rho)));
    case GateKind::centred: return 1 / (1 + std::exp(-alpha * ((c + 1) / 2 + feedback - rho)));
    case GateKind::tanh: return (1 + std::tanh(alpha * (c + feedback - rho))) / 2;
    case GateKind::piecewise_linear: break;
  }
  return std::min(1.0, std::max(0.0, alpha * (c + feedback - rho) + 0.5));
}

double textbook_cosine(const DarScore<double>& score, const std::vector<double>& q,
                       const std::vector<double>& k) {
  const auto a = make_row(score, q), b = make_row(score, k);
  const auto& x = a.rank() > 0 ? a.projection : a.values;
  const auto& y = b.rank() > 0 ? b.projection : b.values;
  return plain_dot(x, y) / ((plain_norm(x) + score.eps) * (plain_norm(y) + score.eps));
}

double textbook_resonance(const DarScore<double>& score, double c) {
  const int steps = score.converged ? 400 : std::max(1, score.iterations);
  double r = 0;
  for (int t = 0; t < steps; ++t)
    r = textbook_gate(score.gate, c, score.feedback[0] * r, score.vigilance[0], score.sharpness[0]);
  return r;
}

double textbook_score(const DarScore<double>& score, const std::vector<double>& q,
                      const std::vector<double>& k) {
  double strength = score.strength[0];
  if (score.adaptive) {
    const double n = plain_norm(q) * plain_norm(k);
    strength *= n / (n + double(q.size()));
  }
  return kScale * plain_dot(q, k) +
         strength * textbook_resonance(score, textbook_cosine(score, q, k));
}

// ---- forms and numbers -----------------------------------------------------------------------

constexpr Index kDim = 7, kRank = 3;

std::vector<double> random_row(std::mt19937& random, Index n, double size = 1.0) {
  std::normal_distribution<double> normal;
  std::vector<double> x;
  for (Index i = 0; i < n; ++i) x.push_back(size * normal(random));
  return x;
}

// Orthonormal columns (dim, rank), by Gram and Schmidt.
Param<double> random_basis(Index dim, Index rank) {
  std::mt19937 random(5);
  Param<double> basis(std::vector<Index>{dim, rank});
  for (Index c = 0; c < rank; ++c) {
    auto column = random_row(random, dim);
    for (Index b = 0; b < c; ++b) {
      double along = 0;
      for (Index i = 0; i < dim; ++i) along += column[std::size_t(i)] * basis[i * rank + b];
      for (Index i = 0; i < dim; ++i) column[std::size_t(i)] -= along * basis[i * rank + b];
    }
    const double norm = plain_norm(column);
    for (Index i = 0; i < dim; ++i) basis[i * rank + c] = column[std::size_t(i)] / norm;
  }
  return basis;
}

constexpr GateKind kGates[] = {GateKind::logistic, GateKind::centred, GateKind::tanh,
                               GateKind::piecewise_linear};

// Every gate, static, unrolled and converged, constant and adaptive, full width and low rank.
std::vector<DarScore<double>> all_forms() {
  std::vector<DarScore<double>> forms;
  for (const GateKind gate : kGates)
    for (const int iterations : {0, 1, 2, 5, -1})
      for (const bool adaptive : {false, true})
        for (const Index rank : {Index(0), kRank}) {
          DarScore<double> score;
          score.gate = gate;
          score.converged = iterations < 0;
          score.iterations = std::max(iterations, 0);
          score.adaptive = adaptive;
          if (rank > 0) score.basis = random_basis(kDim, rank);
          const bool steep = gate == GateKind::tanh || gate == GateKind::piecewise_linear;
          score.strength = -1.7;
          score.vigilance = gate == GateKind::centred ? 0.55 : 0.15;
          score.sharpness = steep ? 1.3 : 5.0;
          score.feedback = forms.size() % 3 == 2 ? -0.4 : 0.45;
          forms.push_back(score);
        }
  return forms;
}

std::string name_of(const DarScore<double>& s) {
  return "gate " + std::to_string(int(s.gate)) + ", iterations " + std::to_string(s.iterations) +
         (s.converged ? ", converged" : "") + (s.adaptive ? ", adaptive" : "") +
         (s.basis.given() ? ", low rank" : "");
}

void require_close(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  REQUIRE(a.size() == b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    INFO("entry " << i << ": " << a[i] << " and " << b[i]);
    REQUIRE(std::abs(a[i] - b[i]) <= tolerance * std::max(1.0, std::abs(b[i])));
  }
}

template <class T>
std::vector<Pack<T>> packed(const std::vector<std::vector<double>>& lanes) {
  std::vector<Pack<T>> x(lanes[0].size());
  for (std::size_t c = 0; c < x.size(); ++c) {
    T values[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) values[i] = T(lanes[std::size_t(i)][c]);
    x[c] = Pack<T>::load(values);
  }
  return x;
}

template <class T>
std::vector<double> lane(const std::vector<Pack<T>>& x, int i) {
  std::vector<double> values;
  for (const Pack<T>& p : x) values.push_back(double(p.lane(i)));
  return values;
}

Geometry geometry_of(Index heads, Index dim) {
  return {.batch = 1,
          .heads = heads,
          .query_heads = heads,
          .kv_heads = heads,
          .len_q = 3,
          .len_kv = 3,
          .dim_qk = dim,
          .dim_v = dim};
}

// The text of the exception that validate throws, "" if it throws none.
std::string refusal(const DarScore<double>& score, Index heads = 2, Index dim = kDim) {
  try {
    validate(score, geometry_of(heads, dim), "dar");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

// ---- the formula -----------------------------------------------------------------------------

TEST_CASE("The score of q = (3, 4) and k = (4, 3) is what a pocket calculator says") {
  // q.k = 24, |q| = |k| = 5, c = 24/25; 8 (0.96 - 0.6) = 2.88; 1/(1 + e^-2.88) = 0.9468488636;
  // 24/sqrt(2) + 0.3 * 0.9468488636 = 17.2546174077
  DarScore<double> score;
  const auto row = make_row(score, std::vector<double>{3, 4});
  const auto pair =
      make_pair_of(score, row, make_row(score, std::vector<double>{4, 3}), 1 / std::sqrt(2.0));
  const auto p = values_of_scalars<double, double>(score);
  CHECK(score.cosine(pair) == Approx(0.96).epsilon(1e-8));
  CHECK(score.resonance(pair, p) == Approx(0.9468488636).epsilon(1e-8));
  CHECK(score.score(pair, p) == Approx(17.2546174077).epsilon(1e-9));
}

TEST_CASE("Every form of the score equals the formula of the paper, on numbers and on packs") {
  std::mt19937 random(1);
  for (const DarScore<double>& score : all_forms()) {
    INFO(name_of(score));
    const DarScore<float> narrow = cast_part<float>(score);
    std::vector<std::vector<double>> q, k;
    for (int i = 0; i < 16; ++i) {
      q.push_back(random_row(random, kDim, 1.5));
      k.push_back(random_row(random, kDim));
    }
    const auto on_doubles = score_of(score, packed<double>(q), packed<double>(k));
    const auto on_floats = score_of(narrow, packed<float>(q), packed<float>(k));
    for (int i = 0; i < kLanes<float>; ++i) {
      const auto at = std::size_t(i);
      const double expected = textbook_score(score, q[at], k[at]);
      CHECK(score_of(score, q[at], k[at]) == Approx(expected).epsilon(1e-13).margin(1e-13));
      if (i < kLanes<double>)
        CHECK(on_doubles.lane(i) == Approx(expected).epsilon(1e-13).margin(1e-13));
      CHECK(double(on_floats.lane(i)) == Approx(expected).epsilon(5e-6).margin(5e-6));
    }
  }
}

TEST_CASE("The gradient of every form equals that of the tape, the complex step and dual packs") {
  std::mt19937 random(2);
  for (const DarScore<double>& score : all_forms()) {
    INFO(name_of(score));
    for (int trial = 0; trial < 3; ++trial) {
      const auto q = random_row(random, kDim, 1.5), k = random_row(random, kDim);
      const auto exact = by_tape(score, q, k);
      const auto ours = by_hooks(score, q, k, 1.0);
      require_close(ours.dq, exact.dq, 1e-12);
      require_close(ours.dk, exact.dk, 1e-12);
      require_close({ours.dp.begin(), ours.dp.end()}, {exact.dp.begin(), exact.dp.end()}, 1e-12);

      std::vector<Complex> zq(q.begin(), q.end()), zk(k.begin(), k.end());
      std::vector<double> step(q.size());
      for (std::size_t c = 0; c < q.size(); ++c) {
        zq[c] += Complex(0, 1e-40);
        step[c] = score_of(score, zq, zk).imag() / 1e-40;
        zq[c] = q[c];
      }
      require_close(ours.dq, step, 1e-12);

      using D = Dual<Pack<double>, 4>;
      const auto dual_row = [&](const std::vector<double>& x) {
        std::vector<D> row;
        for (const double value : x) row.push_back(D(value));
        return make_row(score, row);
      };
      ScalarsOf<DarScore<double>, D> p;
      for (std::size_t i = 0; i < 4; ++i)
        p[i] = D::variable(Pack<double>(scalar_of<double>(score, int(i), 0)), int(i));
      const D s = score.score(make_pair_of(score, dual_row(q), dual_row(k)), p);
      for (std::size_t i = 0; i < 4; ++i)
        CHECK(s.grad[i].lane(0) == Approx(ours.dp[i]).epsilon(1e-12).margin(1e-12));
    }
  }
}

TEST_CASE("Gradients on packs equal those on numbers, lane by lane") {
  std::mt19937 random(3);
  for (const DarScore<double>& score : all_forms()) {
    INFO(name_of(score));
    const DarScore<float> narrow = cast_part<float>(score);
    std::vector<std::vector<double>> q, k, g;
    for (int i = 0; i < 16; ++i) {
      q.push_back(random_row(random, kDim, 1.5));
      k.push_back(random_row(random, kDim));
      g.push_back(random_row(random, 1));
    }
    const auto wide_g = packed<double>(g)[0];
    const auto wide = by_hooks(score, packed<double>(q), packed<double>(k), wide_g);
    const auto small = by_hooks(narrow, packed<float>(q), packed<float>(k), packed<float>(g)[0]);
    for (int i = 0; i < kLanes<float>; ++i) {
      const auto at = std::size_t(i);
      const auto exact = by_hooks(score, q[at], k[at], g[at][0]);
      const std::vector<double> dp(exact.dp.begin(), exact.dp.end());
      const std::vector<Pack<float>> small_dp(small.dp.begin(), small.dp.end());
      // At its kinks the slope of the piecewise-linear gate jumps; float may fall on either side.
      const double r = textbook_resonance(score, textbook_cosine(score, q[at], k[at]));
      const bool kink = score.gate == GateKind::piecewise_linear &&
                        (std::abs(r) < 1e-5 || std::abs(r - 1) < 1e-5);
      if (!kink) {
        require_close(lane(small.dq, i), exact.dq, 3e-5);
        require_close(lane(small.dk, i), exact.dk, 3e-5);
        require_close(lane(small_dp, i), dp, 3e-5);
      }
      if (i >= kLanes<double>) continue;
      const std::vector<Pack<double>> wide_dp(wide.dp.begin(), wide.dp.end());
      require_close(lane(wide.dq, i), exact.dq, 1e-12);
      require_close(lane(wide.dk, i), exact.dk, 1e-12);
      require_close(lane(wide_dp, i), dp, 1e-12);
    }
  }
}

TEST_CASE("The gate's derivative counts on the closed interval where the line is not clipped") {
  // alpha = 2, rho = 0: the line 2 c + 1/2 meets 0 at c = -1/4 and 1 at c = 1/4, all exact.
  const ResonanceGate gate{GateKind::piecewise_linear, 0, false};
  const GateScalars<double> p{0.0, 2.0, 0.5};
  CHECK(gate.derivatives(0.25, p).value == 1.0);
  CHECK(gate.derivatives(0.25, p).by_input == 2.0);
  CHECK(gate.derivatives(-0.25, p).by_input == 2.0);
  CHECK(gate.derivatives(0.2500001, p).by_input == 0.0);
  CHECK(gate.derivatives(-0.2500001, p).by_input == 0.0);
  CHECK(gate.value(-0.2500001, p) == 0.0);
  const GateScalars<Pack<float>> packed{0.0F, 2.0F, 0.5F};
  const auto packs = gate.derivatives(Pack<float>(0.25F), packed);
  CHECK(packs.by_input.lane(0) == 2.0F);
}

// ---- the laws of the note --------------------------------------------------------------------

TEST_CASE("Strength 0 gives back the logit and still has a gradient of the strength") {
  std::mt19937 random(4);
  for (DarScore<double> score : all_forms()) {
    INFO(name_of(score));
    score.strength = 0.0;
    const auto q = random_row(random, kDim), k = random_row(random, kDim);
    const auto result = by_hooks(score, q, k, 2.0);
    CHECK(result.score == kScale * plain_dot(q, k));
    const double n = plain_norm(q) * plain_norm(k);
    const double share = score.adaptive ? n / (n + double(kDim)) : 1.0;
    const double r = textbook_resonance(score, textbook_cosine(score, q, k));
    CHECK(result.dp[0] == Approx(2.0 * share * r).epsilon(1e-12).margin(1e-300));
    CHECK(result.dp[1] == 0.0);
    require_close(result.dq, std::vector<double>([&] {
                    std::vector<double> expected;
                    for (const double x : k) expected.push_back(2.0 * kScale * x);
                    return expected;
                  }()),
                  1e-15);
    const DarScore<float> narrow = cast_part<float>(score);
    const auto fq = packed<float>({16, q}), fk = packed<float>({16, k});
    CHECK(score_of(narrow, fq, fk).lane(1) == (plain_dot(fq, fk) * 0.4F).lane(1));
  }
}

TEST_CASE("Vigilance: the static gate is above one half exactly where the cosine is above rho") {
  const ResonanceGate gate;
  for (const float rho : {-0.5F, 0.0F, 0.6F}) {
    const GateScalars<float> p{rho, 8.0F, 0.5F};
    for (float c = -1.0F; c <= 1.0F; c += 1.0F / 1024) {
      CHECK((gate.value(c, p) > 0.5F) == (c > rho));
      CHECK((gate.value(c, p) < 0.5F) == (c < rho));
    }
    CHECK(gate.value(rho, p) == 0.5F);
  }
}

TEST_CASE("Sharpness: the gate tends to the step as alpha grows") {
  for (const GateKind kind : kGates) {
    const ResonanceGate gate{kind, 0, false};
    const double rho = 0.3;
    for (const double side : {-1.0, 1.0}) {
      double last = 0.5;
      for (const double alpha : {2.0, 8.0, 32.0, 128.0, 512.0}) {
        const double r = gate.value(rho + side * 0.1, GateScalars<double>{rho, alpha, 0.5});
        CHECK(side * (r - last) >= 0.0);
        last = r;
      }
      CHECK(last == Approx(side > 0 ? 1.0 : 0.0).margin(1e-12));
    }
  }
}

TEST_CASE("Bounded influence: the score differs from the logit by less than the strength") {
  std::mt19937 random(6);
  for (const DarScore<double>& score : all_forms()) {
    INFO(name_of(score));
    const bool clips = score.gate == GateKind::piecewise_linear;
    for (int trial = 0; trial < 200; ++trial) {
      const auto q = random_row(random, kDim, 3.0), k = random_row(random, kDim, 0.3);
      const double moved = score_of(score, q, k) - kScale * plain_dot(q, k);
      CHECK(std::abs(moved) <= 1.7 + 1e-15);
      CHECK((clips || (moved < 0.0 && moved > -1.7)));  // the strength is -1.7
    }
  }
}

TEST_CASE("The gate does not change when a row is scaled or both rows are rotated") {
  std::mt19937 random(7);
  DarScore<double> score;
  const auto q = random_row(random, 2), k = random_row(random, 2);
  const auto cosine = [&](const std::vector<double>& a, const std::vector<double>& b) {
    return score.cosine(make_pair_of(score, make_row(score, a), make_row(score, b)));
  };
  const double c = cosine(q, k);
  CHECK(cosine({1e6 * q[0], 1e6 * q[1]}, k) == Approx(c).epsilon(1e-7));
  CHECK(cosine(q, {0.01 * k[0], 0.01 * k[1]}) == Approx(c).epsilon(1e-5));
  const auto turned = [](const std::vector<double>& x) {
    return std::vector<double>{0.6 * x[0] - 0.8 * x[1], 0.8 * x[0] + 0.6 * x[1]};
  };
  CHECK(cosine(turned(q), turned(k)) == Approx(c).epsilon(1e-13));
  CHECK(cosine(turned(q), k) != Approx(c).epsilon(1e-3));
}

TEST_CASE("Local temperature: a gap between scores grows by lambda times the gap of resonance") {
  std::mt19937 random(8);
  for (const DarScore<double>& score : all_forms()) {
    if (score.adaptive) continue;
    INFO(name_of(score));
    const auto q = random_row(random, kDim), a = random_row(random, kDim),
               b = random_row(random, kDim);
    const double gap = score_of(score, q, a) - score_of(score, q, b);
    const double base = kScale * (plain_dot(q, a) - plain_dot(q, b));
    const double resonance = textbook_resonance(score, textbook_cosine(score, q, a)) -
                             textbook_resonance(score, textbook_cosine(score, q, b));
    CHECK(gap - base == Approx(-1.7 * resonance).epsilon(1e-12).margin(1e-12));
  }
}

// ---- dynamics --------------------------------------------------------------------------------

TEST_CASE("No iteration and one iteration are the static gate, bit for bit") {
  for (const GateKind kind : kGates)
    for (const double c : {-0.7, 0.1, 0.62, 1.0}) {
      const GateScalars<double> p{0.4, 3.0, 0.5};
      const double still = ResonanceGate{kind, 0, false}.value(c, p);
      CHECK(ResonanceGate{kind, 1, false}.value(c, p) == still);
      CHECK(ResonanceGate{kind, 2, false}.value(c, p) >= still);
      CHECK(ResonanceGate{kind, 1, false}.derivatives(c, p).by_feedback == 0.0);
    }
}

TEST_CASE("The converged gate is the limit of the unrolled one, derivatives included") {
  struct Case {
    GateKind kind;
    double alpha, beta;
    int steps;  // enough for bound^steps < 1e-16
  };
  const Case cases[] = {{GateKind::logistic, 8.0, 0.45, 400},
                        {GateKind::logistic, 8.0, -0.45, 400},
                        {GateKind::logistic, 40.0, 0.099, 4000},
                        {GateKind::centred, 6.0, 0.5, 200},
                        {GateKind::tanh, 3.0, 0.5, 200},
                        {GateKind::piecewise_linear, 1.2, 0.6, 200},
                        {GateKind::piecewise_linear, 1.2, -0.7, 400}};
  for (const Case& at : cases)
    for (double c = -1.0; c <= 1.0; c += 0.03) {
      const GateScalars<double> p{0.35, at.alpha, at.beta};
      INFO(int(at.kind) << ", alpha " << at.alpha << ", beta " << at.beta << ", c " << c);
      const auto limit = ResonanceGate{at.kind, at.steps, false}.derivatives(c, p);
      const ResonanceGate gate{at.kind, 0, true};
      const auto root = gate.derivatives(c, p);
      CHECK(gate.value(c, p) == Approx(limit.value).epsilon(2e-14).margin(1e-15));
      CHECK(root.value == gate.value(c, p));
      CHECK(root.by_input == Approx(limit.by_input).epsilon(1e-11).margin(1e-13));
      CHECK(root.by_sharpness == Approx(limit.by_sharpness).epsilon(1e-11).margin(1e-13));
      CHECK(root.by_feedback == Approx(limit.by_feedback).epsilon(1e-11).margin(1e-13));
      const GateScalars<Pack<float>> narrow{0.35F, float(at.alpha), float(at.beta)};
      const auto f = gate.value(Pack<float>(float(c)), narrow).lane(0);
      CHECK(double(f) == Approx(limit.value).epsilon(2e-5).margin(2e-6));
    }
}

TEST_CASE("The converged gate of a lane has the same bits whatever the other lanes hold") {
  const ResonanceGate gate{GateKind::logistic, 0, true};
  const GateScalars<Pack<double>> p{0.35, 8.0, 0.495};
  for (const double c : {-0.9, 0.2, 0.1022, 0.11, 0.8}) {
    const double alone = gate.value(Pack<double>(c), p).lane(0);
    CHECK(alone == Approx(gate.value(c, GateScalars<double>{0.35, 8.0, 0.495})).epsilon(1e-14));
    for (const double other : {-1.0, 0.1024, 0.5, kNan}) {
      Pack<double> mixed(other);
      mixed.v[0] = c;
      CHECK(gate.value(mixed, p).lane(0) == alone);
    }
  }
}

TEST_CASE("contraction() is the slope bound of the steepest head") {
  DarScore<double> score;
  CHECK(score.contraction() == 1.0);  // the defaults of the note: 8 * 0.5 / 4
  score.sharpness = Param<double>{2.0, 4.0};
  score.feedback = Param<double>{0.5, -0.6};
  CHECK(score.contraction() == Approx(0.6));
  score.gate = GateKind::centred;
  CHECK(score.contraction() == Approx(0.6));
  score.gate = GateKind::tanh;
  CHECK(score.contraction() == Approx(1.2));
  score.gate = GateKind::piecewise_linear;
  CHECK(score.contraction() == Approx(2.4));
}

// ---- rows of extreme size --------------------------------------------------------------------

TEST_CASE("A zero row has cosine 0, and its gradient follows the chosen convention") {
  std::mt19937 random(9);
  const std::vector<double> zero(std::size_t(kDim), 0.0);
  for (DarScore<double> score : all_forms()) {
    INFO(name_of(score));
    const auto k = random_row(random, kDim);
    CHECK(score_of(score, zero, k) == Approx(textbook_score(score, zero, k)).margin(1e-15));
    const auto exact = by_tape(score, zero, k);
    const auto ours = by_hooks(score, zero, k, 1.0);
    require_close(ours.dq, exact.dq, 1e-12);
    require_close(ours.dk, exact.dk, 1e-12);
    if (!score.adaptive && score.gate != GateKind::piecewise_linear)
      CHECK(std::abs(ours.dq[0]) > 1e4);  // 1/eps at work
    score.zero_norm = ZeroNorm::safe;
    const auto safe = by_hooks(score, zero, k, 1.0);
    CHECK(safe.score == ours.score);
    for (std::size_t c = 0; c < k.size(); ++c) {
      CHECK(safe.dq[c] == kScale * k[c]);
      CHECK(safe.dk[c] == 0.0);
    }
    require_close(safe.dq, by_tape(score, zero, k).dq, 1e-12);
    const auto both = by_hooks(score, zero, zero, 1.0);
    CHECK(std::isfinite(both.score));
    for (const double g : both.dq) CHECK(g == 0.0);
  }
}

TEST_CASE("Rows of any finite size give a finite score and the right cosine") {
  std::mt19937 random(10);
  for (DarScore<double> wide : all_forms()) {
    wide.basis = Param<double>();
    INFO(name_of(wide));
    const DarScore<float> score = cast_part<float>(wide);
    auto q = random_row(random, kDim), k = random_row(random, kDim);
    const double c = textbook_cosine(wide, q, k);
    for (const double size : {1e-30, 1e-15, 1.0, 1e15, 1e30}) {
      auto scaled = q;
      for (double& x : scaled) x *= size;
      const auto fq = packed<float>({16, scaled}), fk = packed<float>({16, k});
      const auto pair = make_pair_of(score, make_row(score, fq), make_row(score, fk));
      if (size >= 1.0) CHECK(double(score.cosine(pair).lane(0)) == Approx(c).margin(1e-6));
      CHECK(std::isfinite(score.score(pair, values_of_scalars<float, Pack<float>>(score)).lane(0)));
      const auto gradient = by_hooks(score, fq, fk, Pack<float>(1.0F));
      for (const auto& g : gradient.dq) CHECK(std::isfinite(g.lane(0)));
      for (const auto& g : gradient.dk) CHECK(std::isfinite(g.lane(0)));
      for (const auto& g : gradient.dp) CHECK(std::isfinite(g.lane(0)));
    }
    // Orthogonal giants: the dot product is 0, the product of the norms is out of range.
    std::vector<double> x(std::size_t(kDim), 0.0), y = x;
    x[0] = 1e30;
    y[1] = 1e30;
    const auto giants =
        by_hooks(score, packed<float>({16, x}), packed<float>({16, y}), Pack<float>(1.0F));
    CHECK(std::isfinite(giants.score.lane(0)));
    for (const auto& g : giants.dq) CHECK(std::isfinite(g.lane(0)));
  }
}

TEST_CASE("The norm of a row neither overflows nor vanishes, and a NaN stays one") {
  for (const float size : {1e-38F, 1e-20F, 1.0F, 1e20F, 1e37F}) {
    const float norm = row_norm<float>(2, [&](Index c) { return size * (c == 0 ? 3.0F : 4.0F); });
    CHECK(norm == Approx(5.0F * size).epsilon(1e-6));
    const auto pack = row_norm<Pack<float>>(
        2, [&](Index c) { return Pack<float>(size * (c == 0 ? 3.0F : 4.0F)); });
    CHECK(pack.lane(0) == norm);
  }
  CHECK(row_norm<double>(2, [](Index c) { return c == 0 ? 3e200 : 4e200; }) == Approx(5e200));
  CHECK(row_norm<double>(3, [](Index) { return 0.0; }) == 0.0);
  CHECK(std::isnan(row_norm<double>(3, [](Index c) { return c == 1 ? kNan : 1.0; })));
}

TEST_CASE("A NaN in a row is never turned into a number") {
  std::mt19937 random(11);
  for (const DarScore<double>& score : all_forms()) {
    INFO(name_of(score));
    auto q = random_row(random, kDim);
    const auto k = random_row(random, kDim);
    q[3] = kNan;
    auto pair = make_pair_of(score, make_row(score, q), make_row(score, k));
    CHECK(std::isnan(score.resonance(pair, values_of_scalars<double, double>(score))));
    const std::vector<std::vector<double>> q16(16, q), k16(16, k);
    CHECK(std::isnan(score_of(score, packed<double>(q16), packed<double>(k16)).lane(1)));
    pair.logit = 0.0;
    CHECK(std::isnan(score.score(pair, values_of_scalars<double, double>(score))));
  }
}

// ---- parameters and options ------------------------------------------------------------------

TEST_CASE("Nonsense is refused in one sentence that names the argument and its value") {
  DarScore<double> good;
  CHECK(refusal(good).empty());
  good.vigilance = 1.12;  // beyond every cosine, and yet a number: a gate that hardly opens
  CHECK(refusal(good).empty());
  const auto refuses = [&](auto&& change, const std::string& text) {
    DarScore<double> bad;
    change(bad);
    INFO(refusal(bad));
    CHECK(refusal(bad).find(text) != std::string::npos);
  };
  refuses([](auto& s) { s.strength = kNan; }, "dar: strength is nan");
  refuses([](auto& s) { s.vigilance = kInfinity<double>; }, "vigilance is inf");
  refuses([](auto& s) { s.sharpness = 0.0; }, "sharpness is 0, it must be positive");
  refuses([](auto& s) { s.sharpness = -3.0; }, "sharpness is -3");
  refuses([](auto& s) { s.feedback = Param<double>{0.1, 0.2, 0.3}; }, "feedback has 3 values");
  refuses([](auto& s) { s.iterations = -1; }, "iterations is -1");
  refuses([](auto& s) { s.eps = 0.0; }, "eps is 0");
  refuses([](auto& s) { s.eps = kNan; }, "eps is nan");
  refuses([](auto& s) { s.converged = true; }, "the converged gate has the slope bound 1,");
  refuses([](auto& s) { s.basis = random_basis(kDim + 1, 2); }, "projection has 2 axes");
  refuses(
      [](auto& s) {
        s.basis = Param<double>({kDim, 1}, std::vector<double>(kDim, 1.0));
      },
      "columns 0 and 0 of projection have the dot product 7");
  DarScore<double> converged;
  converged.converged = true;
  converged.feedback = 0.49;
  CHECK(refusal(converged).empty());
  converged.basis = random_basis(kDim, kDim);
  CHECK(refusal(converged).empty());
}

TEST_CASE("The projection is converted with the op, but it is not learnable") {
  Dar<double> op;
  op.score.basis = random_basis(kDim, kRank);
  op.score.iterations = 3;
  op.score.strength = Param<double>{0.25, 0.5};
  std::vector<std::string> names;
  for_each_param(op, [&](const char* name, const auto&) { names.push_back(name); });
  CHECK(names == std::vector<std::string>{"strength", "vigilance", "sharpness", "feedback"});
  const Dar<float> narrow = cast_op<float>(op);
  CHECK(narrow.score.projection().shape() == std::vector<Index>{kDim, kRank});
  CHECK(narrow.score.projection()[5] == float(op.score.basis[5]));
  CHECK(narrow.score.iterations == 3);
  CHECK(narrow.score.strength.head(1) == 0.5F);
  const auto complex = cast_op<Complex>(op);
  CHECK(scalar_of<Complex>(complex.score, 0, 1) == Complex(0.5));
  const auto zeros = zeros_like(op);
  CHECK(zeros.score.strength.head(1) == 0.0);
  CHECK(zeros.score.basis[5] == op.score.basis[5]);
}

TEST_CASE("Gradients of scalars go to the head that they belong to, or to the shared value") {
  DarScore<float> score, grad;
  score.strength = Param<float>{1.0F, 2.0F};
  grad.strength = Param<float>{0.0F, 0.0F};
  for (auto* p : {&grad.vigilance, &grad.sharpness, &grad.feedback}) p->set_zero();
  const double first[] = {1.0, 2.0, 3.0, 4.0}, second[] = {10.0, 20.0, 30.0, 40.0};
  chain_scalars(grad, 0, first);
  chain_scalars(grad, 1, second);
  CHECK(grad.strength[0] == 1.0F);
  CHECK(grad.strength[1] == 10.0F);
  CHECK(grad.vigilance[0] == 22.0F);
  CHECK(grad.sharpness[0] == 33.0F);
  CHECK(grad.feedback[0] == 44.0F);
  CHECK(scalar_of<float>(score, 0, 1) == 2.0F);
  CHECK(scalar_of<float>(score, 2, 1) == 8.0F);
}

// ---- golden cases ----------------------------------------------------------------------------

namespace {

struct GoldenDar {
  io::Safetensors file;
  DarScore<double> score;
  Geometry g;
  double scale = 0.0;
  std::vector<double> q, k, v, dout, bias;
  std::vector<double> allowed;
  Mask<double> mask;

  [[nodiscard]] std::string text(const char* name) const { return file.metadata().at(name); }
  [[nodiscard]] Index number(const char* name) const { return std::stol(text(name)); }
  [[nodiscard]] std::vector<double> tensor(const char* name) const {
    return file.contains(name) ? file.values<double>(name) : std::vector<double>();
  }
  [[nodiscard]] Param<double> param(const char* name) const {
    const auto values = tensor(name);
    return Param<double>({Index(values.size())}, values);
  }

  explicit GoldenDar(const std::filesystem::path& path) : file(io::Safetensors::read(path)) {
    g = {.batch = number("B"),
         .heads = number("H"),
         .query_heads = number("H"),
         .kv_heads = number("Hkv"),
         .len_q = number("Tq"),
         .len_kv = number("Tk"),
         .dim_qk = number("d"),
         .dim_v = number("dv")};
    scale = std::stod(text("scale"));
    const std::string gate = text("gate");
    score.gate = gate == "logistic"   ? GateKind::logistic
                 : gate == "centered" ? GateKind::centred
                 : gate == "tanh"     ? GateKind::tanh
                                      : GateKind::piecewise_linear;
    score.iterations = int(number("iters"));
    score.adaptive = number("adaptive") != 0;
    score.eps = std::stod(text("eps"));
    score.strength = param("lam");
    score.vigilance = param("rho");
    score.sharpness = param("alpha");
    score.feedback = param("beta");
    if (file.contains("P")) score.basis = Param<double>({g.dim_qk, number("rank")}, tensor("P"));
    q = tensor("q");
    k = tensor("k");
    v = tensor("v");
    dout = tensor("dout");
    bias = tensor("bias");
    const Align align = text("align") == "br" ? Align::bottom_right : Align::top_left;
    mask = window<double>(number("left"), number("right"), align);
    const std::vector<double> lengths = tensor("lengths");
    if (!lengths.empty()) mask.key_lengths.emplace(lengths.begin(), lengths.end());
    allowed = tensor("mask");
    if (!allowed.empty()) read_allowed();
    if (!bias.empty()) mask.bias = {bias.data(), shape_of("bias")};
  }

  [[nodiscard]] Shape shape_of(const char* name) const {
    const auto& s = file.info(name).shape;
    return {Index(s[0]), Index(s[1]), Index(s[2]), Index(s[3])};
  }
  [[nodiscard]] std::vector<double> query_row(Index b, Index h, Index i) const {
    const auto at = q.begin() + g.row_index(b, h, i) * g.dim_qk;
    return {at, at + g.dim_qk};
  }
  [[nodiscard]] std::vector<double> key_row(Index b, Index h, Index j) const {
    const auto at = k.begin() + kv_index(b, h, j) * g.dim_qk;
    return {at, at + g.dim_qk};
  }
  [[nodiscard]] Index kv_index(Index b, Index h, Index j) const {
    return (b * g.kv_heads + g.kv_head(h)) * g.len_kv + j;
  }

  std::unique_ptr<bool[]> allowed_storage;

 private:
  void read_allowed() {
    allowed_storage.reset(new bool[allowed.size()]);
    for (std::size_t i = 0; i < allowed.size(); ++i) allowed_storage[i] = allowed[i] != 0.0;
    mask.allowed = {allowed_storage.get(), shape_of("mask")};
  }
};

// Attention forward and backward, one pair at a time, with the score's hooks.
struct LongHand {
  std::vector<double> out, dq, dk, dv, dbias;
  DarScore<double> dscore;

  explicit LongHand(const GoldenDar& c)
      : out(c.dout.size()), dq(c.q.size()), dk(c.k.size()), dv(c.v.size()), dscore(c.score) {
    visit_parameters(dscore, [](const char*, auto& p) { p.set_zero(); });
    const BoundMask<double> mask(c.mask, c.g, "test");
    for (Index b = 0; b < c.g.batch; ++b)
      for (Index h = 0; h < c.g.heads; ++h)
        for (Index i = 0; i < c.g.len_q; ++i) row(c, mask, b, h, i);
  }

  void row(const GoldenDar& c, const BoundMask<double>& mask, Index b, Index h, Index i) {
    DarScore<double> score = head_of(c.score, h);
    const auto q = c.query_row(b, h, i);
    std::vector<Index> keys;
    std::vector<double> scores;
    for (Index j = 0; j < c.g.len_kv; ++j) {
      if (!mask.visible(b, h, i, j)) continue;
      const double bias = mask.has_bias() ? mask.bias_row(b, h, i)[j] : 0.0;
      keys.push_back(j);
      scores.push_back(by_hooks(score, q, c.key_row(b, h, j), 0.0, c.scale).score + bias);
    }
    const auto weights = long_hand_softmax(scores);
    const Index at = c.g.row_index(b, h, i);
    std::vector<double> dweights;
    double delta = 0;
    for (std::size_t n = 0; n < keys.size(); ++n) {
      dweights.push_back(0);
      for (Index x = 0; x < c.g.dim_v; ++x) {
        const auto from = std::size_t(c.kv_index(b, h, keys[n]) * c.g.dim_v + x);
        const auto to = std::size_t(at * c.g.dim_v + x);
        out[to] += weights[n] * c.v[from];
        dv[from] += weights[n] * c.dout[to];
        dweights[n] += c.v[from] * c.dout[to];
      }
      delta += weights[n] * dweights[n];
    }
    for (std::size_t n = 0; n < keys.size(); ++n) {
      const double g = weights[n] * (dweights[n] - delta);
      const auto pair = by_hooks(score, q, c.key_row(b, h, keys[n]), g, c.scale);
      for (Index x = 0; x < c.g.dim_qk; ++x) {
        dq[std::size_t(at * c.g.dim_qk + x)] += pair.dq[std::size_t(x)];
        dk[std::size_t(c.kv_index(b, h, keys[n]) * c.g.dim_qk + x)] += pair.dk[std::size_t(x)];
      }
      chain_scalars(dscore, h, pair.dp.data());
    }
  }

  [[nodiscard]] static DarScore<double> head_of(DarScore<double> score, Index h) {
    visit_parameters(score, [&](const char*, auto& p) { p = Param<double>(p.head(h)); });
    return score;
  }
};

// Every entry within 1e-12 of the tensor's largest, and of 1 for tensors that are all noise.
void require_golden(const std::vector<double>& ours, const std::vector<double>& golden,
                    const char* name) {
  double top = 1e-3, worst = 0;
  REQUIRE(ours.size() == golden.size());
  for (std::size_t i = 0; i < ours.size(); ++i) {
    REQUIRE(std::isfinite(ours[i]));
    top = std::max(top, std::abs(golden[i]));
    worst = std::max(worst, std::abs(ours[i] - golden[i]));
  }
  INFO(name << ": worst error " << worst << ", largest entry " << top);
  CHECK(worst <= 1e-12 * top);
}

std::vector<double> values_of(const Param<double>& p) { return {p.data(), p.data() + p.size()}; }

std::vector<GoldenDar> golden_cases() {
  std::vector<GoldenDar> cases;
  for (const auto& entry : std::filesystem::directory_iterator(HEED_GOLDEN_DIR)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("dar_", 0) == 0) cases.emplace_back(entry.path());
  }
  return cases;
}

}  // namespace

TEST_CASE("Long-hand attention over the hooks reproduces every golden case, gradients included") {
  const auto cases = golden_cases();
  REQUIRE(cases.size() >= 30);
  for (const GoldenDar& c : cases) {
    INFO(c.text("case"));
    const LongHand ours(c);
    require_golden(ours.out, c.tensor("out"), "out");
    require_golden(ours.dq, c.tensor("dq"), "dq");
    require_golden(ours.dk, c.tensor("dk"), "dk");
    require_golden(ours.dv, c.tensor("dv"), "dv");
    require_golden(values_of(ours.dscore.strength), c.tensor("dlam"), "dlam");
    require_golden(values_of(ours.dscore.vigilance), c.tensor("drho"), "drho");
    require_golden(values_of(ours.dscore.sharpness), c.tensor("dalpha"), "dalpha");
    require_golden(values_of(ours.dscore.feedback), c.tensor("dbeta"), "dbeta");
  }
}

TEST_CASE("The safe convention for zero rows reproduces its golden gradients") {
  int found = 0;
  for (GoldenDar& c : golden_cases()) {
    if (!c.file.contains("dq_safe")) continue;
    INFO(c.text("case"));
    c.score.zero_norm = ZeroNorm::safe;
    const LongHand ours(c);
    require_golden(ours.out, c.tensor("out"), "out");
    require_golden(ours.dq, c.tensor("dq_safe"), "dq_safe");
    require_golden(ours.dk, c.tensor("dk_safe"), "dk_safe");
    ++found;
  }
  CHECK(found >= 2);
}

// ---- the resonance map -----------------------------------------------------------------------

namespace {

// Sizes around the panel width, grouped heads, strided rows.
struct MapCase {
  Geometry g;
  std::vector<double> q, k;
  Index row;

  MapCase(Index heads, Index kv_heads, Index len_q, Index len_kv, Index dim, unsigned seed)
      : g{.batch = 2,
          .heads = heads,
          .query_heads = heads,
          .kv_heads = kv_heads,
          .len_q = len_q,
          .len_kv = len_kv,
          .dim_qk = dim,
          .dim_v = dim},
        row(dim + 3) {
    std::mt19937 random(seed);
    q = random_row(random, g.batch * heads * len_q * row);
    k = random_row(random, g.batch * kv_heads * len_kv * row);
  }
  template <class T>
  [[nodiscard]] TensorView<const T> view(const std::vector<T>& x, Index heads, Index len) const {
    return {x.data(), {g.batch, heads, len, g.dim_qk}, {heads * len * row, len * row, row}};
  }
  [[nodiscard]] TensorView<const double> query() const { return view(q, g.heads, g.len_q); }
  [[nodiscard]] TensorView<const double> key() const { return view(k, g.kv_heads, g.len_kv); }
  [[nodiscard]] std::pair<double, double> pair(const DarScore<double>& score, Index b, Index h,
                                               Index i, Index j) const {
    const double* x = query().row(b, h, i);
    const double* y = key().row(b, g.kv_head(h), j);
    const auto one = LongHand::head_of(score, h);
    const double c = textbook_cosine(one, {x, x + g.dim_qk}, {y, y + g.dim_qk});
    return {textbook_resonance(one, c), one.resonance_gate().input(c)};
  }
};

}  // namespace

TEST_CASE("The resonance map and its statistics equal plain loops over the visible pairs") {
  int which = 0;
  for (const DarScore<double>& form : all_forms()) {
    INFO(name_of(form));
    Dar<double> op;
    op.score = form;
    op.score.vigilance = Param<double>{0.15, 0.05, 0.4, 0.3};
    const Index lengths[] = {1, 5, 31, 33, 70};
    const MapCase at(4, which % 2 ? 2 : 4, lengths[which % 5], lengths[(which + 2) % 5], kDim,
                     unsigned(which));
    std::vector<double> bias(std::size_t(at.g.len_kv), 0.5);
    bias[0] = -kInfinity<double>;
    Mask<double> mask = which % 3 == 0 ? Mask<double>{} : causal<double>(Align::bottom_right);
    if (which % 4 == 1) mask.bias = {bias.data(), {1, 1, 1, at.g.len_kv}};
    if (which % 4 == 2) mask.key_lengths = std::vector<Index>{0, at.g.len_kv};
    ++which;

    const Shape shape{2, 4, at.g.len_q, at.g.len_kv};
    std::vector<double> map(std::size_t(element_count(shape, "map")), kNan);
    const TensorView<double> out(map.data(), shape);
    resonance_map(op, at.query(), at.key(), out, mask, 2);
    const auto statistics = resonance_statistics(op, at.query(), at.key(), mask, 2);
    const BoundMask<double> bound(mask, at.g, "test");
    for (Index h = 0; h < 4; ++h) {
      double crossings = 0, sum = 0, pairs = 0;
      for (Index b = 0; b < 2; ++b)
        for (Index i = 0; i < at.g.len_q; ++i)
          for (Index j = 0; j < at.g.len_kv; ++j) {
            const auto [r, input] = at.pair(op.score, b, h, i, j);
            const bool visible = bound.visible(b, h, i, j);
            REQUIRE(out(b, h, i, j) == Approx(visible ? r : 0.0).epsilon(1e-12).margin(1e-13));
            if (!visible) continue;
            crossings += input > op.score.vigilance[h];
            sum += r;
            ++pairs;
          }
      const auto head = std::size_t(h);
      CHECK(statistics.visible_pairs[head] == Index(pairs));
      CHECK(statistics.crossing[head] == Approx(crossings / std::max(pairs, 1.0)).margin(1e-15));
      CHECK(statistics.mean_resonance[head] == Approx(sum / std::max(pairs, 1.0)).epsilon(1e-12));
    }
  }
}

TEST_CASE("The resonance map of a golden case is its tensor r") {
  for (const GoldenDar& c : golden_cases()) {
    if (!c.file.contains("r")) continue;
    INFO(c.text("case"));
    Dar<double> op;
    op.score = c.score;
    const Shape q{c.g.batch, c.g.heads, c.g.len_q, c.g.dim_qk};
    const Shape k{c.g.batch, c.g.kv_heads, c.g.len_kv, c.g.dim_qk};
    const auto r = c.tensor("r");
    std::vector<double> map(r.size());
    resonance_map(op, TensorView<const double>(c.q.data(), q),
                  TensorView<const double>(c.k.data(), k),
                  TensorView<double>(map.data(), {q.batch, q.heads, q.len, k.len}));
    require_golden(map, r, "r");
  }
}

TEST_CASE("Resonance statistics have the same bits for any threads, and ignore hidden NaN") {
  MapCase at(3, 1, 150, 131, 16, 77);
  std::vector<float> q(at.q.begin(), at.q.end()), k(at.k.begin(), at.k.end());
  Dar<float> op;
  op.score.vigilance = 0.1F;
  const auto query = at.view(q, 3, 150), key = at.view(k, 1, 131);
  const auto mask = causal<float>() & key_lengths<float>({100, 0});
  const auto one = resonance_statistics(op, query, key, mask, 1);
  for (Index j = 100; j < 131; ++j) k[std::size_t(j * at.row + 2)] = float(kNan);
  for (const int threads : {1, 2, 3, 7}) {
    const auto other = resonance_statistics(op, query, key, mask, threads);
    CHECK(other.crossing == one.crossing);
    CHECK(other.mean_resonance == one.mean_resonance);
    CHECK(other.visible_pairs == one.visible_pairs);
  }
  CHECK(one.visible_pairs[0] == 100 * 101 / 2 + 50 * 100);
  CHECK(one.crossing[0] > 0.1);
  CHECK(one.crossing[0] < 0.6);
  std::vector<float> map(std::size_t(2 * 3 * 150 * 131), 1.0F);
  resonance_map(op, query, key, TensorView<float>(map.data(), {2, 3, 150, 131}), mask);
  for (const float r : map) REQUIRE((r >= 0.0F && r <= 1.0F));
}

TEST_CASE(
    "Resonance of rows whose dot products overflow is that of the same rows in ordinary size") {
  for (const Index rank : {Index(0), kRank})
    for (const float size : {0x1p-20F, 0x1p13F, 0x1p64F, 0x1p100F}) {
      MapCase at(2, 2, 40, 37, kDim, 5);
      std::vector<float> q(at.q.begin(), at.q.end()), k(at.k.begin(), at.k.end());
      Dar<float> op;
      op.score.vigilance = 0.1F;
      op.score.eps = 1e-30;
      if (rank > 0) op.score.basis = random_basis(kDim, rank).cast<float>();
      const auto run = [&] {
        std::vector<float> map(std::size_t(2 * 2 * 40 * 37), 7.0F);
        resonance_map(op, at.view(q, 2, 40), at.view(k, 2, 37),
                      TensorView<float>(map.data(), {2, 2, 40, 37}));
        return map;
      };
      const auto expected = run();
      const auto crossing = resonance_statistics(op, at.view(q, 2, 40), at.view(k, 2, 37)).crossing;
      for (float& x : q) x *= size;
      for (float& x : k) x *= size;
      const auto got = run();
      INFO("size " << size << ", rank " << rank);
      for (std::size_t i = 0; i < got.size(); ++i)
        REQUIRE(double(got[i]) == Approx(double(expected[i])).margin(3e-6));
      CHECK(resonance_statistics(op, at.view(q, 2, 40), at.view(k, 2, 37)).crossing == crossing);
    }
}

TEST_CASE("A map of no rows is no work, and sizes that do not fit are refused") {
  Dar<double> op;
  std::vector<double> memory(1000);
  const auto view = [&](const Shape& s, Index from = 0) {
    return TensorView<double>(memory.data() + from, s);
  };
  resonance_map(op, view({1, 2, 0, 4}), view({1, 2, 3, 4}), view({1, 2, 0, 3}));
  CHECK(resonance_statistics(op, view({1, 2, 5, 4}), view({1, 2, 0, 4})).crossing ==
        std::vector<double>{0.0, 0.0});
  const auto refused = [&](const Shape& q, const Shape& k, const Shape& out, Index out_at) {
    CHECK_THROWS_AS(resonance_map(op, view(q), view(k, 100), view(out, out_at)),
                    std::invalid_argument);
  };
  refused({1, 2, 3, 4}, {1, 2, 3, 5}, {1, 2, 3, 3}, 500);  // dim
  refused({1, 2, 3, 4}, {2, 2, 3, 4}, {1, 2, 3, 3}, 500);  // batch
  refused({1, 3, 3, 4}, {1, 2, 3, 4}, {1, 3, 3, 3}, 500);  // heads
  refused({1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 4}, 500);  // out
  refused({1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 3}, 90);   // overlap
  refused({1, 2, 3, 0}, {1, 2, 3, 0}, {1, 2, 3, 3}, 500);  // no columns
  op.score.eps = -1.0;
  refused({1, 2, 3, 4}, {1, 2, 3, 4}, {1, 2, 3, 3}, 500);
}
