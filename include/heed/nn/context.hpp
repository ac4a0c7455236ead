// SPDX-License-Identifier: Apache-2.0
#pragma once

// How layers run: threads, mode, random numbers and the memory that they share.

#include <heed/nn/matrix.hpp>

#include <cstdint>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// One per model; its layers take turns, so that calls with one context must not run at the same time.
template <class Real>
struct Context {
  int threads = 0;         // 0: OpenMP's default. Results do not depend on it
  bool training = false;   // dropout, memory updates and whatever else is for training only
  std::uint64_t seed = 0;  // of all random numbers of a run
  std::uint64_t step = 0;  // number of the training step: other random numbers in each
  Matrix<Real> packed;     // of multiply()
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
