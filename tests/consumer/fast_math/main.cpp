// SPDX-License-Identifier: Apache-2.0
// Plain and resonant attention against numbers computed by hand; a compiler that reassociates breaks 2^x first.
#include <heed/attention.hpp>

#include <cmath>
#include <cstdio>

int main() {
  const heed::Shape shape{1, 1, 3, 2};
  float x[] = {1, 0, 0, 1, 1, 1}, out[6];
  heed::Inputs<float> in{{x, shape}, {x, shape}, {x, shape}};
  // Scores of query 3 are 1, 1 and 2 over sqrt(2).
  const double one = std::exp(1 / std::sqrt(2.0)), two = one * one;
  const double plain = (one + two) / (2 * one + two);
  heed::forward(heed::ScaledDot<float>{}, in, heed::causal<float>(), {out, shape});
  std::printf("plain %.6f, it must be %.6f\n", double(out[4]), plain);
  if (!(std::abs(out[4] - plain) < 1e-6)) return 1;
  // Resonance adds 0.3 sigmoid(8 (cos - 0.6)); the cosines are 1/sqrt(2) twice, and 1.
  const auto gate = [](double cosine) {
    return std::exp(0.3 / (1 + std::exp(-8 * (cosine - 0.6))));
  };
  const double r1 = one * gate(std::sqrt(0.5)), r2 = two * gate(1.0);
  const double resonant = (r1 + r2) / (2 * r1 + r2);
  heed::forward(heed::Dar<float>{}, in, heed::causal<float>(), {out, shape});
  std::printf("resonant %.6f, it must be %.6f\n", double(out[4]), resonant);
  return std::abs(out[4] - resonant) < 1e-6 ? 0 : 1;
}
