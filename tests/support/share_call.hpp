// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shares of a call: rows of its tensors, cut out number by number.

#include "catch.hpp"

#include <heed/check/op_call.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace heed_test {

using heed::Geometry;
using heed::Index;
using heed::Mask;
using heed::Options;
using heed::Shape;

// Rows [first, first + len) of each head of dense (heads of all batches, total, dim).
template <class T>
[[nodiscard]] std::vector<T> cut_rows(const std::vector<T>& x, Index heads, Index total,
                                      Index first, Index len) {
  const Index dim = heads * total > 0 ? Index(x.size()) / (heads * total) : 0;
  std::vector<T> part;
  for (Index h = 0; h < heads; ++h)
    part.insert(part.end(), x.begin() + (h * total + first) * dim,
                x.begin() + (h * total + first + len) * dim);
  return part;
}

template <class T>
[[nodiscard]] bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The largest difference, relative to the largest number of both and 1.
template <class T, class U>
[[nodiscard]] double worst_difference(const std::vector<T>& a, const std::vector<U>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double worst = 0, largest = 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max({largest, std::abs(double(a[i])), std::abs(double(b[i]))});
    const double difference = std::abs(double(a[i]) - double(b[i]));
    if (!(difference <= worst)) worst = difference;
  }
  return worst / largest;
}
template <class T>
void add_to(std::vector<double>& sums, const std::vector<T>& terms) {
  sums.resize(terms.size());
  for (std::size_t i = 0; i < terms.size(); ++i) sums[i] += double(terms[i]);
}
template <class Op>
[[nodiscard]] std::vector<double> numbers_of(const Op& op) {
  std::vector<double> numbers;
  op.visit([&](const char*, const auto& param) {
    for (Index i = 0; i < param.size(); ++i) numbers.push_back(double(param[i]));
  });
  return numbers;
}

// Allowed difference of sums that are added in another order: some hundred terms of about 1.
template <class T>
inline constexpr double kShareBound = 400 * double(std::numeric_limits<T>::epsilon());

// A whole call with lse, steps if the op gives them, and gradients of all of them.
template <class Op>
[[nodiscard]] heed::OpCall<Op> whole_call(heed::OpCall<Op> call) {
  using T = typename Op::Scalar;
  const Op& op = call.op;
  const Geometry g = call.geometry();
  const auto rows = std::size_t(g.query_rows());
  call.lse.assign(rows * Op::NormaliserType::maps, T(0));
  const auto fill = [](std::vector<T>& x, std::size_t count, double step) {
    x.resize(count);
    for (std::size_t i = 0; i < count; ++i) x[i] = T(0.1 * std::sin(step * double(i)));
  };
  if (Op::NormaliserType::differentiates_lse) fill(call.grad_lse, call.lse.size(), 1.0);
  if (op.readout.without_steps() == nullptr) {
    const std::size_t numbers = rows * std::size_t(op.readout.step_columns(g));
    call.steps.assign(numbers, T(0));
    fill(call.grad_steps, numbers, 0.7);
  }
  call.forward();
  call.backward();
  return call;
}
template <class Op>
[[nodiscard]] heed::OpCall<Op> whole_call(const Op& op, const Geometry& g,
                                          const Mask<typename Op::Scalar>& mask,
                                          const Options& options) {
  return whole_call(heed::OpCall<Op>(op, g, mask, options));
}

// Tensors of some rows of a whole call, and their results. queries(x, heads) and of_keys(x, heads)
// give the rows of a tensor (batch, heads, len, dim) of the whole call.
template <class Op>
struct RowTensors {
  using T = typename Op::Scalar;
  Geometry g;  // geometry of the whole call
  Index len, keys;
  Index query_input_heads, key_input_heads;
  std::vector<T> query, key, value, extra, grad_out, grad_lse, grad_steps, query_inputs, key_inputs;
  std::vector<T> out, lse, steps, dq, dk, dv, dextra, dquery_inputs, dkey_inputs, dbias;
  Op grad_op;

  template <class Queries, class Keys>
  RowTensors(const heed::OpCall<Op>& whole, Index rows, Index count, const Queries& queries,
             const Keys& of_keys)
      : g(whole.geometry()),
        len(rows),
        keys(count),
        query_input_heads(whole.inputs().query_inputs.shape().heads),
        key_input_heads(whole.inputs().key_inputs.shape().heads),
        query(queries(whole.query, g.query_heads)),
        key(of_keys(whole.key, g.kv_heads)),
        value(of_keys(whole.value, g.kv_heads)),
        extra(queries(whole.extra, g.heads)),
        grad_out(queries(whole.grad_out, g.heads)),
        grad_lse(queries(whole.grad_lse, g.heads)),
        grad_steps(queries(whole.grad_steps, g.heads)),
        query_inputs(queries(whole.query_inputs, query_input_heads)),
        key_inputs(of_keys(whole.key_inputs, key_input_heads)),
        grad_op(whole.op) {
    const T nan = std::numeric_limits<T>::quiet_NaN();
    out.assign(grad_out.size(), nan);
    lse.assign(queries(whole.lse, g.heads).size(), nan);
    steps.assign(grad_steps.size(), nan);
    dq.assign(query.size(), nan);
    dk.assign(key.size(), nan);
    dv.assign(value.size(), nan);
    dextra.assign(extra.size(), nan);
    dquery_inputs.assign(query_inputs.size(), nan);
    dkey_inputs.assign(key_inputs.size(), nan);
    dbias.assign(whole.grad_bias.size(), nan);
  }

