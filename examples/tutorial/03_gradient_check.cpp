// SPDX-License-Identifier: Apache-2.0

// Step 3 of 15. You learn to check a gradient before you trust it. check_gradient_on() compares the gradient of any
// function over named tensors with central differences. check_op() does so for an op, here for a combination of score
// and readout that no variant has.

#include <heed/check/op_check.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/differential/head_norm.hpp>

#include <cmath>
#include <cstdio>

int main() {
  using namespace heed;
  // f(x, w) = w sin(x0 x1)
  const auto f = [](const std::vector<std::vector<double>>& t) {
    return t[1][0] * std::sin(t[0][0] * t[0][1]);
  };
  const double x0 = 0.7, x1 = -1.3, w = 2.0, slope = std::cos(x0 * x1);
  const std::vector<NamedTensor> at = {{"x", {x0, x1}}, {"w", {w}}};
  const std::vector<NamedTensor> right = {{"x", {w * slope * x1, w * slope * x0}},
                                          {"w", {std::sin(x0 * x1)}}};
  std::vector<NamedTensor> wrong = right;
  wrong[0].values[1] *= 1.01;
  const GradientReport good = check_gradient_on<double>(f, at, right);
  const GradientReport bad = check_gradient_on<double>(f, at, wrong);
  std::printf("right: %s\nwrong: %s\n\n", good.text().c_str(), bad.text().c_str());

  // Resonant scores, softmax, and a norm of each mixed row with a learnt weight.
  Attention<float, DarScore<float>, Softmax<float>, HeadNorm<float>> op;
  op.score.strength = {0.1F, 0.4F, 0.2F, 0.3F};
  op.readout.weight = Param<float>({6}, {1.0F, 0.5F, 2.0F, 1.5F, 1.0F, -1.0F});
  const OpReport report = check_op(op);
  std::puts(report.summary().c_str());
  return good.passed && !bad.passed && report.passed() ? 0 : 1;
}
