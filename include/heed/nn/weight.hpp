// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a layer learns: named tensors, each with its gradient.

#include <heed/core/param.hpp>
#include <heed/core/random.hpp>

#include <functional>
#include <string>

namespace heed::inline HEED_ABI::nn {

// A tensor and the gradient that backward passes add to; both empty where a layer does without it.
template <class T>
struct Weight {
  Param<T> value, grad;

  Weight() = default;
  // Zeros of the given shape.
  explicit Weight(const std::vector<Index>& shape) : value(shape), grad(shape) {}
  [[nodiscard]] bool given() const { return value.given(); }
};

// Called with the dotted name, the tensor and its gradient: "blocks.0.attn.c_attn.weight".
template <class T>
using Visitor = std::function<void(const std::string&, Param<T>&, Param<T>&)>;

template <class T>
void visit_weight(const char* name, Weight<T>& weight, const Visitor<T>& f) {
  if (weight.given()) f(name, weight.value, weight.grad);
}

// Visits a part of a layer, with `prefix` and a dot before its names.
template <class T, class Part>
void visit_part(const std::string& prefix, Part& part, const Visitor<T>& f) {
  part.visit(Visitor<T>([&](const std::string& name, Param<T>& value, Param<T>& grad) {
    f(prefix + "." + name, value, grad);
  }));
}

// Of everything that visit() shows.
template <class T, class Layer>
void clear_gradients(Layer& layer) {
  layer.visit(Visitor<T>([](const std::string&, Param<T>&, Param<T>& grad) { grad.set_zero(); }));
}
template <class T, class Layer>
[[nodiscard]] Index count_weights(Layer& layer) {
  Index count = 0;
  layer.visit(Visitor<T>([&](const std::string&, Param<T>& value, Param<T>&) { count += value.size(); }));
  return count;
}

// Normal numbers of the given standard deviation, from stream `stream` of `seed`.
template <class T>
void fill_normal(Param<T>& param, double deviation, std::uint64_t seed, std::uint64_t stream) {
  const CounterRandom random(seed, stream);
  for (Index i = 0; i < param.size(); ++i)
    param[i] = T(deviation * random.normal(std::uint64_t(i)));
}

}  // namespace heed::inline HEED_ABI::nn
