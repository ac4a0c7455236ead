// SPDX-License-Identifier: Apache-2.0
#pragma once

// The calls on which check_op() and check_jvp() run an op, and their report. They are in double,
// whatever the op's scalar, have the sizes asked for under masks of every kind, and besides
//
//   one query   of heads that share keys in groups, behind the other tokens, as in decoding
//   rectangular fewer queries than keys, the queries being the last tokens
//   widths      dim_v other than dim_qk
//
// unless the sizes asked for already have this property, or the op refuses them (parameters of one width, say).

#include <heed/check/gradcheck.hpp>
#include <heed/check/op_call.hpp>
#include <heed/check/op_gradcheck.hpp>

#include <algorithm>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct OpReport {
  using Case = std::pair<std::string, GradientReport>;
  std::vector<Case> cases;                                    // comparisons and their results
  std::vector<std::pair<std::string, std::string>> left_out;  // sizes not run, and why

  [[nodiscard]] bool passed() const {
    for (const auto& [name, report] : cases)
      if (!report.passed) return false;
    return true;
  }
  // One line with the verdict, how much was compared, and the worst error with its case; then a
  // line for each case that failed, the worst first.
  [[nodiscard]] std::string summary() const;
  // A line per case and per sizes left out, and the verdict.
  [[nodiscard]] std::string text() const {
    std::ostringstream lines;
    for (const auto& [name, report] : cases) lines << name << ": " << report.text() << "\n";
    for (const auto& [name, why] : left_out) lines << name << ": left out, " << why << "\n";
    lines << (passed() ? "passed\n" : "FAILED\n");
    return lines.str();
  }
};

inline std::string OpReport::summary() const {
  std::vector<const Case*> sorted;  // the worst first
  Index checked = 0, failed = 0, wrong = 0;
  for (const Case& one : cases) {
    sorted.push_back(&one);
    checked += one.second.checked;
    wrong += one.second.failed;
    if (!one.second.passed) ++failed;
  }
  std::sort(sorted.begin(), sorted.end(), [](const Case* a, const Case* b) {
    const double of_a = a->second.worst_error, of_b = b->second.worst_error;
    return of_a != of_b ? of_a > of_b : a < b;
  });
  std::ostringstream lines;
  lines.precision(2);
  if (failed > 0) {
    lines << "FAILED: " << failed << " of " << cases.size() << " checks, " << wrong << " of "
          << checked << " numbers";
  } else {
    const double worst = sorted.empty() ? 0 : sorted[0]->second.worst_error;
    lines << "passed: " << cases.size() << " checks, " << checked << " numbers, worst error "
          << worst;
    if (worst > 0) {
      const auto& [name, report] = *sorted[0];
      lines << " (" << name.substr(0, name.find(',')) << ": " << report.worst.tensor << "["
            << report.worst.index << "])";
    }
  }
  if (!left_out.empty()) lines << "; " << left_out.size() << " left out, text() says why";
  lines.precision(10);
  for (const Case* one : sorted) {
    const auto& [name, report] = *one;
    if (report.passed) continue;
    lines << "\n  " << name << ": " << report.failed << " of " << report.checked
          << " differ, worst ";
    detail::describe(lines, report.worst);
  }
  return lines.str();
}

