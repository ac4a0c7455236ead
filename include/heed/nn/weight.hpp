// SPDX-License-Identifier: Apache-2.0
#pragma once

// The learnt parts of a layer: named tensors, each with its gradient.

#include <heed/core/param.hpp>
#include <heed/core/random.hpp>

#include <functional>
#include <string>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// A tensor and the gradient that backward passes add to. Both are empty if the layer has no such weight.
template <class Real>
struct Weight {
  Param<Real> value, grad;

  Weight() = default;
  // Zeros of the given shape.
  explicit Weight(const std::vector<Index>& shape) : value(shape), grad(shape) {}
  [[nodiscard]] bool given() const { return value.given(); }
};

// Called with the dotted name of a weight, such as "blocks.0.attn.c_attn.weight", the weight and its gradient.
template <class Real>
using Visitor = std::function<void(const std::string&, Param<Real>&, Param<Real>&)>;

template <class Real>
void visit_weight(const char* name, Weight<Real>& weight, const Visitor<Real>& f) {
  if (weight.given()) f(name, weight.value, weight.grad);
}

// Visits a part of a layer, with `prefix` and a dot before its names.
template <class Real, class Part>
void visit_part(const std::string& prefix, Part& part, const Visitor<Real>& f) {
  part.visit(Visitor<Real>([&](const std::string& name, Param<Real>& value, Param<Real>& grad) {
    f(prefix + "." + name, value, grad);
  }));
}

// Sets the gradients of all weights that visit() shows to 0.
template <class Real, class Layer>
void clear_gradients(Layer& layer) {
  layer.visit(
      Visitor<Real>([](const std::string&, Param<Real>&, Param<Real>& grad) { grad.set_zero(); }));
}

// Brings weights that have a range back into it, for layers and models with a member of this name. AdamW calls it after
// each step; an optimiser of your own must do so, too. A model of your own that holds attention layers needs a
// keep_in_range() that calls theirs, as its visit() calls theirs.
template <class Layer>
void keep_in_range(Layer& layer) {
  if constexpr (requires { layer.keep_in_range(); }) layer.keep_in_range();
}
// Count of the numbers in all weights of `layer`.
template <class Real, class Layer>
[[nodiscard]] Index count_weights(Layer& layer) {
  Index count = 0;
  layer.visit(Visitor<Real>(
      [&](const std::string&, Param<Real>& value, Param<Real>&) { count += value.size(); }));
  return count;
}

// Fills `param` with normal numbers of the given standard deviation, from stream `stream` of `seed`.
template <class Real>
void fill_normal(Param<Real>& param, double deviation, std::uint64_t seed, std::uint64_t stream) {
  const CounterRandom random(seed, stream);
  for (Index i = 0; i < param.size(); ++i)
    param[i] = Real(deviation * random.normal(std::uint64_t(i)));
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
