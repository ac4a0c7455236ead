// SPDX-License-Identifier: Apache-2.0
#pragma once

// The weights that training starts from.
//
//   matrices          normal numbers of standard deviation s; those that write to the residual stream, the output
//                     projections of attention and MLP, divided by sqrt(2 depth)
//   biases            0
//   norms             1
//   parameters of ops as their makers left them
//
//   gpt2      s = 0.02
//   fan-in    s = 1 / sqrt(columns) for projections and for the tables of tokens and positions; 0.02 for what ops hold
//             per head, which are parameters of three extents
//
// A norm gives rows of length sqrt(width), and scores q k / sqrt(dim) of such rows have the deviation width s^2: 1 with
// fan-in, 0.026 with gpt2 and a width of 64. With gpt2 and small widths attention begins as the mean of all keys, the
// gradient towards the right keys is as small, and heads of two layers that need each other, as in associative recall, do
// not form within thousands of steps (bench/RESULTS.md, "Associative recall"). GPT-2 is 768 to 1,600 wide, where 1 /
// sqrt(columns) is 0.036 to 0.025.
//
// Source  Radford et al. 2019 (GPT-2); LeCun et al. 1998, "Efficient BackProp", section 4.6 (fan-in).

#include <heed/models/language_model.hpp>

#include <algorithm>
#include <cmath>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

enum class FirstWeights { gpt2, fan_in };

// The first weights of that name.
[[nodiscard]] inline FirstWeights first_weights_named(const std::string& name) {
  if (name == "gpt2") return FirstWeights::gpt2;
  if (name == "fan-in") return FirstWeights::fan_in;
  fail("first_weights_named: name is \"", name, "\", it must be gpt2 or fan-in");
}

// Fills every matrix that still holds zeros only, from its own stream of `seed`.
template <class Real>
void initialise(LanguageModel<Real>& model, std::uint64_t seed,
                FirstWeights first = FirstWeights::gpt2) {
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
    const bool per_head = value.shape().size() > 2 && name != model.options().position;
    const double deviation = first == FirstWeights::gpt2 || per_head
                                 ? 0.02
                                 : 1 / std::sqrt(double(value.shape().back()));
    fill_normal(value, writes ? deviation / std::sqrt(2 * depth) : deviation, seed, stream);
  }));
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
