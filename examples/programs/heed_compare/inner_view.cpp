// SPDX-License-Identifier: Apache-2.0
#include "inner_view.hpp"

#include "runner.hpp"
#include "tensor_pool.hpp"

#include <heed/compiled.hpp>
#include <heed/reference/reference.hpp>
#include <heed/variants.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

namespace compare {

namespace {

namespace reference = heed::reference;
using Problem = reference::Problem<double>;

// The call of one sequence, the text's first tokens, with the heads and widths of the comparison.
[[nodiscard]] Problem problem_of(const Settings& settings, const std::string& text, Index len) {
  const heed::Shape& s = settings.shape;
  const TextInput input(text, 1, len, settings.seed);
  const auto read = [&](Role role) { return input.project(std::uint64_t(role), s.heads, s.dim); };
  Problem problem;
  problem.geometry = baseline_geometry({1, s.heads, len, s.dim});
  problem.query = read(Role::query);
  problem.key = read(Role::key);
  problem.value = read(Role::value);
  if (settings.causal) problem.mask = heed::causal<double>();
  return problem;
}

// The first variant of the list with this type of op.
template <class Op>
[[nodiscard]] Op op_of_list(const Problem& problem, std::uint64_t seed) {
  std::optional<Op> found;
  heed::for_each_variant<double>(problem.geometry,
                                 [&]<class Other>(const heed::Variant<Other>& variant) {
                                   if constexpr (std::is_same_v<Other, Op>)
                                     if (!found) found = variant.op;
                                 },
                                 {.seed = seed});
  return found.value();
}

[[nodiscard]] reference::Request with_weights() {
  reference::Request request;
  request.weights = true;
  return request;
}

// The mean over rows of max_j |now - before|; hidden pairs are 0 in both.
[[nodiscard]] double mean_of_largest_changes(const std::vector<double>& before,
                                             const std::vector<double>& now, Index len) {
  double sum = 0;
  for (std::size_t row = 0; row < now.size(); row += std::size_t(len)) {
    double largest = 0;
    for (std::size_t j = row; j < row + std::size_t(len); ++j)
      largest = std::max(largest, std::abs(now[j] - before[j]));
    sum += largest;
  }
  return sum / double(now.size() / std::size_t(len));
}

}  // namespace

InnerViews inner_views(const std::vector<std::string>& variants) {
  InnerViews views;
  heed::for_each_variant<double>(
      heed::kSmallSizes, [&]<class Op>(const heed::Variant<Op>& variant) {
        if (std::find(variants.begin(), variants.end(), variant.name) == variants.end()) return;
        views.resonance |= std::is_same_v<Op, heed::Dar<double>>;
        views.convergence |= std::is_same_v<Op, heed::ResonantOde<double>>;
        views.tension |= std::is_same_v<Op, heed::Dialectical<double>>;
      });
  return views;
}

ResonanceMaps dar_maps(const Settings& settings, const std::string& text, Index len) {
  using Op = heed::Dar<double>;
  const Problem problem = problem_of(settings, text, len);
  const Op op = op_of_list<Op>(problem, settings.seed);
  ResonanceMaps maps;
  maps.len = len;
  maps.weights = reference::forward(op, problem, with_weights()).weights;
  maps.weights.resize(std::size_t(len * len));  // the first head
  const heed::BoundMask<double> mask(problem.mask, problem.geometry, "heed_compare");
  reference::MapScores scores(op, problem, mask, 0, 0, 0);
  for (Index i = 0; i < len; ++i) {
    scores.take_query(i);
    for (Index j = 0; j < len; ++j) {
      maps.resonance.push_back(op.score.measure(scores.pair(j), scores.scalars())[0]);
      maps.hidden.push_back(!mask.visible(0, 0, i, j));
    }
  }
  return maps;
}

std::vector<double> ode_residuals(const Settings& settings, const std::string& text, Index len,
                                  int most) {
  using Op = heed::ResonantOde<double>;
  const Problem problem = problem_of(settings, text, len);
  Op op = op_of_list<Op>(problem, settings.seed);
  std::vector<double> before, residuals;
  for (Index row = 0; row < settings.shape.heads * len; ++row)
    for (Index j = 0; j < len; ++j) {
      const Index seen = settings.causal ? row % len + 1 : len;
      before.push_back(j < seen ? 1 / double(seen) : 0);
    }
  for (int steps = 1; steps <= most; ++steps) {
    op.normaliser.steps = steps;
    std::vector<double> now = reference::forward(op, problem, with_weights()).weights;
    residuals.push_back(mean_of_largest_changes(before, now, len));
    before = std::move(now);
  }
  return residuals;
}

DialecticalRows dialectical_rows(const Settings& settings, const std::string& text, Index len) {
  using Op = heed::Dialectical<double>;
  const Problem problem = problem_of(settings, text, len);
  Op op = op_of_list<Op>(problem, settings.seed);
  op.readout.max_steps = DialecticalRows::max_steps;
  op.readout.halt_eps = DialecticalRows::halt_eps;
  const auto diagnostics = reference::forward(op, problem).diagnostics;
  const auto first_head = [&](std::size_t report) {
    return std::vector<double>(diagnostics[report].begin(), diagnostics[report].begin() + len);
  };
  return {first_head(1), first_head(2)};
}

}  // namespace compare
