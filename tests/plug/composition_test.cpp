// SPDX-License-Identifier: Apache-2.0

// Parts that no variant combines by itself, put together: the engine against the reference.

#include "catch.hpp"

#include <heed/compiled.hpp>
#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/resonant_ode.hpp>
#include <heed/reference/reference.hpp>

namespace {

using heed::Index;

std::vector<double> normals(Index count, std::uint64_t stream) {
  const heed::CounterRandom random(3, stream);
  std::vector<double> x;
  for (Index i = 0; i < count; ++i) x.push_back(random.normal(std::uint64_t(i)));
  return x;
}

double deviation(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double error = 0, top = 1e-3;
  for (std::size_t i = 0; i < a.size(); ++i) {
    top = std::max(top, std::abs(b[i]));
    const double e = std::abs(a[i] - b[i]);
    if (!(e <= error)) error = e;
  }
  return error / top;
}

// Compares forward and backward of `op` under a causal mask with grouped heads with the reference.
template <class Op>
void check(const Op& op) {
  const heed::Geometry g{2, 4, 4, 2, 21, 21, 6, 6};
  const heed::Shape q{2, 4, 21, 6}, kv{2, 2, 21, 6};
  heed::reference::Problem<double> problem;
  problem.geometry = g;
  problem.query = normals(2 * 4 * 21 * 6, 1);
  problem.key = normals(2 * 2 * 21 * 6, 2);
  problem.value = normals(2 * 2 * 21 * 6, 3);
  if (op.extra_dim(g) > 0) problem.extra = normals(2 * 4 * 21 * op.extra_dim(g), 4);
  const auto mask = heed::causal<double>();
  heed::reference::use_mask(problem, mask);
  const auto grad_out = normals(2 * 4 * 21 * 6, 5);

  heed::Inputs<double> in{
      {problem.query.data(), q}, {problem.key.data(), kv}, {problem.value.data(), kv}, {}};
  std::vector<double> out(problem.query.size()), dq(out.size()), dk(problem.key.size()),
      dv(problem.key.size()), dextra(problem.extra.size());
  heed::Gradients<double> grads{{dq.data(), q}, {dk.data(), kv}, {dv.data(), kv}, {}, {}};
  if (!problem.extra.empty()) {
    const heed::Shape extra{2, 4, 21, op.extra_dim(g)};
    in.extra = {problem.extra.data(), extra};
    grads.extra = {dextra.data(), extra};
  }
  heed::Options options;
  options.key_tile = 8;
  options.panel_vectors = 1;
  heed::Saved<double> saved;
  Op dop;
  heed::forward(op, in, mask, heed::TensorView<double>(out.data(), q), &saved, options);
  heed::backward(op, in, mask, saved, heed::TensorView<const double>(out.data(), q),
                 heed::TensorView<const double>(grad_out.data(), q), grads, &dop, options);

  CHECK(deviation(out, heed::reference::forward(op, problem).out) < 1e-12);
  auto slow = heed::reference::gradients(op, problem, grad_out);
  CHECK(deviation(dq, slow.dquery) < 1e-12);
  CHECK(deviation(dk, slow.dkey) < 1e-12);
  CHECK(deviation(dv, slow.dvalue) < 1e-12);
  CHECK(deviation(dextra, slow.dextra) < 1e-12);
  std::vector<double> fast_params, slow_params;
  heed::for_each_param(dop, [&](const char*, const auto& p) {
    fast_params.insert(fast_params.end(), p.data(), p.data() + p.size());
  });
  heed::for_each_param(slow.op, [&](const char*, const auto& p) {
    slow_params.insert(slow_params.end(), p.data(), p.data() + p.size());
  });
  CHECK(deviation(fast_params, slow_params) < 1e-12);
}

}  // namespace

TEST_CASE("A resonant score with an intent gate has the twin's outputs and gradients") {
  heed::Attention<double, heed::DarScore<double>, heed::Softmax<double>, heed::IntentGate<double>>
      op;
  op.score.strength = {0.5, -1.0, 1.5, 2.0};
  op.score.iterations = 2;
  check(op);
}

TEST_CASE("A difference of two resonant maps has the twin's outputs and gradients") {
  heed::Attention<double, heed::DarScore<double>,
                  heed::Difference<double, heed::GivenLambda<double>>, heed::Identity<double>>
      op;
  op.score.strength = 1.2;
  op.normaliser.lambda = {0.1, 0.4, 0.7, -0.3};
  check(op);
}

TEST_CASE("A difference of resonant maps under a head norm has the twin's outputs and gradients") {
  heed::Attention<double, heed::DarScore<double>,
                  heed::Difference<double, heed::GivenLambda<double>>, heed::HeadNorm<double>>
      op;
  op.score.gate = heed::GateKind::centred;
  op.readout.factor = 0.7;
  check(op);
}

TEST_CASE("A low-rank resonant score under a resonant flow has the twin's outputs and gradients") {
  heed::Attention<double, heed::DarScore<double>, heed::ResonantFlow<double>,
                  heed::Identity<double>>
      op;
  op.score.basis = heed::Param<double>({6, 2}, {1, 0, 0, 0.6, 0, 0, 0, 0.8, 0, 0, 0, 0});
  op.score.strength = -2.0;
  op.normaliser.mode = heed::FlowMode::equilibrium;
  check(op);
}

TEST_CASE("A resonant flow over an adaptive resonant score has the twin's outputs and gradients") {
  heed::Attention<double, heed::DarScore<double>, heed::ResonantFlow<double>,
                  heed::Identity<double>>
      op;
  op.score.adaptive = true;
  op.score.strength = 2.0;
  op.normaliser.steps = 3;
  check(op);
}
