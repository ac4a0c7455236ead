// SPDX-License-Identifier: Apache-2.0
#pragma once

// One call of an op: its tensors, forward(), backward() and every gradient by name. Checks, timings, tests,
// benchmarks and the comparison all run ops through this class.
//
//   OpCall call(op, geometry, causal<float>());        // on memory of its own, normal numbers
//   call.forward();
//   call.backward();
//   for (const NamedTensor& gradient : call.gradients()) ...
//
//   const CallViews<float> tensors{{query, key, value}, out, grad_out, {grad_query, grad_key, grad_value}};
//   OpCall call(op, tensors, causal<float>());         // on the caller's memory, of any layout

#include <heed/check/named_tensor.hpp>
#include <heed/core/random.hpp>
#include <heed/engine/doors.hpp>

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// The tensors of one call, wherever they lie. `grad_out` and `grads` are for backward(); a gradient without a view
// is not computed.
template <class Real>
struct CallViews {
  Inputs<Real> inputs;
  StoredView<Real> out;
  StoredView<const Real> grad_out = {};
  Gradients<Real> grads = {};
};

// The numbers that a call reads, dense (batch, heads, len, dim); `extra` and the inputs per token
// are empty where the op reads none.
template <class Real>
struct CallNumbers {
  std::vector<Real> query, key, value, extra, grad_out;
  std::vector<Real> query_inputs = {}, key_inputs = {};
};

// What the tensors of an op's call depend on beside the geometry.
struct CallColumns {
  Index extra, query_inputs, key_inputs, maps;
};
template <class Op>
[[nodiscard]] CallColumns call_columns(const Op& op, const Geometry& g) {
  return {op.extra_dim(g), InputColumns<Op>::query, InputColumns<Op>::key,
          Op::NormaliserType::maps};
}

// Normal numbers, the same for the same geometry; beyond a million they repeat.
template <class Real>
[[nodiscard]] CallNumbers<Real> normal_numbers(const CallColumns& columns, const Geometry& g) {
  constexpr std::size_t distinct = 1 << 20;
  std::uint64_t stream = 0;
  const auto draw = [&](const Shape& shape) {
    const CounterRandom random(20240607, ++stream);
    std::vector<Real> x(std::size_t(element_count(shape, "normal_numbers")));
    for (std::size_t i = 0; i < x.size(); ++i)
      x[i] = i < distinct ? Real(random.normal(i)) : x[i - distinct];
    return x;
  };
  CallNumbers<Real> numbers;
  numbers.query = draw(g.query_shape());
  numbers.key = draw(g.key_shape());
  numbers.value = draw(g.value_shape());
  numbers.extra = draw(g.extra_shape(columns.extra));
  numbers.grad_out = draw(g.out_shape());
  numbers.query_inputs = draw({g.batch, g.heads, g.len_q, columns.query_inputs});
  numbers.key_inputs = draw({g.batch, g.heads, g.len_kv, columns.key_inputs});
  return numbers;
}
template <class Op>
[[nodiscard]] CallNumbers<typename Op::Scalar> normal_numbers(const Op& op, const Geometry& g) {
  return normal_numbers<typename Op::Scalar>(call_columns(op, g), g);
}

// What an OpCall holds and does that knows no op; compiled once for all ops of a scalar.
template <class Real>
class CallOfAnyOp {
 public:
  // Members that may be changed between calls, as long as sizes stay.
  Mask<Real> mask;
  Options options;
  // After forward(): what backward() reads.
  Saved<Real> saved;
  // Memory of the call's own, dense (batch, heads, len, dim); empty where it runs on the caller's tensors. The memory of
  // results holds NaN at first, so that a number that was not written cannot pass for one.
  std::vector<Real> query, key, value, extra, grad_out, query_inputs, key_inputs;
  std::vector<Real> out, grad_query, grad_key, grad_value, grad_extra, grad_query_inputs,
      grad_key_inputs;
  std::vector<Real> grad_bias;  // shape of the mask's bias
  // (batch, heads, len_q, maps). Neither is asked for while it is empty: lse_shape() says how many numbers they have.
  std::vector<Real> lse, grad_lse;
  // (batch, heads, len_q, step_columns), likewise, of ops that give steps: see steps_shape().
  std::vector<Real> steps, grad_steps;

  [[nodiscard]] const Geometry& geometry() const { return geometry_; }

  [[nodiscard]] Shape lse_shape() const {
    return {geometry_.batch, geometry_.heads, geometry_.len_q, columns_.maps};
  }

