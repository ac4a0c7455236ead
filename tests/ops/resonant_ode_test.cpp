// SPDX-License-Identifier: Apache-2.0
#include <heed/autodiff/dual.hpp>
#include <heed/autodiff/tape.hpp>
#include <heed/io/safetensors.hpp>
#include <heed/ops/resonant_ode.hpp>
#include <heed/simd/instructions.hpp>

#include "catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

using namespace heed;

namespace {

using Row = std::vector<double>;
using RowList = std::vector<Row>;
const double kNan = std::numeric_limits<double>::quiet_NaN();
const double kInf = std::numeric_limits<double>::infinity();

// ---- one block of rows, and what the flow makes of it ------------------------------------------

template <class T>
struct FlowRun {
  RowList weights, dscores, weights_again;  // [row][key]; the latter two from the backward pass
  Row lse, residual;                        // [row]
  double deta = 0;
};

// Memory of a row block: rows of the test are lanes; further lanes are padding that shows row 0.
template <class T>
struct Block {
  Index keys, lanes;
  std::vector<T> scores, top, lse, diagnostics, work, dweights, weights, dscores;
  RowBlock<T> view;

  Block(const RowList& drives, Index work_tiles)
      : keys(Index(drives.at(0).size())),
        lanes((Index(drives.size()) + kLanes<T> - 1) / kLanes<T> * kLanes<T>),
        scores(tile(drives)),
        top(std::size_t(lanes), T(-kInf)),
        lse(std::size_t(lanes), T(77)),
        diagnostics(lse),
        work(std::size_t(work_tiles * keys * lanes), T(kNan)),
        dweights(scores.size(), T(kNan)),
        weights(scores.size(), T(kNan)),
        dscores(weights) {
    for (std::size_t n = 0; n < scores.size(); ++n) {
      T& highest = top[n % std::size_t(lanes)];
      if (!(scores[n] <= highest)) highest = scores[n];
    }
    view.vectors = int(lanes / kLanes<T>);
    view.scores[0] = {scores.data(), keys, lanes};
    view.score_max[0] = top.data();
    view.lse[0] = lse.data();
    view.diagnostics = diagnostics.data();
    view.work = {work.data(), work_tiles * keys, lanes};
    view.dweights = {dweights.data(), keys, lanes};
    view.weights = {weights.data(), keys, lanes};
    view.dscores[0] = {dscores.data(), keys, lanes};
    view.valid_lanes = Index(drives.size());
  }
  std::vector<T> tile(const RowList& rows) const {
    std::vector<T> numbers(std::size_t(keys * lanes));
    for (Index j = 0; j < keys; ++j)
      for (Index i = 0; i < lanes; ++i)
        numbers[std::size_t(j * lanes + i)] =
            T(rows[std::size_t(i) < rows.size() ? std::size_t(i) : 0][std::size_t(j)]);
    return numbers;
  }
  RowList rows_of(const std::vector<T>& numbers) const {
    RowList rows(std::size_t(view.valid_lanes), Row(std::size_t(keys)));
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::size_t j = 0; j < rows[i].size(); ++j)
        rows[i][j] = double(numbers[j * std::size_t(lanes) + i]);
    return rows;
  }
};

template <class T>
FlowRun<T> run(const ResonantFlow<T>& flow, const RowList& drives, const RowList& dweights = {},
               Index head = 0, bool in_place = false) {
  FlowRun<T> result;
  Block<T> forward(drives, flow.work_tiles(false));
  forward.view.head = head;
  flow.forward(forward.view);
  result.weights = forward.rows_of(forward.scores);
  for (std::size_t i = 0; i < drives.size(); ++i) {
    result.lse.push_back(double(forward.lse[i]));
    result.residual.push_back(double(forward.diagnostics[i]));
  }
  if (dweights.empty()) return result;
  Block<T> backward(drives, flow.work_tiles(true));
  backward.view.head = head;
  const auto upstream = backward.tile(dweights);
  std::copy(upstream.begin(), upstream.end(), backward.dweights.begin());
  if (in_place) {
    backward.view.weights = backward.view.dweights;
    backward.view.dscores[0] = backward.view.scores[0];
  }
  auto grad = flow;
  grad.eta.set_zero();
  flow.vjp(backward.view, grad);
  result.dscores = backward.rows_of(in_place ? backward.scores : backward.dscores);
  result.weights_again = backward.rows_of(in_place ? backward.dweights : backward.weights);
  result.deta = double(grad.eta.head(head));
  return result;
}

// The same by the reference on the visible entries, with exact derivatives.
template <class T>
FlowRun<double> run_by_hand(const ResonantFlow<T>& flow, const RowList& drives,
                            const RowList& dweights) {
  FlowRun<double> result;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    Tape<double> tape;
    auto twin = cast_part<Var<double>>(flow);
    twin.eta = tape.variable(double(flow.eta.head(0)));
    std::vector<Var<double>> row;
    for (const double d : drives[i])
      if (d > -kInf) row.push_back(tape.variable(double(T(d))));
    const auto a = twin.reference(LongHandRow<Var<double>>{{row}, {}, 0, 0, {}, {}});
    Var<double> loss(0);
    Row weights, dscores;
    std::size_t seen = 0;
    for (std::size_t j = 0; j < drives[i].size(); ++j) {
      const bool visible = drives[i][j] > -kInf;
      if (visible) loss += a[seen] * Var<double>(double(T(dweights[i][j])));
      weights.push_back(visible ? a[seen++].value : 0);
    }
    const auto adjoint = tape.gradient(loss);
    seen = 0;
    for (const double d : drives[i])
      dscores.push_back(d > -kInf ? adjoint[std::size_t(row[seen++].index)] : 0);
    result.weights.push_back(weights);
    result.dscores.push_back(dscores);
    if (!row.empty()) result.deta += adjoint[std::size_t(twin.eta[0].index)];
  }
  return result;
}