namespace detail {

// Two sequences, two key heads shared by four query heads, lengths for several masks.
inline constexpr Geometry kCheckGeometry{2, 4, 4, 2, 11, 11, 6, 6};

struct CheckMask {
  std::string name;
  Mask<double> mask;
};

// Fills `bias` with numbers for `shape`, every ninth of them -infinity.
[[nodiscard]] inline Mask<double> check_bias(const Shape& shape, std::vector<double>& bias) {
  const CounterRandom random(99, 1);
  bias.resize(std::size_t(element_count(shape, "check_op")));
  for (std::size_t i = 0; i < bias.size(); ++i)
    bias[i] = i % 9 == 4 ? -std::numeric_limits<double>::infinity() : random.normal(i);
  return heed::bias<double>(TensorView<const double>(bias.data(), shape));
}

// Masks of every kind for the sizes asked for; `bias` holds the numbers of their biases.
[[nodiscard]] inline std::vector<CheckMask> check_masks(const Geometry& g,
                                                        std::vector<double>& bias) {
  std::vector<Index> lengths;
  for (Index b = 0; b < g.batch; ++b) lengths.push_back(std::max<Index>(1, g.len_kv - 3 * b - 1));
  return {{"no mask", {}},
          {"causal", causal<double>()},
          {"window & key lengths", window<double>(3, 2) & key_lengths<double>(lengths)},
          {"soft cap & bias",
           soft_cap<double>(2.0) & check_bias({1, g.heads, g.len_q, g.len_kv}, bias)}};
}
// Fewer masks for the additional sizes; their bias is shared by heads and queries.
[[nodiscard]] inline std::vector<CheckMask> few_masks(const Geometry& g,
                                                      std::vector<double>& bias) {
  return {{"no mask", {}},
          {"causal & bias",
           causal<double>(Align::bottom_right) & check_bias({g.batch, 1, 1, g.len_kv}, bias)}};
}

struct CheckSizes {
  std::string name;
  Geometry geometry;
};

// The additional sizes, without those whose property the sizes asked for already have.
[[nodiscard]] inline std::vector<CheckSizes> sizes_beside(const Geometry& g) {
  std::vector<CheckSizes> all;
  const auto add = [&](const char* name, const Geometry& sizes) {
    std::ostringstream text;
    text << name << " (heads " << sizes.heads << ", kv_heads " << sizes.kv_heads << ", len_q "
         << sizes.len_q << ", len_kv " << sizes.len_kv << ", dim_qk " << sizes.dim_qk << ", dim_v "
         << sizes.dim_v << ")";
    all.push_back({text.str(), sizes});
  };
  if (g.len_q != 1 || g.group() < 2) {
    Geometry one = g;
    one.len_q = 1;
    one.first_query = std::max<Index>(0, one.len_kv - 1);
    if (g.heads == 1) {
      one.heads = 4;
      one.query_heads = 4 * g.query_heads;
    }
    if (g.group() < 2) one.kv_heads = one.heads % 2 == 0 ? one.heads / 2 : 1;
    add("one query of grouped heads", one);
  }
  if (g.len_q == g.len_kv) {
    Geometry rectangular = g;
    rectangular.len_kv = g.len_q + 5;
    rectangular.first_query = 5;
    add("rectangular", rectangular);
  }
  if (g.dim_v == g.dim_qk) {
    Geometry widths = g;
    widths.dim_v = g.dim_qk + 3;
    add("values of another width", widths);
  }
  return all;
}

// The reason, in the op's own words, why an op cannot run at these sizes; empty if it can.
template <class Op>
[[nodiscard]] std::string refusal(const Op& op, const Geometry& g) {
  if constexpr (Op::ReadoutType::uses_own_rows)
    if (g.query_position(g.len_q) > g.len_kv)
      return "the readout reads key and value of the query's own token";
  try {
    op.validate(g, "the op");
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

// Calls body(call, name) for a call under every kind of mask, at the sizes asked for and the
// additional ones. Sizes that the op refuses are noted in the report as left out.
template <class Op, class Body>
void for_check_calls(const Op& op, const Geometry& g, OpReport& report, Body&& body) {
  using Columns = InputColumns<Op>;
  std::vector<double> bias;
  for (const auto& [name, mask] : check_masks(g, bias)) {
    OpCall<Op> call(op, g, mask);
    body(call, name);
  }
  if constexpr (Columns::any) {  // one head for all
    auto numbers = normal_numbers(op, g);
    const auto keep_one = [&](std::vector<double>& inputs, Index len, Index count) {
      inputs.resize(std::size_t(g.batch * len * count));
    };
    keep_one(numbers.query_inputs, g.len_q, Columns::query);
    keep_one(numbers.key_inputs, g.len_kv, Columns::key);
    OpCall<Op> call(op, g, causal<double>(), {}, std::move(numbers));
    body(call, "numbers of tokens that all heads share");
  }
  for (const auto& [sizes, beside] : sizes_beside(g)) {
    const std::string why = refusal(op, beside);
    if (!why.empty()) report.left_out.emplace_back(sizes, why);
    for (const auto& [name, mask] :
         why.empty() ? few_masks(beside, bias) : std::vector<CheckMask>{}) {
      OpCall<Op> call(op, beside, mask);
      body(call, sizes + ", " + name);
    }
  }
}

// Throws if the geometry is empty.
inline void require_something(const Geometry& g, const char* where) {
  require(g.query_rows() > 0 && g.len_kv > 0, where, ": the geometry has batch ", g.batch,
          ", heads ", g.heads, ", len_q ", g.len_q, ", len_kv ", g.len_kv,
          "; all must be at least 1");
}

// Runs both passes of a call for a loss of out, of lse where the normaliser differentiates_lse, and of steps where the
// readout gives them.
template <class Op>
void run_check_call(OpCall<Op>& call) {
  call.grad_out = gradcheck_grad_out(call.geometry());
  if (Op::NormaliserType::differentiates_lse) {
    call.grad_lse = spread_numbers(element_count(call.lse_shape(), "check_op"));
    call.lse.assign(call.grad_lse.size(), 0);
  }
  if (call.op.readout.without_steps() == nullptr) {
    call.grad_steps = spread_numbers(element_count(call.steps_shape(), "check_op"));
    call.steps.assign(call.grad_steps.size(), 0);
  }
  call.forward();
  call.backward();
}

}  // namespace detail

}  // namespace HEED_ABI
}  // namespace heed