  [[nodiscard]] Inputs<Real> inputs() const {
    if (borrows_) return borrowed_.inputs;
    Inputs<Real> in{{query.data(), geometry_.query_shape()},
                    {key.data(), geometry_.key_shape()},
                    {value.data(), geometry_.value_shape()},
                    {}};
    in.first_query = geometry_.first_query;
    in.queries_at_end = geometry_.queries_at_end;
    if (extra_dim_ > 0) in.extra = {extra.data(), extra_shape()};
    if (columns_.query_inputs > 0) in.query_inputs = {query_inputs.data(), query_inputs_shape()};
    if (columns_.key_inputs > 0) in.key_inputs = {key_inputs.data(), key_inputs_shape()};
    return in;
  }
  [[nodiscard]] StoredView<Real> out_view() {
    if (borrows_) return borrowed_.out;
    return {out.data(), geometry_.out_shape()};
  }
  [[nodiscard]] StoredView<const Real> grad_out_view() const {
    if (borrows_) return borrowed_.grad_out;
    return {grad_out.data(), geometry_.out_shape()};
  }

 protected:
  CallOfAnyOp(const CallColumns& columns, const Geometry& g, Mask<Real> under, const Options& with,
              CallNumbers<Real> numbers)
      : mask(std::move(under)),
        options(with),
        query(std::move(numbers.query)),
        key(std::move(numbers.key)),
        value(std::move(numbers.value)),
        extra(std::move(numbers.extra)),
        grad_out(std::move(numbers.grad_out)),
        query_inputs(std::move(numbers.query_inputs)),
        key_inputs(std::move(numbers.key_inputs)),
        columns_(columns),
        geometry_(g),
        extra_dim_(g.query_rows() > 0 ? Index(extra.size()) / g.query_rows() : columns.extra) {
    require_count(query, g.query_shape(), "query");
    require_count(key, g.key_shape(), "key");
    require_count(value, g.value_shape(), "value");
    require_count(extra, extra_shape(), "extra");
    require_count(grad_out, g.out_shape(), "grad_out");
    require_count(query_inputs, query_inputs_shape(), "query_inputs");
    require_count(key_inputs, key_inputs_shape(), "key_inputs");
    allocate(out, g.out_shape());
  }

  CallOfAnyOp(const CallColumns& columns, const CallViews<Real>& tensors, Mask<Real> under,
              const Options& with)
      : mask(std::move(under)),
        options(with),
        columns_(columns),
        borrowed_(tensors),
        borrows_(true) {
    const Shape &q = tensors.inputs.query.shape(), &k = tensors.inputs.key.shape(),
                &v = tensors.inputs.value.shape();
    geometry_ = {q.batch, tensors.out.shape().heads, q.heads, k.heads, q.len, k.len, q.dim,
                 v.dim,   tensors.inputs.first_query};
    geometry_.queries_at_end = tensors.inputs.queries_at_end;
  }

  [[nodiscard]] Outputs<Real> outputs(const Shape& steps_shape) {
    Outputs<Real> to = out_view();
    if (!lse.empty()) to.lse = {lse.data(), lse_shape()};
    if (!steps.empty()) to.steps = {steps.data(), steps_shape};
    return to;
  }
  [[nodiscard]] OutputGradients<Real> output_gradients(const Shape& steps_shape) {
    allocate_gradients();
    OutputGradients<Real> output = grad_out_view();
    if (!grad_lse.empty()) output.lse = {grad_lse.data(), lse_shape()};
    if (!grad_steps.empty()) output.steps = {grad_steps.data(), steps_shape};
    return output;
  }
  [[nodiscard]] Gradients<Real> gradient_views() {
    if (borrows_) return borrowed_.grads;
    Gradients<Real> grads{{grad_query.data(), geometry_.query_shape()},
                          {grad_key.data(), geometry_.key_shape()},
                          {grad_value.data(), geometry_.value_shape()},
                          {},
                          {}};
    if (extra_dim_ > 0) grads.extra = {grad_extra.data(), extra_shape()};
    if (columns_.query_inputs > 0)
      grads.query_inputs = {grad_query_inputs.data(), query_inputs_shape()};
    if (columns_.key_inputs > 0) grads.key_inputs = {grad_key_inputs.data(), key_inputs_shape()};
    if (mask.bias.given()) grads.bias = {grad_bias.data(), mask.bias.shape()};
    return grads;
  }

  // The tensors by name, and their gradients.
  [[nodiscard]] std::vector<NamedTensor> named_tensors() const {
    const Inputs<Real> in = inputs();
    std::vector<NamedTensor> named;
    add(named, {{"query", in.query},
                {"key", in.key},
                {"value", in.value},
                {"extra", in.extra},
                {"query_inputs", in.query_inputs},
                {"key_inputs", in.key_inputs},
                {"bias", mask.bias}});
    return named;
  }
  [[nodiscard]] std::vector<NamedTensor> named_gradients() {
    const Gradients<Real> grads = gradient_views();
    std::vector<NamedTensor> named;
    add(named, {{"query", grads.query},
                {"key", grads.key},
                {"value", grads.value},
                {"extra", grads.extra},
                {"query_inputs", grads.query_inputs},
                {"key_inputs", grads.key_inputs},
                {"bias", grads.bias}});
    return named;
  }

