// SPDX-License-Identifier: Apache-2.0
#pragma once

// What tests of own scores ask of every op.

#include "catch.hpp"

#include <heed/check/op_check.hpp>

#include <cstddef>
#include <vector>

namespace heed_test {

// Against the slow twin and central differences, in at least so many cases.
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

template <class Op>
void check_bits_on_threads(heed::OpCall<Op> call) {
  std::vector<float> first;
  for (const int threads : {1, 2, 3}) {
    call.options.threads = threads;
    const std::vector<float> gradients = gradients_of(call);
    if (first.empty()) first = gradients;
    CHECK(gradients == first);
  }
}

}  // namespace heed_test