double distance(const RowList& a, const RowList& b) {
  double worst = a.size() == b.size() ? 0 : kInf, largest = 1e-300;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) {
    if (a[i].size() != b[i].size()) return kInf;
    for (std::size_t j = 0; j < a[i].size(); ++j) {
      const double gap = std::abs(a[i][j] - b[i][j]);
      worst = std::max(worst, std::isnan(gap) ? kInf : gap);
      largest = std::max(largest, std::abs(b[i][j]));
    }
  }
  return worst / std::max(1.0, largest);
}

bool same_bits(const Row& a, const Row& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

RowList random_rows(Index rows, Index keys, double spread, unsigned seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<double> normal(0, spread);
  RowList result(static_cast<std::size_t>(rows), Row(static_cast<std::size_t>(keys)));
  for (auto& row : result)
    for (double& x : row) x = normal(bits);
  return result;
}

// Row 1 sees no key, row 2 its last key, odd rows beyond every third key.
void hide_some(RowList& drives) {
  for (std::size_t i = 1; i < drives.size(); ++i)
    for (std::size_t j = 0; j < drives[i].size(); ++j)
      if (i == 1 || (i == 2 && j + 1 < drives[i].size()) || (i > 2 && i % 2 == 1 && j % 3 == 1))
        drives[i][j] = -kInf;
}

template <class T>
ResonantFlow<T> flow_of(FlowMode mode, double eta, int steps = 5) {
  ResonantFlow<T> flow;
  flow.mode = mode;
  flow.steps = steps;
  flow.eta = T(eta);
  return flow;
}

struct Setting {
  FlowMode mode;
  double eta;
  int steps;
};

std::vector<Setting> all_settings() {
  std::vector<Setting> all;
  for (const int n : {1, 2, 3, 5, 8})
    for (const double eta : {-0.7, 0.0, 0.1, 0.5, 1.0, 1.9, 3.5}) {
      all.push_back({FlowMode::steps, eta, n});
      all.push_back({FlowMode::lagrange, eta, n});
    }
  for (const double eta : {0.01, 0.1, 0.5, 1.0, 1.5, 2.5})
    all.push_back({FlowMode::equilibrium, eta, 1});
  for (const double eta : {0.1, 0.5, 1.0, 1.5})
    all.push_back({FlowMode::lagrange_equilibrium, eta, 1});
  return all;
}

template <class T>
void check_against_twin(double tolerance, Index keys, double spread) {
  RowList drives = random_rows(2 * kLanes<T> - 1, keys, spread, 5);
  hide_some(drives);
  RowList dweights = random_rows(Index(drives.size()), keys, 1, 6);
  for (std::size_t i = 0; i < drives.size(); ++i)
    for (std::size_t j = 0; j < drives[i].size(); ++j)
      if (drives[i][j] == -kInf) dweights[i][j] = kNan;
  for (const Setting& s : all_settings()) {
    const auto flow = flow_of<T>(s.mode, s.eta, s.steps);
    INFO("mode " << int(s.mode) << " eta " << s.eta << " steps " << s.steps << " keys " << keys);
    const auto fast = run(flow, drives, dweights);
    const auto slow = run_by_hand(flow, drives, dweights);
    CHECK(distance(fast.weights, slow.weights) <= tolerance);
    CHECK(distance(fast.weights_again, slow.weights) <= tolerance);
    CHECK(distance(fast.dscores, slow.dscores) <= tolerance);
    CHECK(std::abs(fast.deta - slow.deta) <= 8 * tolerance * std::max(1.0, std::abs(slow.deta)));
    for (std::size_t i = 0; i < drives.size(); ++i)
      for (std::size_t j = 0; j < drives[i].size(); ++j)
        if (drives[i][j] == -kInf) {
          REQUIRE(fast.weights[i][j] == 0);
          REQUIRE(fast.weights_again[i][j] == 0);
          REQUIRE(fast.dscores[i][j] == 0);
        }
    const auto in_place = run(flow, drives, dweights, 0, true);
    for (std::size_t i = 0; i < drives.size(); ++i) {
      REQUIRE(same_bits(in_place.dscores[i], fast.dscores[i]));
      REQUIRE(same_bits(in_place.weights_again[i], fast.weights_again[i]));
    }
  }
}

}  // namespace

