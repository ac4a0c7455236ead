// SPDX-License-Identifier: Apache-2.0
#pragma once

// One call of an op with random inputs, and all that its passes return: what checks and timings run.

#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>

#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// Dense (batch, heads, len, dim) memory; normal numbers, the same for the same geometry.
template <class Op>
class OpCall {
 public:
  using Real = typename Op::Scalar;

  Op op;
  Op grad_op;  // after backward()
  Geometry geometry;
  Mask<Real> mask;
  Options options;
  std::vector<Real> query, key, value, extra, grad_out;
  std::vector<Real> out, grad_query, grad_key, grad_value, grad_extra;
  std::vector<Real> grad_bias;  // dense, of the shape of the mask's bias

  OpCall(Op of, const Geometry& g, Mask<Real> under = {}, const Options& with = {})
      : op(of), grad_op(std::move(of)), geometry(g), mask(std::move(under)), options(with) {
    std::uint64_t stream = 0;
    const auto draw = [&](std::vector<Real>& numbers, const Shape& shape) {
      const CounterRandom random(20240607, ++stream);
      numbers.resize(std::size_t(element_count(shape, "OpCall")));
      for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = Real(random.normal(i));
    };
    draw(query, query_shape());
    draw(key, key_shape());
    draw(value, value_shape());
    draw(extra, extra_shape());
    draw(grad_out, out_shape());
    out.resize(grad_out.size());
    grad_query.resize(query.size());
    grad_key.resize(key.size());
    grad_value.resize(value.size());
    grad_extra.resize(extra.size());
    grad_bias.resize(std::size_t(element_count(mask.bias.shape(), "OpCall")));
  }

  void forward() {
    heed::forward(op, inputs(), mask, TensorView<Real>(out.data(), out_shape()), &saved_, options);
  }
  // After forward().
  void backward() {
    Gradients<Real> grads{{grad_query.data(), query_shape()},
                          {grad_key.data(), key_shape()},
                          {grad_value.data(), value_shape()},
                          {},
                          {}};
    if (!extra.empty()) grads.extra = {grad_extra.data(), extra_shape()};
    if (!grad_bias.empty()) grads.bias = {grad_bias.data(), mask.bias.shape()};
    heed::backward(op, inputs(), mask, saved_, TensorView<const Real>(out.data(), out_shape()),
                   TensorView<const Real>(grad_out.data(), out_shape()), grads, &grad_op, options);
  }

  [[nodiscard]] Inputs<Real> inputs() const {
    Inputs<Real> in{{query.data(), query_shape()},
                    {key.data(), key_shape()},
                    {value.data(), value_shape()},
                    {}};
    if (!extra.empty()) in.extra = {extra.data(), extra_shape()};
    return in;
  }

 private:
  [[nodiscard]] Shape query_shape() const {
    return {geometry.batch, geometry.query_heads, geometry.len_q, geometry.dim_qk};
  }
  [[nodiscard]] Shape key_shape() const {
    return {geometry.batch, geometry.kv_heads, geometry.len_kv, geometry.dim_qk};
  }
  [[nodiscard]] Shape value_shape() const {
    return {geometry.batch, geometry.kv_heads, geometry.len_kv, geometry.dim_v};
  }
  [[nodiscard]] Shape extra_shape() const {
    return {geometry.batch, geometry.heads, geometry.len_q, op.extra_dim(geometry)};
  }
  [[nodiscard]] Shape out_shape() const {
    return {geometry.batch, geometry.heads, geometry.len_q, geometry.dim_v};
  }

  Saved<Real> saved_;
};

}  // namespace HEED_ABI
}  // namespace heed
