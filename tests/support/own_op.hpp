// SPDX-License-Identifier: Apache-2.0
#pragma once

// Checks that tests of own ops make for every op.

#include "catch.hpp"

#include <heed/check/op_check.hpp>

#include <cstddef>
#include <limits>
#include <vector>

namespace heed_test {

// Compares with the reference and with central differences, in at least so many cases.
template <class Op>
void check_passes(const Op& op, const heed::Geometry& g, heed::Index entries_per_tensor,
                  std::size_t least_cases = 8) {
  const heed::OpReport report =
      heed::check_op(op, g, {.max_entries_per_tensor = entries_per_tensor});
  INFO(report.text());
  CHECK(report.passed());
  CHECK(report.cases.size() >= least_cases);
}

// All gradients of a call, which is run, the parameters' last.
template <class Op>
[[nodiscard]] std::vector<float> gradients_of(heed::OpCall<Op>& call) {
  call.forward();
  call.backward();
  std::vector<float> all = call.grad_key;
  all.insert(all.end(), call.grad_query.begin(), call.grad_query.end());
  all.insert(all.end(), call.grad_value.begin(), call.grad_value.end());
  heed::for_each_param(call.grad_op, [&](const char*, const auto& param) {
    all.insert(all.end(), param.data(), param.data() + param.size());
  });
  return all;
}

// The same by name, and out behind them.
template <class Op>
[[nodiscard]] std::vector<heed::NamedTensor> results_of(heed::OpCall<Op>& call) {
  call.forward();
  call.backward();
  std::vector<heed::NamedTensor> all = call.gradients();
  all.push_back({"out", {call.out.begin(), call.out.end()}});
  return all;
}

// True if a call has these results, in their last bits.
template <class Op>
void check_results(heed::OpCall<Op>& call, const std::vector<heed::NamedTensor>& wanted) {
  const std::vector<heed::NamedTensor> now = results_of(call);
  REQUIRE(now.size() == wanted.size());
  for (std::size_t n = 0; n < now.size(); ++n) {
    INFO(now[n].name);
    CHECK(now[n].values == wanted[n].values);
  }
}

template <class Op>
void check_bits_on_threads(heed::OpCall<Op> call) {
  call.options.threads = 1;
  const std::vector<heed::NamedTensor> first = results_of(call);
  for (const int threads : {2, 3, 7}) {
    INFO(threads << " threads");
    call.options.threads = threads;
    check_results(call, first);
  }
}

// A key that is hidden from all queries, with NaN for its numbers, has no effect.
template <class Op>
void check_hidden_inputs(heed::OpCall<Op> call, const std::vector<bool>& hidden) {
  const std::vector<heed::NamedTensor> before = results_of(call);
  const auto columns = std::size_t(call.inputs().key_inputs.shape().dim);
  for (std::size_t n = 0; n < call.key_inputs.size(); ++n)
    if (hidden[n / columns % hidden.size()])
      call.key_inputs[n] = std::numeric_limits<typename Op::Scalar>::quiet_NaN();
  check_results(call, before);
}

}  // namespace heed_test
