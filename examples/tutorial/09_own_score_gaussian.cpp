// SPDX-License-Identifier: Apache-2.0

// Step 9 of 15. You learn to write a derivative by hand, which may be faster, and to have it checked. The weights are those
// of a Gaussian kernel (Nadaraya-Watson) with a learnt precision:
//
//   score_ij = -precision_h |q_i - k_j|^2 / 2,   |q - k|^2 = |q|^2 + |k|^2 - 2 q.k
//
// SquaredNorms gives pair.query[0] = |q|^2 and pair.key[0] = |k|^2. A score without score_vjp() is differentiated by dual
// numbers; check_op() compares a score_vjp() with them as well.

#include <heed/check/op_check.hpp>
#include <heed/plug/own_score.hpp>

#include <cstdio>

template <class T>
struct Gaussian {
  heed::Param<T> precision = T(0.4);
  static constexpr auto parameters =
      std::tuple{heed::named("precision", &Gaussian::precision, heed::Range::not_negative)};
  using Features = heed::SquaredNorms;

  template <class S>
  S score(const auto& pair, const auto& p) const {
    return -0.5 * p[0] * heed::squared_distance(pair);
  }

  // d.<field> = g * dscore/dfield;  dp[i] += g * dscore/dp[i]
  template <class S>
  void score_vjp(const auto& pair, const auto& p, S g, auto& d, auto& dp) const {
    const S half = -0.5 * g;
    d.query[0] = half * p[0];
    d.key[0] = half * p[0];
    d.dot = g * p[0];
    dp[0] += half * heed::squared_distance(pair);
  }
};

int main() {
  heed::OwnAttention<Gaussian, float> op;
  const heed::OpReport report = heed::check_op(op);
  std::puts(report.summary().c_str());
  return report.passed() ? 0 : 1;
}
