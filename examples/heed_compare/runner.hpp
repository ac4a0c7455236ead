// SPDX-License-Identifier: Apache-2.0
#pragma once

// One variant at one dtype and shape, ready to run; its type is hidden, so that variants can be
// timed in turn. The variants themselves are compiled in runners_float.cpp and runners_double.cpp.

#include "text_input.hpp"

#include <heed/check/gradcheck.hpp>
#include <heed/core/geometry.hpp>

#include <memory>
#include <string>
#include <vector>

namespace compare {

// Where a gradient is checked: every input and parameter by name, and what backward says there.
struct GradientPoint {
  std::vector<heed::NamedTensor> tensors, gradients;
};

class Runner {
 public:
  virtual ~Runner() = default;

  [[nodiscard]] virtual const std::string& name() const = 0;
  // Options, hyper-parameters (scalars by value, tensors by shape) and what the maps read.
  [[nodiscard]] virtual std::string settings() const = 0;

  // One pass on the text; backward() follows forward() of the same variant.
  virtual void forward() = 0;
  virtual void backward() = 0;

  // At the inputs made from the text. Parameters of several values are moved off their defaults,
  // some of which are zeros whose gradient says nothing.
  [[nodiscard]] virtual GradientPoint gradient_point() = 0;
  // sum(out o grad_out) at other tensors, in the order of gradient_point().
  [[nodiscard]] virtual double loss(const std::vector<std::vector<double>>& tensors) = 0;
};

struct RunnerSetup {
  std::vector<std::string> names;
  heed::Geometry geometry;  // of the baseline
  bool causal = false;
  int threads = 1;
  std::uint64_t seed = 1;
};

// (B, H, T, d) as every head of the baseline reads it.
[[nodiscard]] inline heed::Geometry baseline_geometry(const heed::Shape& s) {
  return {s.batch, s.heads, s.heads, s.heads, s.len, s.len, s.dim, s.dim};
}

using Runners = std::vector<std::unique_ptr<Runner>>;
[[nodiscard]] Runners make_float_runners(const RunnerSetup& setup, const TextInput& text);
[[nodiscard]] Runners make_double_runners(const RunnerSetup& setup, const TextInput& text);

// All names, in the order of the list.
[[nodiscard]] std::vector<std::string> variant_names();

}  // namespace compare