TEST_CASE("two keys, two steps, numbers by hand") {
  // D = (0, ln 3), eta = 1/2. Step 1: softmax(0, ln 3 / 2) = (1, sqrt 3) / (1 + sqrt 3).
  // Step 2: the second logit leads by (0.633975 - 0.366025) / 2 + 0.549306 = 0.683281.
  const auto flow = flow_of<double>(FlowMode::steps, 0.5, 2);
  const auto got = run(flow, {{0, std::log(3.0)}});
  CHECK(got.weights[0][1] == Approx(0.6644705309173855).epsilon(1e-15));
  CHECK(got.weights[0][0] == Approx(1 - 0.6644705309173855).epsilon(1e-15));
  CHECK(got.lse[0] == Approx(1.275058192008186).epsilon(1e-15));
  CHECK(got.residual[0] == Approx(0.6644705309173855 - 0.6339745962155614).epsilon(1e-13));
  const auto first = run(flow_of<double>(FlowMode::steps, 0.5, 1), {{0, std::log(3.0)}});
  CHECK(first.residual[0] == Approx(0.1339745962155614).epsilon(1e-14));  // from (1/2, 1/2)
  CHECK(first.lse[0] == Approx(std::log(1 + std::sqrt(3.0))).epsilon(1e-15));
}

TEST_CASE("the Lagrange flow by hand") {
  // D = (0, 1, 5), mean 2, eta = 1/2, n = 2: w = 3/4, a = 1/3 + 3/4 (-2, -1, 3).
  const auto got = run(flow_of<double>(FlowMode::lagrange, 0.5, 2), {{0, 1, 5}});
  CHECK(got.weights[0][0] == Approx(1.0 / 3 - 1.5));
  CHECK(got.weights[0][1] == Approx(1.0 / 3 - 0.75));
  CHECK(got.weights[0][2] == Approx(1.0 / 3 + 2.25));
  CHECK(got.residual[0] == Approx(0.75));  // the second step moves by 1/4 of the deviation, 3
  CHECK(got.lse[0] == 0);
  const auto rest = run(flow_of<double>(FlowMode::lagrange_equilibrium, 0.5), {{0, 1, 5}});
  CHECK(rest.weights[0][2] == Approx(1.0 / 3 + 3));
  CHECK(rest.residual[0] == 0);
}

TEST_CASE("the resonant flow and its gradients agree with the long hand in double") {
  for (const Index keys : {1, 2, 7, 40}) check_against_twin<double>(1e-12, keys, 1.5);
  check_against_twin<double>(1e-12, 9, 30);
}

TEST_CASE("the resonant flow and its gradients agree with the long hand in float") {
  for (const Index keys : {1, 2, 7, 40}) check_against_twin<float>(2e-5, keys, 1.5);
}

TEST_CASE("rows of the drive's gradient sum to 0") {
  const RowList drives = random_rows(3, 30, 2, 8), dweights = random_rows(3, 30, 1, 9);
  for (const Setting& s : all_settings()) {
    const auto got = run(flow_of<double>(s.mode, s.eta, s.steps), drives, dweights);
    for (const Row& row : got.dscores) {
      double sum = 0, size = 0;
      for (const double g : row) sum += g, size += std::abs(g);
      CHECK(std::abs(sum) <= 1e-13 * (1 + size));
    }
  }
}

TEST_CASE("a row that sees no key has weight 0, lse -infinity and residual 0") {
  const RowList none = {{-kInf, -kInf}, {0, 1}};
  for (const Setting& s : all_settings()) {
    const auto got = run(flow_of<float>(s.mode, s.eta, s.steps), none, {{kNan, kNan}, {1, 2}});
    CHECK(got.weights[0] == Row{0, 0});
    CHECK(got.weights_again[0] == Row{0, 0});
    CHECK(got.dscores[0] == Row{0, 0});
    CHECK(got.lse[0] == -kInf);
    CHECK(got.residual[0] == 0);
    CHECK(std::isfinite(got.lse[1]));
    CHECK(std::isfinite(got.deta));
  }
}

TEST_CASE("no bit of a lane depends on another lane") {
  for (const Setting& s : all_settings()) {
    const auto flow = flow_of<float>(s.mode, s.eta, s.steps);
    RowList drives = random_rows(kLanes<float>, 50, 2, 11);
    const RowList dweights = random_rows(kLanes<float>, 50, 1, 12);
    const auto before = run(flow, drives, dweights);
    for (std::size_t i = 1; i < drives.size(); ++i)
      for (std::size_t j = 0; j < 50; ++j)
        drives[i][j] = i % 4 == 1 ? kNan : i % 4 == 2 ? -kInf : i % 4 == 3 ? 1e4 * double(j) : 0;
    const auto after = run(flow, drives, dweights);
    CHECK(same_bits(before.weights[0], after.weights[0]));
    CHECK(same_bits(before.dscores[0], after.dscores[0]));
    CHECK(before.lse[0] == after.lse[0]);
    CHECK(before.residual[0] == after.residual[0]);
  }
}

TEST_CASE("a visible NaN or infinity is never turned into a number, a hidden key stays 0") {
  for (const double bad : {kNan, kInf})
    for (const Setting& s : all_settings()) {
      INFO("mode " << int(s.mode) << " eta " << s.eta << " steps " << s.steps);
      if (bad == kInf && s.eta <= 0) continue;  // the limit there is a number: weight 0
      const auto got =
          run(flow_of<double>(s.mode, s.eta, s.steps), {{0, bad, -kInf, 1}}, {{1, 2, kNan, 3}});
      CHECK(std::isnan(got.weights[0][1]));
      CHECK(got.weights[0][2] == 0);
      CHECK(got.weights_again[0][2] == 0);
      CHECK(got.dscores[0][2] == 0);
    }
}

