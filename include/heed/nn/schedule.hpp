// SPDX-License-Identifier: Apache-2.0
#pragma once

// Learning rates over a run, and limits on the size of gradients.

#include <heed/nn/weight.hpp>

#include <cmath>
#include <limits>
#include <numbers>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The learning rate of step s: a linear rise to the peak, then half a cosine down to the floor.
//
//   s < warmup   peak (s + 1) / warmup
//   s < total    floor + (peak - floor) (1 + cos(pi (s - warmup) / (total - warmup))) / 2
//   after        floor
//
// Steps count from 0. Bounds: 0 <= warmup <= total, 0 <= floor <= peak.
struct WarmupCosine {
  Index warmup = 0, total = 0;
  double peak = 0, floor = 0;

  // Throws when a number is out of its bounds.
  [[nodiscard]] double at(Index step) const {
    require(step >= 0, "WarmupCosine::at: step is ", step, ", it must be at least 0");
    require(warmup >= 0, "WarmupCosine::at: warmup is ", warmup, ", it must be at least 0");
    require(total >= warmup, "WarmupCosine::at: total is ", total, ", it must be at least warmup, ",
            warmup);
    require(floor >= 0, "WarmupCosine::at: floor is ", floor, ", it must be at least 0");
    require(peak >= floor && peak <= std::numeric_limits<double>::max(),
            "WarmupCosine::at: peak is ", peak, ", it must be finite and at least floor, ", floor);
    if (step < warmup) return peak * double(step + 1) / double(warmup);
    if (step >= total) return floor;
    const double part = double(step - warmup) / double(total - warmup);
    return floor + (peak - floor) * 0.5 * (1 + std::cos(std::numbers::pi * part));
  }
};

namespace detail {

// The sum of squares in double. Eight chains of sums: an addition need not wait for the one before.
template <class Real>
[[nodiscard]] double sum_of_squares(const Param<Real>& param) {
  constexpr Index chains = 8;
  double sums[chains] = {};
  Index i = 0;
  for (; i + chains <= param.size(); i += chains)
    for (Index k = 0; k < chains; ++k) sums[k] += double(param[i + k]) * double(param[i + k]);
  for (; i < param.size(); ++i) sums[0] += double(param[i]) * double(param[i]);
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

}  // namespace detail

// Scales all gradients of `layer` by one factor, so that their common Euclidean norm is at most `max_norm`, which must be
// positive; infinity only measures. Returns the norm before. If that is not finite, the gradients do not change.
template <class Real, class Layer>
double clip_gradients(Layer& layer, double max_norm) {
  require(max_norm > 0, "clip_gradients: max_norm is ", max_norm, ", it must be positive");
  double sum = 0;
  layer.visit(Visitor<Real>([&](const std::string&, Param<Real>&, Param<Real>& grad) {
    sum += detail::sum_of_squares(grad);
  }));
  const double norm = std::sqrt(sum);
  if (!std::isfinite(norm) || norm <= max_norm) return norm;
  const Real factor = Real(max_norm / norm);
  layer.visit(Visitor<Real>([&](const std::string&, Param<Real>&, Param<Real>& grad) {
    for (Index i = 0; i < grad.size(); ++i) grad[i] *= factor;
  }));
  return norm;
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
