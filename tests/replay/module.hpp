// SPDX-License-Identifier: Apache-2.0
#pragma once

// One golden layer or model (golden/FORMAT.md) through heed::nn: in double against the stored numbers, in
// float against our own double on the rounded inputs.

#include "report.hpp"

#include <heed/compiled.hpp>
#include <heed/nn/weight.hpp>

#include <functional>
#include <map>

namespace heed_test {

using Tensors = std::map<std::string, std::vector<double>>;

// Everything that forward and backward of a layer return, by the golden names.
struct LayerResult {
  Tensors values;     // out, dx, ... and the layer's reports
  Tensors gradients;  // gradients of the weights: grad.<name>
};

// Fills the weights of `layer` from the tensors param.<name>: every one of them must be there, of its
// shape, and the case must hold no other. `rounded`: rounded to float.
template <class T, class Layer>
void load_weights(Layer& layer, const GoldenCase& golden, bool rounded) {
  std::size_t found = 0, wanted = 0;
  layer.visit(
      heed::nn::Visitor<T>([&](const std::string& name, heed::Param<T>& value, heed::Param<T>&) {
        const std::string key = "param." + name;
        heed::require(golden.extents(key) == value.shape(), golden.path(), ": ", key,
                      " has another shape than the layer's");
        value = golden.param<T>(key);
        if (rounded)
          for (Index i = 0; i < value.size(); ++i) value[i] = T(float(value[i]));
        ++found;
      }));
  for (const auto& entry : golden.tensors()) wanted += entry.first.rfind("param.", 0) == 0 ? 1 : 0;
  heed::require(found == wanted, golden.path(), ": it holds ", wanted, " weights, the layer has ",
                found);
}

template <class T>
[[nodiscard]] std::vector<T> input(const GoldenCase& golden, const std::string& name,
                                   bool rounded) {
  std::vector<T> numbers;
  for (const double x : golden.tensor(name)) numbers.push_back(rounded ? T(float(x)) : T(x));
  return numbers;
}

template <class T>
[[nodiscard]] std::vector<double> numbers(const T* data, Index count) {
  return {data, data + count};
}

template <class T, class Layer>
void collect_gradients(Layer& layer, Tensors& to) {
  layer.visit(
      heed::nn::Visitor<T>([&](const std::string& name, heed::Param<T>&, heed::Param<T>& grad) {
        to["grad." + name] = numbers(grad.data(), grad.size());
      }));
}

// run.operator()<T>() in double against the case, and in float against double run on rounded numbers, which
// is run.operator()<double>(true).
template <class Run>
void check_layer(Report& report, const GoldenCase& golden, const Run& run) {
  const LayerResult exact = run.template operator()<double>(false);
  for (const Tensors* tensors : {&exact.values, &exact.gradients})
    for (const auto& [name, values] : *tensors) report.exact(name, values, golden.tensor(name));
  const LayerResult wide = run.template operator()<double>(true);
  const LayerResult narrow = run.template operator()<float>(true);
  const auto compare = [&](const Tensors& got, const Tensors& want) {
    for (const auto& [name, values] : want) {
      // 2e-6 of the largest number is the error of the oracle's own float; sums of both signs have 5e-6.
      const double allowed = std::max(1e-5 * Report::largest(values), 5e-6);
      report.rounded(name, got.at(name), values, std::vector<double>(values.size(), allowed));
    }
  };
  compare(narrow.values, wide.values);
  compare(narrow.gradients, wide.gradients);
}

void replay_module(const GoldenCase& golden, Report& report);
void replay_model(const GoldenCase& golden, Report& report);

}  // namespace heed_test