TEST_CASE("drives of any size give finite weights") {
  for (const Setting& s : all_settings()) {
    INFO("mode " << int(s.mode) << " eta " << s.eta << " steps " << s.steps);
    const auto got = run(flow_of<float>(s.mode, s.eta, s.steps), {{1e30, -1e30, 0, -kInf, 9e29}},
                         {{1, 2, 3, kNan, 4}});
    for (const double a : got.weights[0]) CHECK(std::isfinite(a));
    for (const double g : got.dscores[0]) CHECK(std::isfinite(g));
    CHECK(std::isfinite(got.lse[0]));
  }
}

TEST_CASE("a row constant changes nothing but lse") {
  RowList drives = random_rows(4, 20, 1, 14), moved = drives;
  for (auto& row : moved)
    for (double& d : row) d += 64;
  for (const Setting& s : all_settings()) {
    const auto flow = flow_of<double>(s.mode, s.eta, s.steps);
    const RowList dweights = random_rows(4, 20, 1, 15);
    const auto a = run(flow, drives, dweights), b = run(flow, moved, dweights);
    CHECK(distance(a.weights, b.weights) <= 1e-12);
    CHECK(distance(a.dscores, b.dscores) <= 1e-12);
    if (s.mode == FlowMode::steps || s.mode == FlowMode::equilibrium)
      CHECK(b.lse[2] == Approx(a.lse[2] + 64 * s.eta).epsilon(1e-12));
  }
}

TEST_CASE("eta = 1 is softmax, whatever the number of steps") {
  const RowList drives = random_rows(3, 12, 2, 16);
  for (const auto mode : {FlowMode::steps, FlowMode::equilibrium})
    for (const int n : {1, 2, 6}) {
      const auto got = run(flow_of<double>(mode, 1, n), drives);
      for (std::size_t i = 0; i < 3; ++i) {
        const Row plain = long_hand_softmax(drives[i]);
        CHECK(distance({got.weights[i]}, {plain}) <= 4e-16);
        if (n > 1) CHECK(got.residual[i] == 0);
      }
    }
}

TEST_CASE("the equilibrium is exact for every eta, length and size of the drive") {
  // Compares with the plain loop in long double, run until e^-50 of the change is left.
  const auto exact = [](const Row& row, double eta) {
    std::vector<long double> a(row.size(), 0), p(row.size());
    const double contraction = std::abs(1 - eta) / 2;
    const int count = contraction > 0 ? 2 + int(-50 / std::log(contraction)) : 2;
    for (int t = 0; t < count; ++t) {
      long double top = -INFINITY, sum = 0;
      for (std::size_t j = 0; j < row.size(); ++j)
        top = std::max(top, p[j] = (1 - static_cast<long double>(eta)) * a[j] + eta * row[j]);
      for (auto& x : p) sum += x = std::exp(x - top);
      for (std::size_t j = 0; j < row.size(); ++j) a[j] = p[j] / sum;
    }
    return Row(a.begin(), a.end());
  };
  double worst = 0, worst_residual = 0;
  for (const double eta : {1e-6, 0.01, 0.1, 0.5, 0.9, 1.0, 1.3, 2.0, 2.9, 2.99})
    for (const Index keys : {1, 2, 3, 17, 1000, 100000}) {
      if (keys > 1000 && (eta > 1 || eta < 0.5)) continue;  // time
      for (const double size : {1e-3, 1.0, 5.0, 100.0, 1e4}) {
        if (keys == 1000 && eta > 2 && size != 5.0) continue;
        RowList drives = random_rows(keys > 1000 ? 1 : 3, keys, size, unsigned(keys));
        if (keys > 1) drives[0][0] = drives[0][1] = drives[0][0] + 3 * size;  // a tie at the top
        const auto got = run(flow_of<double>(FlowMode::equilibrium, eta), drives);
        for (std::size_t i = 0; i < drives.size(); ++i) {
          INFO("eta " << eta << " keys " << keys << " size " << size);
          const double error = distance({got.weights[i]}, {exact(drives[i], eta)});
          CHECK(error <= 2e-15);
          CHECK(got.residual[i] <= 2e-15);
          worst = std::max(worst, error);
          worst_residual = std::max(worst_residual, got.residual[i]);
        }
      }
    }
  std::printf("equilibrium: largest error %.2g, largest residual %.2g\n", worst, worst_residual);
}

// ---- the equilibrium where 1 - kappa a rounds to 0 ----------------------------------------------

namespace {

using Long = long double;

// Weights and gradients of one row at equilibrium, in long double by contractions: a <- softmax(kappa a + z)
// and h <- J (X + kappa h), J y_j = a_j sum_k a_k (y_j - y_k), both with at most half of the error left a round.
struct LongEquilibrium {
  std::vector<Long> a, h;  // dL/dD = eta h
  Long deta = 0;

