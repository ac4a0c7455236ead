// SPDX-License-Identifier: Apache-2.0
#pragma once

// Does an op of your own see the future? One call:
//
//   const OpCausalityReport report = check_causality(op);
//   std::puts(report.text().c_str());
//   return report.causal() ? 0 : 1;
//
// Every tensor that the op reads (query, key, value, the extra input, query_inputs and key_inputs) is changed by itself:
// one token at a time gets other numbers in all heads, in all the ways of audit_causality() (check/causality.hpp). No
// output of an earlier token, or of another sequence, may change a bit: out, lse where the normaliser differentiates_lse,
// and the steps of rows where the readout gives them. The check runs in the op's own scalar, under a causal or the given mask.
//
// Errors  those of forward(), and std::invalid_argument unless query i stands at key i: len_q equals len_kv and first_query
//         is 0
// Cost    5 calls per tensor, sequence and token

#include <heed/check/causality.hpp>
#include <heed/check/op_cases.hpp>
#include <heed/plug/check.hpp>

#include <algorithm>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct OpCausalityReport {
  std::vector<std::pair<std::string, CausalityReport>> tensors;  // by name, in the order of Inputs

  [[nodiscard]] bool causal() const {
    return std::all_of(tensors.begin(), tensors.end(),
                       [](const auto& tensor) { return tensor.second.causal; });
  }
  // A line per tensor.
  [[nodiscard]] std::string text() const {
    std::ostringstream lines;
    for (const auto& [name, report] : tensors) lines << name << ": " << report.text() << "\n";
    return lines.str();
  }
};

namespace detail {

// Calls f(n, m) for every number of (batch, heads, len, width): n is its place there, m its place
// in (batch, len, heads, width).
template <class F>
void for_each_by_token(const Shape& shape, F&& f) {
  Index n = 0;
  for_each_row(shape, [&](Index b, Index h, Index t) {
    for (Index c = 0; c < shape.dim; ++c)
      f(std::size_t(n++), std::size_t(((b * shape.len + t) * shape.heads + h) * shape.dim + c));
  });
}
template <class Real>
[[nodiscard]] std::vector<Real> by_token(const std::vector<Real>& numbers, const Shape& shape) {
  std::vector<Real> tokens(numbers.size());
  if (!numbers.empty())
    for_each_by_token(shape, [&](std::size_t n, std::size_t m) { tokens[m] = numbers[n]; });
  return tokens;
}

}  // namespace detail

// `options.batch` and `options.vocabulary` are not read: the geometry gives the batch.
template <AttentionOp Op>
[[nodiscard]] OpCausalityReport check_causality(
    const Op& op, const Geometry& g = detail::kCheckGeometry,
    const Mask<typename Op::Scalar>& mask = causal<typename Op::Scalar>(),
    CausalityOptions options = {}) {
  static_assert(check_attention_op<Op>());
  using Real = typename Op::Scalar;
  using Numbers = std::vector<Real>;
  require_sizes(g, op.normaliser.query_heads(g.heads), "check_causality");
  detail::require_something(g, "check_causality");
  require(g.len_q == g.len_kv && g.first_query == 0, "check_causality: the geometry has len_q ",
          g.len_q, ", len_kv ", g.len_kv, " and first_query ", g.first_query,
          "; query i must stand at key i");
  options.batch = g.batch;
  OpCall<Op> call(op, g, mask);
  if (Op::NormaliserType::differentiates_lse)
    call.lse.assign(std::size_t(element_count(call.lse_shape(), "check_causality")), 0);
  if (call.op.readout.without_steps() == nullptr)
    call.steps.assign(std::size_t(element_count(call.steps_shape(), "check_causality")), 0);
  const auto results = [&] {  // (batch, len, all numbers of a token)
    call.infer();
    const Numbers parts[] = {detail::by_token(call.out, g.out_shape()),
                             detail::by_token(call.lse, call.lse_shape()),
                             detail::by_token(call.steps, call.steps_shape())};
    const Index rows = g.batch * g.len_q;
    Numbers all;
    for (Index row = 0; row < rows; ++row)
      for (const Numbers& part : parts) {
        const Index width = Index(part.size()) / rows;
        all.insert(all.end(), part.begin() + row * width, part.begin() + (row + 1) * width);
      }
    return all;
  };
  const Inputs<Real> in = call.inputs();
  OpCausalityReport report;
  const auto audit = [&](const char* name, const auto& view, Numbers& numbers) {
    if (!view.given()) return;
    const Shape shape = view.shape();
    const Numbers before = numbers;
    const auto run = [&](const Numbers& tokens) {
      detail::for_each_by_token(shape,
                                [&](std::size_t n, std::size_t m) { numbers[n] = tokens[m]; });
      return results();
    };
    report.tensors.emplace_back(
        name, audit_causality(run, detail::by_token(before, shape), g.len_kv, options));
    numbers = before;
  };
  audit("query", in.query, call.query);
  audit("key", in.key, call.key);
  audit("value", in.value, call.value);
  audit("extra", in.extra, call.extra);
  audit("query_inputs", in.query_inputs, call.query_inputs);
  audit("key_inputs", in.key_inputs, call.key_inputs);
  return report;
}

}  // namespace HEED_ABI
}  // namespace heed
