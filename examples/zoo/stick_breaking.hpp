// SPDX-License-Identifier: Apache-2.0
#pragma once

// Stick-breaking attention: from the newest key to the oldest, each takes its share of what the newer ones have left.
//
//   w_j = b_j prod_{k > j} (1 - b_k)       b_j = sigmoid(s_j), j and k over the keys that the row sees
//   ds_j = w_j (1 - b_j) G_j - b_j sum_{k < j} w_k G_k       G = dL/dw
//
// Source  S. Tan et al., Stick-breaking Attention (2024). There a query sees only keys before its own; here what the mask
//         shows.

#include "kit.hpp"

namespace zoo::stick_breaking {

template <class T>
struct StickBreaking : heed::PlainRows {
  using P = heed::Pack<T>;
  using PlaceFree = StickBreaking;
  [[nodiscard]] Index work_tiles(bool backward) const { return backward ? 1 : 0; }

  void forward(const heed::RowBlock<T>& block) const {
    for (int v = 0; v < block.vectors; ++v) {
      report_no_lse(block, v);
      weigh(block, v, heed::column_of(block.scores[0], v));
    }
  }
  void vjp(const heed::RowBlock<T>& block, StickBreaking&) const {
    for (int v = 0; v < block.vectors; ++v) {
      const auto weights = heed::work_column(block, 0);
      weigh(block, v, weights);
      P older = T(0);
      for (Index j = 0; j < block.keys(); ++j) {
        const P s = block.scores[0].load(j, v), w = weights.load(j);
        const auto hidden = heed::is_hidden(s);
        const P pull = zero_where(hidden, w * block.dweights.load(j, v));
        const P ds = heed::math::sigmoid(P(-s)) * pull - heed::math::sigmoid(s) * older;
        block.weights.store(j, v, w);
        block.dscores[0].store(j, v, zero_where(hidden, ds));
        older += pull;
      }
    }
  }
  template <class S>
  std::vector<S> reference(heed::LongHandRow<S> row) const {
    S left = heed::math::constant<S>(1);
    for (std::size_t j = row.scores[0].size(); j-- > 0;) {
      const S share = heed::math::sigmoid(row.scores[0][j]),
              rest = heed::math::sigmoid(S(-row.scores[0][j]));
      row.scores[0][j] = share * left;
      left = left * rest;
    }
    return row.scores[0];
  }

 private:
  static void weigh(const heed::RowBlock<T>& block, int v, const heed::TileColumn<T>& weights) {
    P left = T(1);
    for (Index j = block.keys(); j-- > 0;) {
      const P s = block.scores[0].load(j, v);
      const auto hidden = heed::is_hidden(s);
      weights.store(j, zero_where(hidden, heed::math::sigmoid(s) * left));
      left = select(hidden, left, left * heed::math::sigmoid(P(-s)));
    }
  }
};

template <class T>
using Op = Attention<T, heed::DotScore<T>, StickBreaking<T>>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:stick-breaking", "", g, {}, {.lse_of_scores = false}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  const Numbers scores = logits(row);
  Numbers weights;
  for (std::size_t j = 0; j < scores.size(); ++j) {
    double weight = 1 / (1 + std::exp(-scores[j]));
    for (std::size_t k = j + 1; k < scores.size(); ++k)
      weight *= 1 - 1 / (1 + std::exp(-scores[k]));
    weights.push_back(weight);
  }
  return mixed(row, weights);
}

}  // namespace zoo::stick_breaking