  LongEquilibrium(const Row& drives, const Row& x, Long eta)
      : a(drives.size(), 0), h(drives.size(), 0) {
    const Long kappa = 1 - eta;
    const std::size_t n = drives.size();
    const auto top = std::size_t(std::max_element(drives.begin(), drives.end()) - drives.begin());
    for (int round = 0; round < 200; ++round) {
      std::vector<Long> p(n);
      Long sum = 0;
      for (std::size_t j = 0; j < n; ++j)
        sum += p[j] =
            std::exp(kappa * (a[j] - a[top]) + eta * (Long(drives[j]) - Long(drives[top])));
      for (std::size_t j = 0; j < n; ++j) a[j] = p[j] / sum;
    }
    for (int round = 0; round < 200; ++round) {
      std::vector<Long> next(n, 0);
      for (std::size_t j = 0; j < n; ++j)
        for (std::size_t k = 0; k < n; ++k)
          next[j] += a[j] * a[k] * (Long(x[j]) - Long(x[k]) + kappa * (h[j] - h[k]));
      h = next;
    }
    for (std::size_t j = 0; j < n; ++j)
      deta += ((Long(drives[j]) - Long(drives[top])) - (a[j] - a[top])) * h[j];
  }
};

// RowList of `keys` drives whose largest leads by `lead` in units of 1/eta, the others close together. A weight's
// relative error grows with its exponent.
template <class T>
void check_long_equilibrium(double eta, Index keys, double lead, double tolerance) {
  INFO("eta " << eta << ", " << keys << " keys, lead " << lead);
  const double rate = double(T(eta));
  RowList drives = random_rows(3, keys, 1 / rate, unsigned(keys)), x = random_rows(3, keys, 1, 7);
  for (auto& row : drives) {
    row[std::size_t(keys / 2)] = *std::max_element(row.begin(), row.end()) + lead / rate;
    for (double& d : row) d = double(T(d));
  }
  for (auto& row : x)
    for (double& g : row) g = double(T(g));
  const auto flow = flow_of<T>(FlowMode::equilibrium, eta);
  const auto got = run(flow, drives, x);
  Long deta = 0, deta_size = 0;
  for (std::size_t i = 0; i < drives.size(); ++i) {
    const LongEquilibrium exact(drives[i], x[i], rate);
    Long size = 0, sum = 0;
    for (const Long h : exact.h) size = std::max(size, std::abs(h));
    for (std::size_t j = 0; j < drives[i].size(); ++j) {
      const double h = got.dscores[i][j] / rate;
      CHECK(std::abs(got.weights_again[i][j] - double(exact.a[j])) <= tolerance);
      CHECK(std::abs(h - double(exact.h[j])) <= 8 * (1 + lead) * tolerance * double(size));
      sum += h;
    }
    CHECK(std::abs(double(sum)) <= 8 * (1 + lead) * tolerance * double(size));
    deta += exact.deta;
    for (std::size_t j = 0; j < drives[i].size(); ++j)
      deta_size += std::abs(exact.h[j]) * (1 + (1 + lead) / rate);
  }
  CHECK(std::abs(got.deta - double(deta)) <= 8 * (1 + lead) * tolerance * double(deta_size));
}

}  // namespace

TEST_CASE(
    "the equilibrium of a row that sees one key has gradient 0 for every eta, however small") {
  for (const double eta : {1e-44, 1e-38, 1e-20, 1e-9, 1e-7, 1e-3, 0.5, 2.9}) {
    INFO("eta " << eta);
    const auto check = [](const auto& got) {
      CHECK(distance(got.weights_again, {{1}, {1}}) <= 1e-7);
      CHECK(got.dscores == RowList{{0}, {0}});
      CHECK(got.deta == 0);
    };
    check(run(flow_of<float>(FlowMode::equilibrium, eta), {{0.7}, {-3}}, {{1.3}, {-0.1}}));
    check(run(flow_of<double>(FlowMode::equilibrium, eta), {{0.7}, {-3}}, {{1.3}, {-0.1}}));
    // The same row with hidden keys beside it.
    const auto beside =
        run(flow_of<float>(FlowMode::equilibrium, eta), {{-kInf, 0.7, -kInf}}, {{kNan, 1.3, kNan}});
    CHECK(distance(beside.weights_again, {{0, 1, 0}}) <= 1e-7);
    CHECK(beside.dscores == RowList{{0, 0, 0}});
    CHECK(beside.deta == 0);
  }
}

TEST_CASE(
    "the equilibrium's gradients equal those of long double from flat to one-hot rows, for every "
    "eta") {
  for (const Index keys : {2, 3, 17})
    for (const double lead : {0.0, 0.01, 1.0, 3.0, 10.0, 16.0, 30.0, 60.0}) {
      for (const double eta : {1e-30, 1e-9, 1e-7, 1e-4, 0.5, 1.0, 2.5})
        if (eta * std::exp(-lead) > 1e-34)  // or else eta h vanishes
          check_long_equilibrium<float>(eta, keys, lead, 1e-6);
      for (const double eta : {1e-200, 1e-20, 1e-16, 1e-9, 0.5, 1.0, 2.5})
        check_long_equilibrium<double>(eta, keys, lead, 2e-15);
    }
}

