// SPDX-License-Identifier: Apache-2.0

// Step 14 of 15. You learn to use curvature: jvp() says how the output moves when the inputs move, hvp() how the gradients
// move. Resonant attention over a memory of keys and values learns to answer like another one. With H the Hessian of its
// loss, products H d give
//
//   the sharpness, H's largest eigenvalue, by repeated products; gradient descent is stable below 2 / sharpness
//   Newton's steps, H d = -gradient, by conjugate gradients that end where the curvature is not positive
//
// and no Hessian is ever stored.

#include <heed/core/random.hpp>
#include <heed/curvature.hpp>
#include <heed/ops/dar.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

using Vector = std::vector<double>;

Vector normal(heed::Index count, std::uint64_t stream) {
  const heed::CounterRandom random(1, stream);
  Vector x;
  for (heed::Index n = 0; n < count; ++n) x.push_back(random.normal(std::uint64_t(n)));
  return x;
}
double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (std::size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
}
// a + factor b
Vector plus(Vector a, double factor, const Vector& b) {
  for (std::size_t n = 0; n < a.size(); ++n) a[n] += factor * b[n];
  return a;
}

// Loss (1/2n) |out - target|^2 of a memory x: its keys, then its values.
class Memory {
 public:
  static constexpr heed::Geometry g{1, 2, 2, 1, 48, 12, 8, 8};
  static constexpr heed::Index keys = 12 * 8, size = 2 * keys;

  Vector answer(const Vector& x) const {
    Vector out(std::size_t(g.query_rows() * g.dim_v));
    heed::forward(op_, inputs(x), {}, {out.data(), g.out_shape()});
    return out;
  }
  void learn_from(const Vector& teacher) { target_ = answer(teacher); }

  double loss(const Vector& x) const {
    const Vector gap = plus(answer(x), -1, target_);
    return dot(gap, gap) / double(2 * gap.size());
  }
  // Also keeps the forward pass for product().
  Vector gradient(const Vector& x) {
    x_ = x;
    out_.resize(target_.size());
    heed::forward(op_, inputs(x_), {}, {out_.data(), g.out_shape()}, &saved_);
    grad_out_ = plus(out_, -1, target_);
    for (double& gap : grad_out_) gap /= double(grad_out_.size());
    Vector to(size);
    heed::backward(op_, inputs(x_), {}, saved_, view(out_), view(grad_out_), slots(to));
    return to;
  }
  // H d at the x of the last gradient().
  Vector product(const Vector& d) const {
    const heed::Inputs<double> moved = inputs(d);
    const heed::Tangents<double> tangents{{}, moved.key, moved.value};
    Vector out_tangent(out_.size()), to(size);
    heed::jvp(op_, inputs(x_), {}, saved_, view(out_), tangents,
              {out_tangent.data(), g.out_shape()});
    for (double& moves : out_tangent) moves /= double(out_.size());  // dL/dout moves with out
    heed::hvp(op_, inputs(x_), {}, saved_, view(out_), view(grad_out_), tangents, view(out_tangent),
              slots(to));
    return to;
  }

 private:
  heed::Inputs<double> inputs(const Vector& x) const {
    return {{query_.data(), g.query_shape()},
            {x.data(), g.key_shape()},
            {x.data() + keys, g.value_shape()}};
  }
  static heed::Gradients<double> slots(Vector& x) {
    return {{}, {x.data(), g.key_shape()}, {x.data() + keys, g.value_shape()}};
  }
  static heed::StoredView<const double> view(const Vector& rows) {
    return {rows.data(), g.out_shape()};
  }

  heed::Dar<double> op_;
  Vector query_ = normal(2 * 48 * 8, 1), target_, x_, out_, grad_out_;
  heed::Saved<double> saved_;
};

// The largest eigenvalue of H by repeated products.
double sharpness(const Memory& memory) {
  Vector d = normal(Memory::size, 2);
  double value = 0;
  for (int step = 0; step < 30; ++step) {
    d = plus(Vector(d.size()), 1 / std::sqrt(dot(d, d)), d);
    const Vector product = memory.product(d);
    value = dot(d, product);
    d = product;
  }
  return value;
}

// Solves H d = -gradient by conjugate gradients, up to where the curvature is not positive. Counts products.
Vector newton_step(const Memory& memory, const Vector& gradient, int& products) {
  Vector step(gradient.size()), rest = plus(step, -1, gradient), d = rest;
  const double enough = 1e-4 * dot(rest, rest);
  for (int n = 0; n < 20 && dot(rest, rest) > enough; ++n) {
    const Vector product = memory.product(d);
    ++products;
    const double curvature = dot(d, product), before = dot(rest, rest);
    if (curvature <= 1e-8 * dot(d, d)) return n == 0 ? rest : step;
    step = plus(step, before / curvature, d);
    rest = plus(rest, -before / curvature, product);
    d = plus(rest, dot(rest, rest) / before, d);
  }
  return step;
}

int main() {
  constexpr int kSteps = 12;
  Memory memory;
  const Vector teacher = normal(Memory::size, 3), start = normal(Memory::size, 4);
  memory.learn_from(teacher);
  Vector x = start;
  int products = 0;
  for (int step = 0; step < kSteps; ++step) {
    const Vector gradient = memory.gradient(x);
    std::printf("step %2d: loss %.6f, sharpness %.4f\n", step, memory.loss(x), sharpness(memory));
    const Vector d = newton_step(memory, gradient, products);
    double length = 1;
    while (memory.loss(plus(x, length, d)) > memory.loss(x) && length > 1e-6) length /= 2;
    x = plus(x, length, d);
  }
  const double newton = memory.loss(x);

  // Gradient descent with as many passes, for comparison: a product takes about two gradients.
  x = start;
  (void)memory.gradient(x);
  const double rate = 1 / sharpness(memory);
  const int steps = kSteps + 2 * products;
  for (int step = 0; step < steps; ++step) x = plus(x, -rate, memory.gradient(x));
  const double descent = memory.loss(x);
  std::printf(
      "loss %.6f; after %d steps of Newton with %d products %.6f, after %d steps of gradient "
      "descent %.6f\n",
      memory.loss(start), kSteps, products, newton, steps, descent);
  return newton < descent ? 0 : 1;
}
