// SPDX-License-Identifier: Apache-2.0

// Step 10 of 14. You learn to write a normaliser, which turns all scores of a row into weights. This one is a softmax with
// a sink, an extra place of learnt height b that takes weight from the keys:
//
//   w_j = exp(s_j) / (exp(b) + sum_k exp(s_k))    dL/ds_j = w_j (G_j - r)    r = sum_k w_k G_k    G = dL/dw
//   share of the sink = exp(b) / (the same)       dL/db = -share r
//
// Rows of a block are keys and its lanes are queries; a hidden score is -infinity (heed/plug/normaliser.hpp).

#include <heed/check/op_check.hpp>

#include <cstdio>

template <class T>
struct Sink : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> height = T(0);

  static constexpr auto parameters = std::tuple{heed::named("height", &Sink::height)};

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) weigh(block, v, block.scores[0]);
  }
  void vjp(const heed::RowBlock<T>& block, Sink& grad) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P share = weigh(block, v, block.dscores[0]);
      const P r = heed::softmax_row_vjp(block, v);  // dscores and weights
      grad.height.head(block.head) -= T(heed::sum_valid_lanes(share * r, v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    row.scores[0].push_back(height.head(row.head));
    std::vector<S> weights = heed::long_hand_softmax(row.scores[0]);
    weights.pop_back();
    return weights;
  }

 private:
  // Weights of vector v from its scores; returns the share of the sink.
  P weigh(const heed::RowBlock<T>& block, int v, const heed::LaneTile<T>& weights) const {
    const auto [top, sum] = heed::exponentiate_row(block, v, weights);
    const P b = height.head(block.head);
    heed::scale_row(weights, v, P(T(1) / (sum + heed::math::exp(P(b - top)))));
    return T(1) / (T(1) + sum * heed::math::exp(P(top - b)));
  }
};

int main() {
  heed::Attention<float, heed::DotScore<float>, Sink<float>, heed::Identity<float>> op;
  op.normaliser.height = {-1.0F, 0.0F, 1.0F, 2.0F};
  const heed::OpReport report = heed::check_op(op);
  std::printf("%s", report.text().c_str());
  return report.passed() ? 0 : 1;
}