TEST_CASE("many steps of the flow tend to its equilibrium, and their gradients too") {
  const RowList drives = random_rows(4, 6, 1.5, 21), dweights = random_rows(4, 6, 1, 22);
  for (const double eta : {0.2, 0.5, 1.6, 2.2})
    for (const auto& [n_steps, rest] :
         {std::pair{FlowMode::steps, FlowMode::equilibrium},
          std::pair{FlowMode::lagrange, FlowMode::lagrange_equilibrium}}) {
      if (rest == FlowMode::lagrange_equilibrium && eta > 2) continue;
      const auto many = run(flow_of<double>(n_steps, eta, 200), drives, dweights);
      const auto limit = run(flow_of<double>(rest, eta), drives, dweights);
      CHECK(distance(many.weights, limit.weights) <= 1e-13);
      CHECK(distance(many.dscores, limit.dscores) <= 1e-13);
      CHECK(std::abs(many.deta - limit.deta) <= 1e-12);
    }
}

TEST_CASE("a tolerance ends the search for the equilibrium early and is kept") {
  const RowList drives = {{0, 0.3, -1, 0.1}, {5, 0, 0, 0}};
  auto flow = flow_of<double>(FlowMode::equilibrium, 0.3);
  const auto exact = run(flow, drives);
  flow.tolerance = 1e-4;
  const auto rough = run(flow, drives);
  CHECK(distance(rough.weights, exact.weights) <= 1e-4);
  CHECK(distance(rough.weights, exact.weights) > 1e-13);
  CHECK(rough.residual[0] > exact.residual[0]);
}

TEST_CASE("the score is the drive without its row constant, by hand") {
  // q = (1, 2), k = (3, -1): q.k = 1, |k|^2 = 10, |q-k|^2 = 13, |q|^2 = 5. Scale 1/2, rho 1/4:
  // S = 0.5 - 13/4 = -2.75, D = 0.5 + (2 - 10)/4 = -1.5 = S + 5/4.
  ResonantScore<double> score;
  score.rho = 0.25;
  PairOf<ResonantScore<double>, double> pair;
  pair.dot = 1;
  pair.logit = 0.5;
  pair.key[0] = 10;
  CHECK(score.score(pair, std::array{0.25}) == -1.5);
  CHECK(scalar_of<double>(score, 0, 3) == 0.25);
}

TEST_CASE("the derivatives of the score are exact") {
  using D = Dual<double, 4>;
  const ResonantScore<double> score;
  PairOf<ResonantScore<double>, D> pair;
  pair.dot = D::variable(0.7, 0);
  pair.logit = D::variable(-0.4, 1);
  pair.key[0] = D::variable(1.9, 2);
  const D value = score.score(pair, std::array{D::variable(0.3, 3)});

  PairOf<ResonantScore<double>, double> at, d;
  at.dot = 0.7, at.logit = -0.4, at.key[0] = 1.9;
  ScalarsOf<ResonantScore<double>, double> dp = {10};
  score.score_vjp(at, std::array{0.3}, 2.0, d, dp);
  CHECK(d.dot == Approx(2 * value.grad[0]).epsilon(1e-15));
  CHECK(d.logit == Approx(2 * value.grad[1]).epsilon(1e-15));
  CHECK(d.key[0] == Approx(2 * value.grad[2]).epsilon(1e-15));
  CHECK(dp[0] == Approx(10 + 2 * value.grad[3]).epsilon(1e-15));

  auto grad = score;
  grad.rho = {1.0, 2.0};
  const double drho = 0.5;
  chain_scalars(grad, 1, &drho);
  CHECK(grad.rho[0] == 1.0);
  CHECK(grad.rho[1] == 2.5);
}

TEST_CASE("the key feature is the squared norm, with gradient twice the key") {
  const Index lanes = kLanes<float>, dim = 5;
  std::vector<float> x(static_cast<std::size_t>(lanes * dim)), dx(x.size(), 1.0F);
  for (std::size_t n = 0; n < x.size(); ++n) x[n] = float(n % 11) - 5;
  const LaneRow<float> row{{x.data(), dim, lanes}, {}, {}, 0};
  const LaneRowGrad<float> grad{{dx.data(), dim, lanes}, {}, {}, 0};
  Pack<float> feature, slope = 3.0F;
  const ResonantScore<float> score;
  score.key_features_of(row, &feature);
  score.key_features_vjp(row, &feature, &slope, grad);
  for (Index i = 0; i < lanes; ++i) {
    float norm = 0;
    for (Index c = 0; c < dim; ++c) {
      const std::size_t n = std::size_t(c * lanes + i);
      norm += x[n] * x[n];
      CHECK(dx[n] == 1 + 3 * 2 * x[n]);
    }
    CHECK(feature.lane(int(i)) == norm);
  }
}

TEST_CASE("the contraction is half of |1 - eta|, the largest of all heads") {
  ResonantFlow<float> flow;
  CHECK(flow.contraction() == 0.25);
  flow.eta = {0.5F, 2.5F, 1.0F};
  CHECK(flow.contraction() == 0.75);
}

TEST_CASE("each head reads its own eta and adds to its own gradient") {
  const RowList drives = random_rows(2, 5, 1, 31), dweights = random_rows(2, 5, 1, 32);
  auto flow = flow_of<double>(FlowMode::steps, 0.3, 3);
  const auto alone = run(flow, drives, dweights);
  flow.eta = {0.9, 0.3};
  const auto second = run(flow, drives, dweights, 1);
  CHECK(same_bits(alone.weights[1], second.weights[1]));
  CHECK(alone.deta == second.deta);
}

