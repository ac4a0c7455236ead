// SPDX-License-Identifier: Apache-2.0
// Backward of every variant in float: its errors beside those of the naive float loop, both against exact
// gradients in double.

#include "conformance/backward_cases.hpp"

using namespace heed_test;

namespace {

constexpr Needs kNeeds{.backward = true, .tape = true, .naive_tape = true};

}  // namespace

TEST_CASE("float gradients are as exact as a naive loop's at every pair of lengths",
          "[conformance]") {
  check_all_lengths<float, kNeeds>();
}
TEST_CASE("float gradients are as exact as a naive loop's for every head width", "[conformance]") {
  check_all_dims<float, kNeeds>();
}
TEST_CASE(
    "float gradients are as exact as a naive loop's where values are narrower or wider than keys",
    "[conformance]") {
  check_value_dims<float, kNeeds>();
}
TEST_CASE("float gradients of shared keys and values are sums over the heads of a group",
          "[conformance]") {
  check_groups<float, kNeeds>();
}
TEST_CASE("gradients of one query of grouped heads agree with the tape under every mask",
          "[conformance]") {
  check_one_query<float, kNeeds>();
}
TEST_CASE("float gradients go to any outer strides and any aligned address", "[conformance]") {
  check_layouts<float, kNeeds>();
}
TEST_CASE("float gradients are as exact as a naive loop's under every mask", "[conformance]") {
  check_masks<float, kNeeds>();
}
TEST_CASE("float gradients are as exact as a naive loop's at any scale", "[conformance]") {
  check_scales<float, kNeeds>();
}
