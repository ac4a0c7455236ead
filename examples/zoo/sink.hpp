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
struct Sink : heed::Softmax<T> {
  using Base = heed::Softmax<T>;
  using typename Base::P, typename Base::State, typename Base::Queries;
  heed::Param<T> height = T(0);
  static constexpr auto parameters = std::tuple{heed::named("height", &Sink::height)};
  using PlaceFree = Sink;

  State begin(const Queries& queries) const { return Base::begin_with(height.head(queries.head)); }
  void vjp(const Queries& queries, const State& state, P r, Sink& grad) const {
    const P share = Base::weight(state, P(height.head(queries.head))) * Base::finish(state);
    grad.height.head(queries.head) -= T(heed::sum_valid_lanes(P(share * r), 0, queries.valid));
  }
  template <class S>
  std::vector<S> reference(const heed::LongHandRow<S>& row) const {
    return softmax_beside<S>(height.head(row.head), row);
  }
  template <class S>
  S reference_lse(const heed::LongHandRow<S>& row, std::size_t) const {
    return log_sum_exp_beside<S>(height.head(row.head), row);
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, Sink<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:sink", "learnt height", g, {}, {.lse_of_scores = false}};
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
