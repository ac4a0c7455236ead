// SPDX-License-Identifier: Apache-2.0
#pragma once

// The mean cross-entropy of logits and targets, and its gradient.
//
//   loss = 1/n sum_t lse(x[t]) - x[t][target[t]]        over the n targets that are not ignored
//   dx[t] = (softmax(x[t]) - onehot(target[t])) / n     0 where the target is ignored
//
// Shapes    logits x and dlogits (tokens, classes), targets and row_losses (tokens).
// Bounds    n = 0: loss 0, gradient 0. A row with an ignored target may hold NaN. Logits may be
//           -inf, but not all of a row.
// Results   do not depend on the number of threads, not in their last bit: row losses are added up
//           in double, in the order of the rows.

#include <heed/core/parallel.hpp>
#include <heed/nn/elementwise.hpp>
#include <heed/simd/exp.hpp>
#include <heed/simd/instructions.hpp>

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The target of a token that does not count.
inline constexpr Index kIgnoreIndex = -100;

struct CrossEntropy {
  double loss = 0;    // mean, in nats
  Index counted = 0;  // number of targets that are not ignored
};

namespace detail {

// The largest number of a row that is not a NaN.
template <class Real>
[[nodiscard]] Real largest(const Real* row, Index count) {
  constexpr Index W = kLanes<Real>;
  Pack<Real> tops = -kInfinity<Real>;
  Index j = 0;
  for (; j + W <= count; j += W) tops = max(Pack<Real>::load(row + j), tops);
  Real top = max_lanes(tops);
  for (; j < count; ++j) top = std::max(top, row[j]);
  return top;
}

// The sum of e^(x - top) over a row; its terms go to `out`, which may be the row, or null.
template <class Real>
[[nodiscard]] Real exp_row(const Real* row, Index count, Real top, Real* out) {
  constexpr Index W = kLanes<Real>;
  Pack<Real> sums = Real(0);
  Index j = 0;
  for (; j + W <= count; j += W) {
    const Pack<Real> terms = math::exp(Pack<Real>::load(row + j) - top);
    if (out) terms.store(out + j);
    sums += terms;
  }
  if (j < count) {
    Real lanes[std::size_t(W)];
    std::fill(std::copy(row + j, row + count, lanes), lanes + W, -kInfinity<Real>);
    const Pack<Real> terms = math::exp(Pack<Real>::load(lanes) - top);
    terms.store(lanes);
    if (out) std::copy(lanes, lanes + (count - j), out + j);
    sums += terms;
  }
  return sum_lanes(sums);
}

// The loss of a row. Writes `share` times the gradient to `out`, unless that is null.
template <class Real>
[[nodiscard]] double row_cross_entropy(const Real* row, Index count, Index target, double share,
                                       Real* out) {
  const Real top = largest(row, count);
  const double below_top = double(top) - double(row[target]);
  const double sum = double(exp_row(row, count, top, out));
  if (out) {
    const Real factor = Real(share / sum);
    for (Index j = 0; j < count; ++j) out[j] *= factor;
    out[target] -= Real(share);
  }
  return std::log(sum) + below_top;
}

// The number of targets that count.
[[nodiscard]] inline Index count_targets(std::span<const Index> targets, Index classes) {
  Index counted = 0;
  for (std::size_t t = 0; t < targets.size(); ++t) {
    const Index target = targets[t];
    require(target == kIgnoreIndex || (target >= 0 && target < classes), "cross_entropy: target ",
            target, " at position ", t, " is neither one of the ", classes,
            " classes nor kIgnoreIndex (", kIgnoreIndex, ")");
    counted += target != kIgnoreIndex;
  }
  return counted;
}

}  // namespace detail

// Writes the gradient to `dlogits` if it is given; it may be the logits' own memory. Writes the loss of each token to
// `row_losses` if it is given, 0 where the target is ignored. `mean_over`, if positive, replaces
// the number of targets n, so that the losses of chunks of a batch add up to the loss of the batch.
template <class Real>
[[nodiscard]] CrossEntropy cross_entropy(Context<Real>& c,
                                         const std::type_identity_t<MatrixView<const Real>>& logits,
                                         std::span<const Index> targets,
                                         const std::type_identity_t<MatrixView<Real>>& dlogits = {},
                                         std::type_identity_t<std::span<Real>> row_losses = {},
                                         Index mean_over = 0) {
  const Index rows = logits.rows, classes = logits.columns;
  require(Index(targets.size()) == rows, "cross_entropy: targets has ", targets.size(),
          " entries, logits has ", rows, " rows");
  require(row_losses.empty() || Index(row_losses.size()) == rows, "cross_entropy: row_losses has ",
          row_losses.size(), " entries, logits has ", rows, " rows");
  if (dlogits.given()) require_extents(dlogits, rows, classes, "cross_entropy", "dlogits");
  CrossEntropy result{0, detail::count_targets(targets, classes)};
  const Index divisor = mean_over > 0 ? mean_over : result.counted;
  const double share = divisor > 0 ? 1.0 / double(divisor) : 0.0;
  std::vector<double> losses(targets.size(), 0.0);
  detail::for_row_blocks(c, rows, classes, [&](Index first, Index last) {
    for (Index t = first; t < last; ++t) {
      Real* out = dlogits.given() ? dlogits.row(t) : nullptr;
      const Index target = targets[std::size_t(t)];
      if (target != kIgnoreIndex)
        losses[std::size_t(t)] =
            detail::row_cross_entropy(logits.row(t), classes, target, share, out);
      else if (out)
        std::fill(out, out + classes, Real(0));
    }
  });
  for (const double loss : losses) result.loss += loss;
  result.loss *= share;
  std::transform(losses.begin(), losses.begin() + Index(row_losses.size()), row_losses.begin(),
                 [](double loss) { return Real(loss); });
  return result;
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
