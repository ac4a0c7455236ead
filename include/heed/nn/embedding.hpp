// SPDX-License-Identifier: Apache-2.0
#pragma once

// A learnt row for each token.
//
//   y[t] = W[ids[t]]        dW[ids[t]] += dy[t]
//
// Shapes    ids (tokens), y (tokens, width), weight (count, width).
// Errors    an id outside [0, count), before anything is written.
// Results   do not depend on the number of threads, not in their last bit.

#include <heed/core/parallel.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/nn/multiply.hpp>
#include <heed/nn/weight.hpp>

#include <algorithm>
#include <span>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Looks up tokens by their ids, or positions by their numbers.
template <class Real>
class Embedding {
 public:
  Weight<Real> weight;

  Embedding() = default;
  Embedding(Index count, Index width) : weight({count, width}) {}

  [[nodiscard]] Index count() const { return weight.value.extent(0); }
  [[nodiscard]] Index width() const { return weight.value.extent(1); }

  void forward(Context<Real>& c, std::span<const Index> ids, const MatrixView<Real>& y,
               Into into = Into::overwrite) const {
    const Index tokens = Index(ids.size()), columns = width();
    require_extents(y, tokens, columns, "Embedding::forward", "y");
    require_ids(ids, "Embedding::forward");
    detail::for_row_blocks(c, tokens, columns, [&](Index first, Index last) {
      for (Index t = first; t < last; ++t) {
        const Real* from = weight.value.data() + ids[std::size_t(t)] * columns;
        if (into == Into::overwrite)
          std::copy(from, from + columns, y.row(t));
        else
          add(from, columns, y.row(t));
      }
    });
  }

  // Adds to the weight's gradient in the order of the tokens. Workers divide the columns among them, so that no two
  // write to the same number.
  void backward(Context<Real>& c, std::span<const Index> ids, const MatrixView<const Real>& dy) {
    const Index tokens = Index(ids.size()), columns = width();
    require_extents(dy, tokens, columns, "Embedding::backward", "dy");
    require_ids(ids, "Embedding::backward");
    const Index chunk = std::max<Index>(64, kGrain / std::max<Index>(1, tokens));
    parallel_for((columns + chunk - 1) / chunk, resolve_threads(c.threads), [&](Index n) {
      const Index first = n * chunk, count = std::min(chunk, columns - first);
      for (Index t = 0; t < tokens; ++t)
        add(dy.row(t) + first, count, weight.grad.data() + ids[std::size_t(t)] * columns + first);
    });
  }

  void visit(const Visitor<Real>& f) { visit_weight("weight", weight, f); }

 private:
  static constexpr Index kGrain = 65536;  // fewer elements are not worth another worker

  void require_ids(std::span<const Index> ids, const char* where) const {
    for (std::size_t t = 0; t < ids.size(); ++t)
      require(ids[t] >= 0 && ids[t] < count(), where, ": id ", ids[t], " at position ", t,
              " is outside of the ", count(), " rows of the weight");
  }
  static void add(const Real* from, Index count, Real* to) {
    for (Index j = 0; j < count; ++j) to[j] += from[j];
  }
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
