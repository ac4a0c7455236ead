// SPDX-License-Identifier: Apache-2.0
#pragma once

// Numbers, comparisons and gradient checks for tests of layers and models.

#include <heed/check/gradcheck.hpp>
#include <heed/nn/matrix.hpp>
#include <heed/nn/weight.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace heed_test {

namespace nn = heed::nn;
using heed::Index;

inline constexpr std::uint64_t kSeed = 20250611;

// Normal numbers; the same ones for float and double up to rounding.
template <class T>
nn::Matrix<T> normals(Index rows, Index columns, std::uint64_t stream) {
  nn::Matrix<T> m(rows, columns);
  const heed::CounterRandom random(kSeed, stream);
  for (Index i = 0; i < rows * columns; ++i) m.view().data[i] = T(random.normal(std::uint64_t(i)));
  return m;
}
inline std::vector<Index> random_ids(Index count, Index vocabulary, std::uint64_t stream) {
  const heed::CounterRandom random(kSeed, stream);
  std::vector<Index> ids;
  for (Index i = 0; i < count; ++i)
    ids.push_back(Index(random.bits(std::uint64_t(i)) % std::uint64_t(vocabulary)));
  return ids;
}

// The numbers of a view, row by row.
template <class T>
std::vector<std::remove_const_t<T>> numbers(const nn::MatrixView<T>& m) {
  std::vector<std::remove_const_t<T>> all;
  for (Index r = 0; r < m.rows; ++r) all.insert(all.end(), m.row(r), m.row(r) + m.columns);
  return all;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}
// The largest difference; infinite if the sizes differ or either side holds a NaN.
template <class T>
double largest_difference(const std::vector<T>& a, const std::vector<T>& b) {
  double largest = a.size() == b.size() ? 0 : HUGE_VAL;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(double(a[i]) - double(b[i]));
    largest = std::isnan(difference) ? HUGE_VAL : std::max(largest, difference);
  }
  return largest;
}

// Moves every weight away from its initial value: matrices far, all others a little, so that
// hyper-parameters of ops stay in their ranges.
template <class T, class Layer>
void shake(Layer& layer, std::uint64_t seed = kSeed) {
  std::uint64_t stream = 1000;
  layer.visit(nn::Visitor<T>([&](const std::string&, heed::Param<T>& value, heed::Param<T>&) {
    const heed::CounterRandom random(seed, stream++);
    const double spread = value.shape().size() > 1 ? 0.4 : value.size() > 1 ? 0.1 : 0.03;
    for (Index i = 0; i < value.size(); ++i)
      value[i] += T(spread * random.normal(std::uint64_t(i)));
  }));
}

template <class T, class Layer>
std::vector<T> all_weights(Layer& layer) {
  std::vector<T> all;
  layer.visit(nn::Visitor<T>([&](const std::string&, heed::Param<T>& value, heed::Param<T>&) {
    all.insert(all.end(), value.data(), value.data() + value.size());
  }));
  return all;
}
template <class T, class Layer>
std::vector<T> all_gradients(Layer& layer) {
  std::vector<T> all;
  layer.visit(nn::Visitor<T>([&](const std::string&, heed::Param<T>&, heed::Param<T>& grad) {
    all.insert(all.end(), grad.data(), grad.data() + grad.size());
  }));
  return all;
}

// The weight of this name, or null.
template <class T, class Layer>
heed::Param<T>* find_weight(Layer& layer, const std::string& wanted, bool gradient = false) {
  heed::Param<T>* found = nullptr;
  layer.visit(
      nn::Visitor<T>([&](const std::string& name, heed::Param<T>& value, heed::Param<T>& grad) {
        if (name == wanted) found = gradient ? &grad : &value;
      }));
  return found;
}

// An input of a layer, and the memory for its gradient.
struct CheckedInput {
  std::string name;
  nn::Matrix<double>*value, *grad;
};

// Compares the results of `gradient()`, in the weights of `layer` and in the inputs, with central differences of `loss()`.
template <class Layer, class Loss, class Gradient>
heed::GradientReport check_layer(Layer& layer, const Loss& loss, const Gradient& gradient,
                                 const std::vector<CheckedInput>& inputs = {}) {
  nn::clear_gradients<double>(layer);
  gradient();
  std::vector<heed::NamedTensor> at, analytic;
  std::vector<double*> places;
  const auto add = [&](const std::string& name, double* value, const double* grad, Index count) {
    at.push_back({name, {value, value + count}});
    analytic.push_back({name, {grad, grad + count}});
    places.push_back(value);
  };
  using Param = heed::Param<double>;
  layer.visit(nn::Visitor<double>([&](const std::string& name, Param& value, Param& grad) {
    add(name, value.data(), grad.data(), value.size());
  }));
  for (const CheckedInput& in : inputs)
    add(in.name, in.value->view().data, in.grad->view().data,
        in.value->rows() * in.value->columns());
  heed::GradcheckOptions options;
  options.max_entries_per_tensor = 6;
  const auto put = [&](std::size_t t, const std::vector<double>& values) {
    std::copy(values.begin(), values.end(), places[t]);
  };
  auto report = heed::check_gradient_on<double>(
      [&](const std::vector<std::vector<double>>& tensors) {
        for (std::size_t t = 0; t < tensors.size(); ++t) put(t, tensors[t]);
        return loss();
      },
      at, analytic, options);
  for (std::size_t t = 0; t < at.size(); ++t) put(t, at[t].values);
  return report;
}

}  // namespace heed_test
