// SPDX-License-Identifier: Apache-2.0
#pragma once

// Mlp, two linear layers with an activation between them, and SwiGlu, its gated kind.
//
//   Mlp     y = second(f(first(x)))
//   SwiGlu  y = down(silu(gate(x)) o up(x))
//
//   with h = silu(g) o u:  du = dh o silu(g),  dg = dh o u o silu'(g)
//
// Shapes  x, y, dx, dy (tokens, width); between the layers (tokens, hidden).
// Cost    2 (Mlp) or 4 (SwiGlu) matrices (tokens, hidden), kept between calls. backward() computes the activation again
//         from the numbers that the last forward() kept; it may be called more than once.

#include <heed/nn/activation.hpp>
#include <heed/nn/linear.hpp>

#include <string>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

namespace detail {

// Adds the weight gradients of `layer` for its input h, then writes dh = dy W to the memory of h.
template <class Real>
void backward_in_place(Context<Real>& c, Linear<Real>& layer, const MatrixView<Real>& h,
                       const MatrixView<const Real>& dy) {
  layer.backward(c, h, dy, {});
  const MatrixView<const Real> weight(layer.weight.value.data(), layer.out(), layer.in());
  multiply(c, layer.out(), factor(dy), factor(weight), h);
}

}  // namespace detail

template <class Real>
class Mlp {
 public:
  Linear<Real> first, second;
  Activation activation = Activation::gelu_erf;

  Mlp() = default;
  // visit() gives the two layers these names, such as "c_fc" and "c_proj", or "0" and "2".
  Mlp(Index width, Index hidden, Activation f, bool with_bias, std::string first_name,
      std::string second_name)
      : first(width, hidden, with_bias),
        second(hidden, width, with_bias),
        activation(f),
        first_name_(std::move(first_name)),
        second_name_(std::move(second_name)) {}

  void forward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y) {
    require_extents(x, x.rows, first.in(), "Mlp::forward", "x");
    require_extents(y, x.rows, second.out(), "Mlp::forward", "y");
    hidden_.resize(x.rows, first.out());
    work_.resize(x.rows, first.out());
    first.forward(c, x, hidden_.view());
    activate(c, activation, hidden_.view(), work_.view());
    second.forward(c, work_.view(), y);
  }

  // Adds to the weights' gradients; writes dx, or adds to it, unless it is not given. dx may be dy.
  void backward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, Into into = Into::overwrite) {
    require(x.rows == hidden_.rows(), "Mlp::backward: x has ", x.rows, " rows, forward's had ",
            hidden_.rows());
    require_extents(x, x.rows, first.in(), "Mlp::backward", "x");
    require_extents(dy, x.rows, second.out(), "Mlp::backward", "dy");
    if (dx.given()) require_extents(dx, x.rows, first.in(), "Mlp::backward", "dx");
    activate(c, activation, hidden_.view(), work_.view());
    detail::backward_in_place(c, second, work_.view(), dy);
    activate_backward(c, activation, hidden_.view(), work_.view(), work_.view());
    first.backward(c, x, work_.view(), dx, into);
  }

  void visit(const Visitor<Real>& f) {
    visit_part(first_name_, first, f);
    visit_part(second_name_, second, f);
  }

 private:
  std::string first_name_, second_name_;
  Matrix<Real> hidden_;  // before the activation
  Matrix<Real> work_;
};

// The gated kind; its layers have no biases.
template <class Real>
class SwiGlu {
 public:
  Linear<Real> gate, up, down;

  SwiGlu() = default;
  SwiGlu(Index width, Index hidden)
      : gate(width, hidden, false), up(width, hidden, false), down(hidden, width, false) {}

  void forward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<Real>& y) {
    require_extents(x, x.rows, gate.in(), "SwiGlu::forward", "x");
    require_extents(y, x.rows, down.out(), "SwiGlu::forward", "y");
    for (Matrix<Real>* m : {&gate_, &up_, &work_}) m->resize(x.rows, gate.out());
    gate.forward(c, x, gate_.view());
    up.forward(c, x, up_.view());
    multiply_by_gate(c, up_.view(), work_.view());
    down.forward(c, work_.view(), y);
  }

  // Adds to the weights' gradients; writes dx, or adds to it, unless it is not given. dx may be dy.
  void backward(Context<Real>& c, const MatrixView<const Real>& x, const MatrixView<const Real>& dy,
                const MatrixView<Real>& dx, Into into = Into::overwrite) {
    require(x.rows == gate_.rows(), "SwiGlu::backward: x has ", x.rows, " rows, forward's had ",
            gate_.rows());
    require_extents(x, x.rows, gate.in(), "SwiGlu::backward", "x");
    require_extents(dy, x.rows, down.out(), "SwiGlu::backward", "dy");
    if (dx.given()) require_extents(dx, x.rows, gate.in(), "SwiGlu::backward", "dx");
    multiply_by_gate(c, up_.view(), work_.view());
    detail::backward_in_place(c, down, work_.view(), dy);
    gate_change_.resize(x.rows, gate.out());
    multiply_by_slope(c, work_.view(), gate_change_.view());
    multiply_by_gate(c, work_.view(), work_.view());
    gate.backward(c, x, gate_change_.view(), dx, into);
    up.backward(c, x, work_.view(), dx, Into::add);
  }

  void visit(const Visitor<Real>& f) {
    visit_part("gate", gate, f);
    visit_part("up", up, f);
    visit_part("down", down, f);
  }

 private:
  // out = silu(g) o factor
  void multiply_by_gate(Context<Real>& c, const MatrixView<const Real>& factor,
                        const MatrixView<Real>& out) {
    const MatrixView<Real> g = gate_.view();
    detail::for_lanes(c, g.rows, g.columns, [&](Index r, Index j, Index count) {
      const Pack<Real> value = detail::Silu<Real>::value(detail::load_lanes(g.row(r) + j, count));
      const Pack<Real> product = value * detail::load_lanes(factor.row(r) + j, count);
      detail::store_lanes(product, out.row(r) + j, count);
    });
  }
  // dg = dh o u o silu'(g)
  void multiply_by_slope(Context<Real>& c, const MatrixView<const Real>& dh,
                         const MatrixView<Real>& dg) {
    const MatrixView<Real> g = gate_.view(), u = up_.view();
    detail::for_lanes(c, g.rows, g.columns, [&](Index r, Index j, Index count) {
      const auto load = [&](const MatrixView<const Real>& from) {
        return detail::load_lanes(from.row(r) + j, count);
      };
      const Pack<Real> change = load(dh) * load(u) * detail::Silu<Real>::slope(load(g));
      detail::store_lanes(change, dg.row(r) + j, count);
    });
  }

  Matrix<Real> gate_, up_;
  Matrix<Real> work_, gate_change_;
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
