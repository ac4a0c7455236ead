// SPDX-License-Identifier: Apache-2.0
// Backward of every variant in double: against exact gradients of the reference by the tape, and
// against central differences. tests/conformance_backward_float_test.cpp has the float side.

#include "conformance/backward_cases.hpp"
#include "conformance/compare.hpp"

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true, .tape = true};
constexpr Needs kDifferences{.backward = true, .differences = true};

}  // namespace

TEST_CASE("gradients agree with the tape at every pair of lengths", "[conformance]") {
  check_all_lengths<double, kNeeds>();
}
TEST_CASE("gradients agree with the tape for every head width", "[conformance]") {
  check_all_dims<double, kNeeds>();
}
TEST_CASE("gradients agree with the tape where values are narrower or wider than keys",
          "[conformance]") {
  check_value_dims<double, kNeeds>();
}
TEST_CASE("gradients of shared keys and values are sums over the heads of a group",
          "[conformance]") {
  check_groups<double, kNeeds>();
}
TEST_CASE("gradients of one query of grouped heads agree with the tape under every mask",
          "[conformance]") {
  check_one_query<double, kNeeds>();
}
TEST_CASE("gradients go to any outer strides and any aligned address", "[conformance]") {
  check_layouts<double, kNeeds>();
}
TEST_CASE("gradients agree with the tape under every mask", "[conformance]") {
  check_masks<double, kNeeds>();
}
TEST_CASE("gradients agree with the tape at any scale, 0 and negative ones included",
          "[conformance]") {
  check_scales<double, kNeeds>();
}

TEST_CASE("gradients of every input and parameter agree with central differences",
          "[conformance]") {
  const Geometry g = geometry(2, 2, 1, 5, 5, 4, 4);
  for (const char* which : {"none", "causal & key lengths & bias & alibi", "bias per key"})
    for (const Runner<double>& runner : all_runners<double, kDifferences>(g)) {
      INFO(runner.name << ", mask: " << which);
      Call<double> call = random_call<double>(runner.geometry, runner.extra_dim, 3);
      for (const MaskCase<double>& mask : mask_cases<double>())
        if (mask.name == std::string(which)) call.mask = mask.make(call.geometry);
      // Numbers in [-1, 1): with larger ones the truncation of the differences would show.
      const std::vector<double> grad_out = heed::gradcheck_grad_out(call.geometry);
      std::copy(grad_out.begin(), grad_out.end(), call.grad_out.view().data());
      const Named fast = backward(runner, call, forward(runner, call));
      const heed::GradientReport report = runner.differences(call, fast, 24);
      INFO(report.text());
      CHECK(report.passed);
      CHECK(report.checked >= 60);
      CHECK(report.worst_error <= tolerance::central_difference);
    }
}
