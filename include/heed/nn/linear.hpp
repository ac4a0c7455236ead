// SPDX-License-Identifier: Apache-2.0
#pragma once

// A linear layer over rows of tokens.
//
//   y  = x W^T + b
//   dx = dy W      dW += dy^T x      db += column sums of dy
//
// Shapes  x (tokens, in), y (tokens, out), weight (out, in), bias (out) or none.

#include <heed/nn/multiply.hpp>
#include <heed/nn/weight.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

template <class Real>
class Linear {
 public:
  Weight<Real> weight, bias;

  Linear() = default;
  Linear(Index in, Index out, bool with_bias)
      : weight({out, in}), bias(with_bias ? Weight<Real>({out}) : Weight<Real>()) {}

  [[nodiscard]] Index in() const { return weight.value.extent(1); }
  [[nodiscard]] Index out() const { return weight.value.extent(0); }

  // Writes y, or adds to it. A layer with a bias can only write.
  void forward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y,
               Into into = Into::overwrite) const {
    require_extents(x, x.rows, in(), "Linear::forward", "x");
    require_extents(y, x.rows, out(), "Linear::forward", "y");
    require(into == Into::overwrite || !bias.given(),
            "Linear::forward: into is add, it must be overwrite for a layer with a bias");
    multiply(c, in(), factor(x), transposed(values()), y, into,
             bias.given() ? bias.value.data() : nullptr);
  }

  // Adds to the weights' gradients; writes dx, or adds to it, unless it is not given.
  void backward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, Into into = Into::overwrite) {
    require_extents(x, x.rows, in(), "Linear::backward", "x");
    require_extents(dy, x.rows, out(), "Linear::backward", "dy");
    if (dx.given()) {
      require_extents(dx, x.rows, in(), "Linear::backward", "dx");
      multiply(c, out(), factor(dy), factor(values()), dx, into);
    }
    multiply(c, x.rows, transposed(dy), factor(x),
             MatrixView<Real>(weight.grad.data(), out(), in()), Into::add);
    if (bias.given()) add_column_sums(c, dy, bias.grad.data());
  }

  void visit(const Visitor<Real>& f) {
    visit_weight("weight", weight, f);
    visit_weight("bias", bias, f);
  }

 private:
  [[nodiscard]] MatrixView<const Real> values() const { return {weight.value.data(), out(), in()}; }
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