TEST_CASE("nonsense is refused in one sentence") {
  Geometry g;
  g.heads = g.query_heads = g.kv_heads = 2;
  const auto refuses = [&g](auto change, const std::string& part) {
    ResonantOde<double> op;
    op.validate(g, "here");
    change(op);
    try {
      op.validate(g, "here");
      FAIL("accepted: " << part);
    } catch (const std::invalid_argument& error) {
      const std::string text = error.what();
      CHECK(text.rfind("here: ", 0) == 0);
      CHECK_THAT(text, Catch::Matchers::Contains(part));
    }
  };
  using Op = ResonantOde<double>;
  refuses([](Op& op) { op.score.rho = kNan; }, "rho is nan");
  refuses([](Op& op) { op.score.rho = {0.1, 0.2, 0.3}; }, "rho has 3 values");
  refuses([](Op& op) { op.normaliser.eta = kInf; }, "eta is inf");
  refuses([](Op& op) { op.normaliser.eta = {0.1, kNan}; }, "eta is nan");
  refuses([](Op& op) { op.normaliser.eta = {0.1, 0.2, 0.3}; }, "eta has 3 values");
  refuses([](Op& op) { op.normaliser.eta = Param<double>(); }, "eta has 0 values");
  refuses([](Op& op) { op.normaliser.steps = 0; }, "steps is 0");
  refuses([](Op& op) { op.normaliser.tolerance = -1; }, "tolerance is -1");
  refuses([](Op& op) { op.normaliser.tolerance = kNan; }, "tolerance is nan");
  refuses([](Op& op) { op.normaliser.mode = FlowMode(9); }, "mode is 9");
  for (const double eta : {0.0, 3.0, -0.5})
    refuses(
        [eta](Op& op) {
          op.normaliser.mode = FlowMode::equilibrium;
          op.normaliser.eta = eta;
        },
        "eta is ");
  refuses(
      [](Op& op) {
        op.normaliser.mode = FlowMode::lagrange_equilibrium;
        op.normaliser.eta = 2.0;
      },
      "eta is 2");
}

TEST_CASE("options and parameters survive a change of scalar") {
  ResonantOde<float> op;
  op.score.rho = 0.75F;
  op.normaliser.eta = {0.25F, 0.5F};
  op.normaliser.mode = FlowMode::equilibrium;
  op.normaliser.steps = 7;
  op.normaliser.tolerance = 1e-3;
  const auto wide = cast_op<double>(op);
  CHECK(wide.score.rho[0] == 0.75);
  CHECK(wide.normaliser.eta[1] == 0.5);
  CHECK(wide.normaliser.mode == FlowMode::equilibrium);
  CHECK(wide.normaliser.steps == 7);
  CHECK(wide.normaliser.tolerance == 1e-3);
}

// ---- the oracle's cases, by loops around the hooks ----------------------------------------------

