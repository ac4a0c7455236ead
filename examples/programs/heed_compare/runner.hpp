// SPDX-License-Identifier: Apache-2.0
#pragma once

// One variant of one dtype and shape, ready to run. An interface hides its type, so that variants
// can be timed in turn; runners_float.cpp and its neighbours compile the variants.

#include "text_input.hpp"

#include <heed/check/gradcheck.hpp>
#include <heed/core/geometry.hpp>
#include <heed/simd/precision.hpp>

#include <memory>
#include <string>
#include <vector>

namespace compare {

// The point at which a gradient is checked: every input and parameter by name, the weights of the loss
// sum(out o grad_out), and the gradients that backward gives.
struct GradientPoint {
  std::vector<heed::NamedTensor> tensors, gradients;
  std::vector<double> grad_out;
};

class Runner {
 public:
  virtual ~Runner() = default;

  [[nodiscard]] virtual const std::string& name() const = 0;
  // The variant's options and hyper-parameters (scalars by value, tensors by shape), and the shapes of its inputs, as text.
  [[nodiscard]] virtual std::string settings() const = 0;

  // Number of pairs of a query and a key that it sees, over all batches and heads.
  [[nodiscard]] virtual double visible_pairs() const = 0;

  // Run one pass on the text; backward() must follow a forward() of the same runner.
  virtual void forward() = 0;
  virtual void backward() = 0;

  // The gradients at the inputs that are made from the text. Parameters of several values are first
  // moved off their defaults, since the gradient at a default of zeros would test nothing.
  [[nodiscard]] virtual GradientPoint gradient_point() = 0;
  // The loss sum(out o grad_out) for other tensors, in the order of gradient_point().
  [[nodiscard]] virtual double loss(const std::vector<std::vector<double>>& tensors,
                                    const std::vector<double>& grad_out) = 0;
};

struct RunnerSetup {
  std::vector<std::string> names;
  heed::Geometry geometry;  // the baseline's
  bool causal = false;
  int threads = 1;
  std::uint64_t seed = 1;
  heed::Precision precision = {};
};

// The geometry of the baseline for a shape (B, H, T, d).
[[nodiscard]] inline heed::Geometry baseline_geometry(const heed::Shape& s) {
  return {s.batch, s.heads, s.heads, s.heads, s.len, s.len, s.dim, s.dim};
}

using Runners = std::vector<std::unique_ptr<Runner>>;
[[nodiscard]] Runners make_float_runners(const RunnerSetup& setup, const TextInput& text);
[[nodiscard]] Runners make_double_runners(const RunnerSetup& setup, const TextInput& text);
[[nodiscard]] Runners make_bfloat16_runners(const RunnerSetup& setup, const TextInput& text);

// The names of the library's variants and of the zoo's, each in the order of its list.
[[nodiscard]] std::vector<std::string> variant_names();
[[nodiscard]] std::vector<std::string> zoo_names();

}  // namespace compare