 private:
  struct NamedView {
    const char* name;
    StoredView<const Real> view;
  };
  static void add(std::vector<NamedTensor>& named, std::initializer_list<NamedView> views) {
    for (const NamedView& one : views)
      if (one.view.given()) named.push_back({one.name, dense_numbers<double>(one.view)});
  }
  [[nodiscard]] Shape extra_shape() const { return geometry_.extra_shape(extra_dim_); }
  [[nodiscard]] Shape query_inputs_shape() const {
    return inputs_shape(query_inputs, geometry_.len_q, columns_.query_inputs);
  }
  [[nodiscard]] Shape key_inputs_shape() const {
    return inputs_shape(key_inputs, geometry_.len_kv, columns_.key_inputs);
  }
  [[nodiscard]] Shape inputs_shape(const std::vector<Real>& inputs, Index len, Index count) const {
    const Index of_head = geometry_.batch * len * count;
    return {geometry_.batch, of_head > 0 ? Index(inputs.size()) / of_head : geometry_.heads, len,
            count};
  }

  static void require_count(const std::vector<Real>& numbers, const Shape& shape,
                            const char* name) {
    require(Index(numbers.size()) == element_count(shape, "OpCall"), "OpCall: ", name, " has ",
            numbers.size(), " numbers, its shape is ", shape);
  }
  static void allocate(std::vector<Real>& numbers, const Shape& shape) {
    const auto count = std::size_t(element_count(shape, "OpCall"));
    if (numbers.size() != count) numbers.assign(count, std::numeric_limits<Real>::quiet_NaN());
  }
  // Called by the first backward(), so that forward() alone takes no memory for gradients.
  void allocate_gradients() {
    if (borrows_) return;
    allocate(grad_query, geometry_.query_shape());
    allocate(grad_key, geometry_.key_shape());
    allocate(grad_value, geometry_.value_shape());
    allocate(grad_extra, extra_shape());
    allocate(grad_query_inputs, query_inputs_shape());
    allocate(grad_key_inputs, key_inputs_shape());
    allocate(grad_bias, mask.bias.shape());
  }

  CallColumns columns_;
  Geometry geometry_;
  Index extra_dim_ = 0;
  CallViews<Real> borrowed_;
  bool borrows_ = false;
};

template <class Op>
class OpCall : public CallOfAnyOp<typename Op::Scalar> {
  using Base = CallOfAnyOp<typename Op::Scalar>;

 public:
  using Real = typename Op::Scalar;
  using Base::mask, Base::options, Base::saved, Base::geometry, Base::inputs, Base::out_view;

  // It may be changed between calls, as long as sizes stay.
  Op op;
  // After backward(): the gradients of the parameters.
  Op grad_op;

  // A call on normal_numbers().
  OpCall(Op of, const Geometry& g, Mask<Real> under = {}, const Options& with = {})
      : OpCall(of, g, std::move(under), with, normal_numbers(of, g)) {}

  // A call on `numbers`. Throws std::invalid_argument where they do not fit the geometry. The number of heads of the inputs
  // per token follows from their count; forward() checks whether they and the extra input fit the op.
  OpCall(Op of, const Geometry& g, Mask<Real> under, const Options& with, CallNumbers<Real> numbers)
      : Base(call_columns(of, g), g, std::move(under), with, std::move(numbers)),
        op(of),
        grad_op(std::move(of)) {}

  // A call on the tensors of the caller, which must outlive it.
  OpCall(Op of, const CallViews<Real>& tensors, Mask<Real> under = {}, const Options& with = {})
      : Base({0, InputColumns<Op>::query, InputColumns<Op>::key, Op::NormaliserType::maps}, tensors,
             std::move(under), with),
        op(of),
        grad_op(std::move(of)) {}

  [[nodiscard]] Shape steps_shape() const {
    return {geometry().batch, geometry().heads, geometry().len_q,
            op.readout.step_columns(geometry())};
  }

  void forward() {
    heed::forward(op, inputs(), mask, this->outputs(steps_shape()), &saved, options);
  }
  // Runs forward() without saving what backward() needs.
  void infer() {
    heed::forward(op, inputs(), mask, this->outputs(steps_shape()), nullptr, options);
  }

  // Needs a forward() before it.
  void backward() {
    const OutputGradients<Real> output = this->output_gradients(steps_shape());
    heed::backward(op, inputs(), mask, saved, out_view(), output, this->gradient_views(), &grad_op,
                   options);
  }

  // The tensors by name, as double: query, key, value, extra, query_inputs, key_inputs and bias where the call has them,
  // then the parameters under their parts (named_params). A gradient has the name of its tensor.
  [[nodiscard]] std::vector<NamedTensor> tensors() const {
    return with_params(this->named_tensors(), op);
  }
  // Needs a backward() before it.
  [[nodiscard]] std::vector<NamedTensor> gradients() {
    return with_params(this->named_gradients(), grad_op);
  }

 private:
  [[nodiscard]] static std::vector<NamedTensor> with_params(std::vector<NamedTensor> named,
                                                            const Op& of) {
    std::vector<NamedTensor> params = named_params(of);
    std::move(params.begin(), params.end(), std::back_inserter(named));
    return named;
  }
};

}  // namespace HEED_ABI
}  // namespace heed
