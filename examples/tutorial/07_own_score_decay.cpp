// SPDX-License-Identifier: Apache-2.0

// Step 7 of 15, the first of five on variants of your own. You learn to write one: its formula, and the names of its
// parameters. Here scores fall with the distance of query and key, by a slope that every head learns:
//
//   score_ij = logit_ij - slope_h |i - j|
//
// No derivative is written: backward differentiates score(), and so does forward mode, jvp(). check_op(), known from step
// 3, compares both passes with a reference and with central differences, under several masks, and jvp() with backward().
// check_jvp() checks jvp() alone, also against central differences of forward().

#include <heed/check/op_check.hpp>
#include <heed/plug/own_score.hpp>

#include <cstdio>

template <class T>
struct Recency {
  heed::Param<T> slope = T(0.5);  // one value, or one per head
  static constexpr auto parameters = std::tuple{heed::named("slope", &Recency::slope)};

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return pair.logit - p[0] * heed::distance(pair);
  }
};

int main() {
  heed::OwnAttention<Recency, float> op;
  op.score.slope = {0.25F, 0.5F, 1.0F, 2.0F};

  const heed::OpReport report = heed::check_op(op), moving = heed::check_jvp(op);
  std::printf("%s\nforward mode alone: %s\n", report.summary().c_str(), moving.summary().c_str());
  return report.passed() && moving.passed() ? 0 : 1;
}
