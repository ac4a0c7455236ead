// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reference of the resonant flow: one row of visible drives, in plain loops on any scalar, against
// which flow.hpp and lagrange.hpp are tested.

#include <heed/plug/normaliser.hpp>

#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class S>
inline void subtract_mean(std::vector<S>& x) {
  S sum = math::constant<S>(0);
  for (const S& entry : x) sum += entry;
  for (S& entry : x) entry -= sum / math::constant<S>(double(x.size()));
}

// 1/N for every key.
template <class S>
[[nodiscard]] inline std::vector<S> uniform_row(std::size_t keys) {
  return std::vector<S>(keys, math::constant<S>(keys == 0 ? 0.0 : 1.0 / double(keys)));
}

// `steps` times a <- a + eta (D - a) from a uniform row. Without the multiplier each step ends with
// a <- softmax(a); with it the change is made to sum to 0, so that a still sums to 1.
template <class S>
[[nodiscard]] inline std::vector<S> long_hand_flow(const std::vector<S>& drive, const S& eta,
                                                   int steps, bool multiplier) {
  std::vector<S> a = uniform_row<S>(drive.size());
  for (int t = 0; t < steps; ++t) {
    std::vector<S> change;
    for (std::size_t j = 0; j < a.size(); ++j) change.push_back(eta * (drive[j] - a[j]));
    if (multiplier) subtract_mean(change);
    for (std::size_t j = 0; j < a.size(); ++j) a[j] += change[j];
    if (!multiplier) a = long_hand_softmax(a);
  }
  return a;
}

// Steps of the given contraction after which a change has shrunk to e^-50.
[[nodiscard]] inline int steps_to_rest(double contraction) {
  if (contraction == 0) return 2;
  return 2 + int(std::ceil(-50 / std::log(contraction)));
}

// 1/N + D - mean D
template <class S>
[[nodiscard]] inline std::vector<S> long_hand_lagrange_equilibrium(const std::vector<S>& drive) {
  std::vector<S> a = uniform_row<S>(drive.size()), deviation = drive;
  subtract_mean(deviation);
  for (std::size_t j = 0; j < a.size(); ++j) a[j] += deviation[j];
  return a;
}

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
