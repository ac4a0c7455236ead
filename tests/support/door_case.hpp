// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs an op by public calls on a problem of the reference, and compares both.

#include "catch.hpp"
#include "golden_case.hpp"

#include <heed/check/op_call.hpp>
#include <heed/compiled.hpp>
#include <heed/reference/reference.hpp>

#include <optional>
#include <random>
#include <string>
#include <vector>

namespace heed_test {

// The call after both passes.
template <class Op, class T = typename Op::Scalar>
heed::OpCall<Op> run_doors(const Op& op, const heed::reference::Problem<T>& problem,
                           const heed::Mask<T>& mask, const std::vector<T>& grad_out,
                           const heed::Options& given = {}) {
  heed::Options options = given;
  options.scale = problem.scale;
  heed::OpCall<Op> call(op, problem.geometry, mask, options,
                        {problem.query, problem.key, problem.value, problem.extra, grad_out});
  call.forward();
  call.backward();
  return call;
}

// Numbers of a parameter.
template <class T>
std::vector<T> numbers(const heed::Param<T>& p) {
  return {p.data(), p.data() + p.size()};
}

// Normal numbers in every input.
template <class T>
heed::reference::Problem<T> random_problem(const heed::Geometry& g, Index extra_dim,
                                           unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto make = [&](const heed::Shape& shape) {
    std::vector<T> x(std::size_t(heed::element_count(shape, "random_problem")));
    for (T& number : x) number = T(normal(random));
    return x;
  };
  heed::reference::Problem<T> problem;
  problem.geometry = g;
  problem.query = make(g.query_shape());
  problem.key = make(g.key_shape());
  problem.value = make(g.value_shape());
  problem.extra = make(g.extra_shape(extra_dim));
  return problem;
}

// Largest deviation of the calls' results from the reference's and its tape's, over out, all inputs
// and all parameters; `worst` names its place.
template <class Op, class T = typename Op::Scalar>
double twin_deviation(const Op& op, heed::reference::Problem<T> problem, const heed::Mask<T>& mask,
                      std::string& worst, const heed::Options& options = {}) {
  heed::reference::use_mask(problem, mask);
  std::vector<T> grad_out;
  for (Index n = 0; n < problem.geometry.query_rows() * problem.geometry.dim_v; ++n)
    grad_out.push_back(T(std::sin(1.7 * double(n) + 0.3)));
  const auto fast = run_doors(op, problem, mask, grad_out, options);
  const auto twin = heed::reference::forward(op, problem);
  auto slow = heed::reference::gradients(op, problem, grad_out);
  double largest = 0;
  const auto compare = [&](const std::string& name, const auto& got, const auto& want) {
    const double d = deviation(got, want, 1e-3);
    if (!(d <= largest)) largest = d, worst = name;
  };
  compare("out", fast.out, twin.out);
  compare("query", fast.grad_query, slow.dquery);
  compare("key", fast.grad_key, slow.dkey);
  compare("value", fast.grad_value, slow.dvalue);
  compare("extra", fast.grad_extra, slow.dextra);
  std::vector<std::vector<T>> parameters;
  slow.op.visit([&](const char*, auto& p) { parameters.push_back(numbers(p)); });
  std::size_t next = 0;
  Op grad_op = fast.grad_op;
  grad_op.visit([&](const char* name, auto& p) { compare(name, numbers(p), parameters[next++]); });
  return largest;
}

// Compares public calls with the reference on normal numbers, with one thread and the plan's tiles,
// and with several threads and tiles of one key.
template <class Op, class T = typename Op::Scalar>
void check_twin(const Op& op, const heed::Geometry& g, const heed::Mask<T>& mask, unsigned seed) {
  for (const heed::Options& options :
       {heed::Options{}, heed::Options{.threads = 3, .key_tile = 1, .panel_vectors = 1}}) {
    std::string worst;
    const double deviation =
        twin_deviation(op, random_problem<T>(g, op.extra_dim(g), seed), mask, worst, options);
    INFO("len_q " << g.len_q << ", kv_heads " << g.kv_heads << ", key_tile " << options.key_tile
                  << ", worst: " << worst);
    CHECK(deviation < 1e-11);
  }
}

// Runs a readout's hooks on a panel by hand: their results in `valid` lanes and in the parameters,
// when the padding lanes hold numbers of size `padding`.
template <class Readout, class T>
std::vector<T> run_hooks(const Readout& readout, const heed::Geometry& g, Index extra_dim,
                         Index valid, double padding) {
  const int vectors = 2;
  const Index lanes = vectors * heed::kLanes<T>;
  std::vector<std::vector<T>> memory;
  std::mt19937 random(17);
  std::normal_distribution<double> normal;
  const auto tile = [&](Index rows) {
    memory.emplace_back(std::size_t(rows * lanes));
    for (Index n = 0; n < rows * lanes; ++n)
      memory.back()[std::size_t(n)] = T(normal(random) * (n % lanes < valid ? 1.0 : padding));
    return heed::LaneTile<T>{memory.back().data(), rows, lanes};
  };
  heed::ReadoutPanel<T> p;
  p.geometry = g;
  p.head = g.heads - 1;
  p.valid_lanes = valid;
  p.vectors = vectors;
  p.query = tile(g.dim_qk).constant();
  p.own_key = tile(g.dim_qk).constant();
  p.own_value = tile(g.dim_v).constant();
  p.extra = tile(extra_dim).constant();
  p.work = tile(readout.work_rows(g, true));
  p.diagnostics = tile(Readout::diagnostics);
  const heed::LaneTile<T> mixed = tile(g.dim_v), dout = tile(g.dim_v);
  std::vector<T> saved = memory[memory.size() - 2];
  p.tile = mixed;
  readout.forward(p);
  if (!Readout::saves_mixed) saved.assign(mixed.data, mixed.data + g.dim_v * lanes);
  p.saved = {saved.data(), g.dim_v, lanes};
  const heed::LaneTile<T> sums[] = {tile(1), tile(g.dim_qk), tile(g.dim_qk), tile(g.dim_v),
                                    tile(extra_dim)};
  p.delta = sums[0].data, p.dquery = sums[1], p.down_key = sums[2], p.down_value = sums[3];
  p.dextra = sums[4];
  p.tile = dout;
  Readout grad = readout;
  visit_parameters(grad, [](const char*, auto& param) { param.set_zero(); });
  readout.vjp(p, grad);

  std::vector<T> result;
  for (const auto& t : {mixed, dout, sums[0], sums[1], sums[2], sums[3], sums[4]})
    for (Index r = 0; r < t.rows; ++r) result.insert(result.end(), t.row(r), t.row(r) + valid);
  visit_parameters(grad, [&](const char*, const auto& param) {
    result.insert(result.end(), param.data(), param.data() + param.size());
  });
  return result;
}

}  // namespace heed_test
