// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnt sink per head: a place without a value that takes weight from the keys.
//
//   w_j = exp(s_j) / (exp(b) + sum_k exp(s_k))     ds_j = w_j (G_j - r)     r = sum_k w_k G_k     G = dL/dw
//   share = exp(b) / (the same sum)                db = -share r
//
// Source  G. Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023), whose sink is a token;
//         OpenAI, gpt-oss model card (2025), for a number per head.

#include "kit.hpp"

namespace zoo::sink {

template <class T>
struct Sink : heed::PlainRows {
  using P = heed::Pack<T>;
  heed::Param<T> height = T(0);
  static constexpr auto parameters = std::tuple{heed::named("height", &Sink::height)};
  using PlaceFree = Sink;

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) weigh(block, v, block.scores[0]);
  }
  void vjp(const heed::RowBlock<T>& block, Sink& grad) const {
    for (int v = 0; v < block.vectors; ++v) {
      const P share = weigh(block, v, block.dscores[0]);
      const P r = heed::softmax_row_vjp(block, v);
      grad.height.head(block.head) -= T(heed::sum_valid_lanes(share * r, v, block.valid_lanes));
    }
  }
  template <class S>
  std::vector<S> reference(std::vector<std::vector<S>> rows, Index h, const S&) const {
    rows[0].push_back(height.head(h));
    std::vector<S> weights = heed::long_hand_softmax(rows[0]);
    weights.pop_back();
    return weights;
  }

 private:
  // Weights of vector v; returns the share of the sink.
  P weigh(const heed::RowBlock<T>& block, int v, const heed::LaneTile<T>& weights) const {
    const auto [top, sum] = heed::exponentiate_row(block, v, weights);
    const P b = height.head(block.head);
    heed::scale_row(weights, v, P(T(1) / (sum + heed::math::exp(P(b - top)))));
    return T(1) / (T(1) + sum * heed::math::exp(P(top - b)));
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Sink<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sink", "learnt height", g, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>& op, const PlainRow& row) {
  Numbers scores = logits(row);
  scores.push_back(op.normaliser.height.head(row.head));
  Numbers weights = softmax(scores);
  weights.pop_back();
  return mixed(row, weights);
}

}  // namespace zoo::sink
