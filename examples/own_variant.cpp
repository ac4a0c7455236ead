// SPDX-License-Identifier: Apache-2.0

// A variant of your own in one struct: a score that prefers recent keys, with a learnable rate.
//
//   score_ij = logit_ij - rate_h log(1 + |i - j|)
//
// No derivative is given: the engine differentiates score() with dual numbers. The gradient check below
// compares what comes out with central differences. See include/heed/plug/score.hpp for the members.

#include <heed/check/gradcheck.hpp>
#include <heed/engine/backward_call.hpp>

#include <cstdio>
#include <vector>

template <class T>
struct RecencyScore : heed::NoSideValues {
  static constexpr int scalars = 1;
  template <class U>
  using rebind = RecencyScore<U>;

  heed::Param<T> rate = T(0.5);  // one, or one per head

  template <class F>
  void visit(F&& f) {
    f("rate", rate);
  }
  void validate(const heed::Geometry& g, const char* where) const {
    heed::require_per_head(rate, g.heads, where, "rate");
  }
  T scalar(int, heed::Index head) const { return rate.head(head); }
  void chain_scalars(heed::Index head, const double* dp, RecencyScore& grad) const {
    grad.rate.head(head) += T(dp[0]);
  }
  template <class S>
  S score(const heed::PairOf<RecencyScore, S>& pair,
          const heed::ScalarsOf<RecencyScore, S>& p) const {
    const S distance = heed::math::absolute(S(pair.query_index - pair.key_index));
    return pair.logit - p[0] * heed::math::log(S(heed::math::constant<S>(1) + distance));
  }
};

template <class T>
using Recency = heed::Attention<T, RecencyScore<T>, heed::Softmax<T>, heed::Identity<T>>;

int main() {
  using heed::Index;
  const heed::Shape shape{1, 2, 9, 4};
  const auto count = std::size_t(heed::element_count(shape, "example"));
  std::vector<double> query, key, value, grad_out;
  for (std::size_t i = 0; i < count; ++i) {
    query.push_back(std::sin(double(3 * i)));
    key.push_back(std::cos(double(5 * i)));
    value.push_back(std::sin(double(7 * i)));
    grad_out.push_back(std::cos(double(11 * i)));
  }
  const auto mask = heed::causal<double>();
  const auto view = [&](const std::vector<double>& x) {
    return heed::TensorView<const double>(x.data(), shape);
  };
  heed::Saved<double> saved;
  std::vector<double> out(count);
  const auto loss = [&](const std::vector<std::vector<double>>& x) {
    Recency<double> op;
    op.score.rate = {x[3][0], x[3][1]};
    heed::forward(op, heed::Inputs<double>{view(x[0]), view(x[1]), view(x[2]), {}}, mask,
                  heed::TensorView<double>(out.data(), shape), &saved);
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += out[i] * grad_out[i];
    return sum;
  };

  const std::vector<heed::NamedTensor> inputs = {
      {"query", query}, {"key", key}, {"value", value}, {"rate", {0.5, 0.8}}};
  (void)loss({query, key, value, {0.5, 0.8}});
  Recency<double> op, grad;
  op.score.rate = {0.5, 0.8};
  std::vector<double> dq(count), dk(count), dv(count);
  const auto write = [&](std::vector<double>& x) {
    return heed::TensorView<double>(x.data(), shape);
  };
  heed::backward(op, heed::Inputs<double>{view(query), view(key), view(value), {}}, mask, saved,
                 view(out), view(grad_out), {write(dq), write(dk), write(dv), {}, {}}, &grad);
  const auto report = heed::check_gradient_on<double>(
      loss, inputs,
      {{"query", dq},
       {"key", dk},
       {"value", dv},
       {"rate", {grad.score.rate[0], grad.score.rate[1]}}},
      {});
  std::printf("%s\n", report.text().c_str());
  return report.passed ? 0 : 1;
}