  // The inputs, without Inputs::share.
  [[nodiscard]] heed::Inputs<T> inputs() const {
    heed::Inputs<T> in{{query.data(), {g.batch, g.query_heads, len, g.dim_qk}},
                       {key.data(), {g.batch, g.kv_heads, keys, g.dim_qk}},
                       {value.data(), {g.batch, g.kv_heads, keys, g.dim_v}},
                       {}};
    in.first_query = g.first_query;
    using Columns = heed::InputColumns<Op>;
    if (const Index width = grad_op.extra_dim(g)) in.extra = {extra.data(), rows_of(width)};
    if (Columns::query > 0)
      in.query_inputs = {query_inputs.data(), {g.batch, query_input_heads, len, Columns::query}};
    if (Columns::key > 0)
      in.key_inputs = {key_inputs.data(), {g.batch, key_input_heads, keys, Columns::key}};
    return in;
  }
  [[nodiscard]] Shape rows_of(Index dim) const { return {g.batch, g.heads, len, dim}; }
  [[nodiscard]] Index step_columns() const { return grad_op.readout.step_columns(g); }
  [[nodiscard]] heed::Outputs<T> outputs() {
    heed::Outputs<T> to(out.data(), rows_of(g.dim_v));
    to.lse = {lse.data(), rows_of(Op::NormaliserType::maps)};
    if (grad_op.readout.without_steps() == nullptr)
      to.steps = {steps.data(), rows_of(step_columns())};
    return to;
  }
  [[nodiscard]] heed::OutputGradients<T> output_gradients() const {
    heed::OutputGradients<T> of(grad_out.data(), rows_of(g.dim_v));
    if (Op::NormaliserType::differentiates_lse)
      of.lse = {grad_lse.data(), rows_of(Op::NormaliserType::maps)};
    if (grad_op.readout.without_steps() == nullptr)
      of.steps = {grad_steps.data(), rows_of(step_columns())};
    return of;
  }
  [[nodiscard]] heed::Gradients<T> gradients(const Shape& bias = {}) {
    const heed::Inputs<T> in = inputs();
    heed::Gradients<T> to{
        {dq.data(), in.query.shape()}, {dk.data(), in.key.shape()}, {dv.data(), in.value.shape()}};
    if (in.extra.given()) to.extra = {dextra.data(), in.extra.shape()};
    if (in.query_inputs.given()) to.query_inputs = {dquery_inputs.data(), in.query_inputs.shape()};
    if (in.key_inputs.given()) to.key_inputs = {dkey_inputs.data(), in.key_inputs.shape()};
    if (!dbias.empty()) to.bias = {dbias.data(), bias};
    return to;
  }
};

// Queries [at, at + rows) and keys [at_key, at_key + count) of a whole call.
template <class Op>
struct ShareTensors : RowTensors<Op> {
  using Rows = RowTensors<Op>;
  using Rows::g, Rows::len, Rows::keys;
  using typename Rows::T;
  Index first, first_key;
  heed::Saved<T> saved;

  ShareTensors(const heed::OpCall<Op>& whole, Index at, Index rows, Index at_key, Index count)
      : Rows(
            whole, rows, count,
            [&, sizes = whole.geometry()](const std::vector<T>& x, Index heads) {
              return cut_rows(x, sizes.batch * heads, sizes.len_q, at, rows);
            },
            [&, sizes = whole.geometry()](const std::vector<T>& x, Index heads) {
              return cut_rows(x, sizes.batch * heads, sizes.len_kv, at_key, count);
            }),
        first(at),
        first_key(at_key) {}

  [[nodiscard]] std::vector<T> queries(const std::vector<T>& x, Index heads) const {
    return cut_rows(x, g.batch * heads, g.len_q, first, len);
  }
  [[nodiscard]] std::vector<T> of_keys(const std::vector<T>& x, Index heads) const {
    return cut_rows(x, g.batch * heads, g.len_kv, first_key, keys);
  }
  // Compares bits of out, lse, steps and the gradients of queries' tensors.
  void check_bits(const heed::OpCall<Op>& whole) const {
    CHECK(same_bits(this->out, queries(whole.out, g.heads)));
    CHECK(same_bits(this->lse, queries(whole.lse, g.heads)));
    CHECK(same_bits(this->steps, queries(whole.steps, g.heads)));
    CHECK(same_bits(this->dq, queries(whole.grad_query, g.query_heads)));
    CHECK(same_bits(this->dextra, queries(whole.grad_extra, g.heads)));
    CHECK(
        same_bits(this->dquery_inputs, queries(whole.grad_query_inputs, this->query_input_heads)));
  }
};

}  // namespace heed_test
