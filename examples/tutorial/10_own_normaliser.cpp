// SPDX-License-Identifier: Apache-2.0

// Step 10 of 15. You learn to write a normaliser, which turns all scores of a row into weights. This one is a softmax with
// a sink, an extra place of learnt height b that takes weight from the keys:
//
//   w_j = exp(s_j) / (exp(b) + sum_k exp(s_k))
//
// A number is per query, like a sum, or per pair of a query and a key, like a score (heed/plug/row_formula.hpp). All
// exponentials are computed relative to the largest score, so that none overflows.

#include <heed/check/op_check.hpp>
#include <heed/plug/row_formula.hpp>

#include <cstdio>

template <class T>
struct Sink : heed::PlainRows {
  heed::Param<T> height = T(0);

  static constexpr auto parameters = std::tuple{heed::named("height", &Sink::height)};

  auto forward(const auto& row) const {
    const auto s = row.score();
    const auto top = row.largest(s);
    const auto e = heed::math::exp(s - top);
    return e / (row.sum(e) + heed::math::exp(row.learnt(height) - top));
  }
};

int main() {
  heed::Attention<float, heed::DotScore<float>, Sink<float>, heed::Identity<float>> op;
  op.normaliser.height = {-1.0F, 0.0F, 1.0F, 2.0F};
  const heed::OpReport report = heed::check_op(op);
  std::puts(report.summary().c_str());
  return report.passed() ? 0 : 1;
}