namespace {

struct Golden {
  io::Safetensors file;
  explicit Golden(const std::filesystem::path& path) : file(io::Safetensors::read(path)) {}
  double number(const char* key) const { return std::stod(file.metadata().at(key)); }
  Index count(const char* key) const { return Index(number(key)); }
  std::vector<double> tensor(const char* name) const { return file.values<double>(name); }
};

bool visible(const Golden& g, const std::vector<double>& mask, const std::vector<double>& lengths,
             Index b, Index h, Index i, Index j) {
  const Index len_q = g.count("Tq"), len_kv = g.count("Tk"), right = g.count("right");
  if (right >= 0 && j > i + right) return false;
  if (!lengths.empty() && double(j) >= lengths[std::size_t(b)]) return false;
  if (mask.empty()) return true;
  const auto& shape = g.file.info("mask").shape;
  const Index mb = shape[0] == 1 ? 0 : b, mh = shape[1] == 1 ? 0 : h;
  return mask[std::size_t(((mb * shape[1] + mh) * len_q + i) * len_kv + j)] == 1;
}

double relative(const std::vector<double>& got, const std::vector<double>& want) {
  double worst = got.size() == want.size() ? 0 : kInf, largest = 0;
  for (std::size_t n = 0; n < std::min(got.size(), want.size()); ++n) {
    if (got[n] == want[n]) continue;
    worst = std::max(worst, std::isfinite(got[n]) ? std::abs(got[n] - want[n]) : kInf);
    largest = std::max(largest, std::abs(want[n]));
  }
  return worst / std::max(largest, 1e-3);
}

// Computes everything that the op gives for the case's inputs, and compares it with the case.
void replay(const Golden& g) {
  const Index batch = g.count("B"), heads = g.count("H"), kv_heads = g.count("Hkv"),
              len_q = g.count("Tq"), len_kv = g.count("Tk"), dim = g.count("d"),
              dim_v = g.count("dv");
  const auto q = g.tensor("q"), k = g.tensor("k"), v = g.tensor("v"), dout = g.tensor("dout");
  const auto mask = g.file.contains("mask") ? g.tensor("mask") : Row{};
  const auto lengths = g.file.contains("lengths") ? g.tensor("lengths") : Row{};
  const double scale = g.number("scale");
  ResonantOde<double> op;
  op.score.rho = Param<double>(g.file.info("rho").shape, g.tensor("rho"));
  op.normaliser.eta = Param<double>(g.file.info("eta").shape, g.tensor("eta"));
  if (g.file.metadata().at("variant") == "ode_equilibrium")
    op.normaliser.mode = FlowMode::equilibrium;
  else
    op.normaliser.steps = int(g.number("n_steps"));
  auto grad = zeros_like(op);
  Row out(dout.size()), lse, alpha, drive, dq(q.size()), dk(k.size()), dv(v.size());

  for (Index b = 0; b < batch; ++b)
    for (Index h = 0; h < heads; ++h) {
      const Index kv = b * kv_heads + h / (heads / kv_heads);
      const double rho = scalar_of<double>(op.score, 0, h), eta = op.normaliser.eta.head(h);
      const auto query = [&](Index i) { return std::size_t(((b * heads + h) * len_q + i) * dim); };
      const auto key = [&](Index j) { return std::size_t((kv * len_kv + j) * dim); };
      const auto value = [&](Index j) { return std::size_t((kv * len_kv + j) * dim_v); };
      const auto mixed = [&](Index i) {
        return std::size_t(((b * heads + h) * len_q + i) * dim_v);
      };
      const auto pair_of = [&](Index i, Index j) {
        PairOf<ResonantScore<double>, double> pair;
        for (std::size_t c = 0; c < std::size_t(dim); ++c) {
          pair.dot += q[query(i) + c] * k[key(j) + c];
          pair.key[0] += k[key(j) + c] * k[key(j) + c];
        }
        pair.logit = scale * pair.dot;
        return pair;
      };
      RowList scores(std::size_t(len_q), Row(std::size_t(len_kv), -kInf)), dweights = scores;
      Row own_norm(scores.size());
      for (Index i = 0; i < len_q; ++i) {
        for (std::size_t c = 0; c < std::size_t(dim); ++c)
          own_norm[std::size_t(i)] += q[query(i) + c] * q[query(i) + c];
        for (Index j = 0; j < len_kv; ++j) {
          const double d = op.score.score(pair_of(i, j), std::array{rho});
          drive.push_back(d - rho * own_norm[std::size_t(i)]);
          double x = 0;
          for (std::size_t c = 0; c < std::size_t(dim_v); ++c)
            x += dout[mixed(i) + c] * v[value(j) + c];
          const bool seen = visible(g, mask, lengths, b, h, i, j);
          if (seen) scores[std::size_t(i)][std::size_t(j)] = d;
          dweights[std::size_t(i)][std::size_t(j)] = seen ? x : kNan;
        }
      }
      const auto got = run(op.normaliser, scores, dweights, h);
      grad.normaliser.eta.head(h) += got.deta;
      for (Index i = 0; i < len_q; ++i) {
        const double start = op.normaliser.mode == FlowMode::steps && op.normaliser.steps == 1
                                 ? (1 - eta) / double(len_kv)
                                 : 0;  // the uniform start, which our lse leaves out
        lse.push_back(got.lse[std::size_t(i)] - eta * rho * own_norm[std::size_t(i)] + start);
        for (Index j = 0; j < len_kv; ++j) {
          const double a = got.weights[std::size_t(i)][std::size_t(j)];
          const double g_score = got.dscores[std::size_t(i)][std::size_t(j)];
          alpha.push_back(a);
          for (std::size_t c = 0; c < std::size_t(dim_v); ++c) {
            out[mixed(i) + c] += a * v[value(j) + c];
            dv[value(j) + c] += a * dout[mixed(i) + c];
          }
          PairOf<ResonantScore<double>, double> d;
          ScalarsOf<ResonantScore<double>, double> dp = {0};
          op.score.score_vjp(pair_of(i, j), std::array{rho}, g_score, d, dp);
          chain_scalars(grad.score, h, dp.data());
          const double ddot = d.dot + scale * d.logit;
          for (std::size_t c = 0; c < std::size_t(dim); ++c) {
            dq[query(i) + c] += ddot * k[key(j) + c];
            dk[key(j) + c] += ddot * q[query(i) + c] + 2 * d.key[0] * k[key(j) + c];
          }
        }
      }
    }
  const auto check = [&g](const char* name, const Row& got) {
    if (!g.file.contains(name)) return;
    INFO(name);
    CHECK(relative(got, g.tensor(name)) <= 1e-12);
  };
  check("out", out);
  check("drive", drive);
  check("alpha", alpha);
  check("lse", lse);
  check("dq", dq);
  check("dk", dk);
  check("dv", dv);
  check("drho", Row(grad.score.rho.data(), grad.score.rho.data() + grad.score.rho.size()));
  check("deta",
        Row(grad.normaliser.eta.data(), grad.normaliser.eta.data() + grad.normaliser.eta.size()));
}

}  // namespace

TEST_CASE("every resonant case of the oracle is met to 1e-12, forward and backward") {
  int cases = 0;
  for (const auto& entry : std::filesystem::directory_iterator(HEED_GOLDEN_DIR)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind("ode_", 0) != 0) continue;
    INFO(name);
    replay(Golden(entry.path()));
    ++cases;
  }
  CHECK(cases >= 22);
}
