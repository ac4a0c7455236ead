// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights that training starts from.
//
//   matrices          normal numbers of standard deviation 0.02; those that write to the residual stream, the output
//                     projections of attention and MLP, divided by sqrt(2 depth)
//   biases            0
//   norms             1
//   parameters of ops as their makers left them
// Source  Radford et al. 2019 (GPT-2).

#include <heed/models/language_model.hpp>

#include <algorithm>
#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Fills every matrix that still holds zeros only, from its own stream of `seed`.
template <class Real>
void initialise(LanguageModel<Real>& model, std::uint64_t seed) {
  const double depth = double(std::max<std::size_t>(1, model.blocks().size()));
  std::uint64_t stream = 0;
  model.visit(Visitor<Real>([&](const std::string& name, Param<Real>& value, Param<Real>&) {
    ++stream;
    const bool untouched =
        std::all_of(value.data(), value.data() + value.size(), [](Real x) { return x == Real(0); });
    if (value.shape().size() < 2 || !untouched) return;
    bool writes = false;
    for (const char* end :
         {"c_proj.weight", "out_proj.weight", ".out.weight", "mlp.2.weight", "ff.3.weight"})
      writes = writes || name.ends_with(end);
    fill_normal(value, writes ? 0.02 / std::sqrt(2 * depth) : 0.02, seed, stream);
  }));
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
