// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed sequences, and the same sequences in calls of their own, whose tensors are cut out here number by number.

#include "share_call.hpp"

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace heed_test {

struct Lengths {
  std::vector<Index> queries, keys;

  [[nodiscard]] Index count() const { return Index(queries.size()); }
  [[nodiscard]] static std::vector<Index> sums(const std::vector<Index>& lengths) {
    std::vector<Index> at(1, 0);
    for (const Index length : lengths) at.push_back(at.back() + length);
    return at;
  }
  template <class T>
  [[nodiscard]] heed::Packed<T> packed() const {
    heed::Packed<T> packed;
    packed.queries = sums(queries);
    if (keys != queries) packed.keys = sums(keys);
    return packed;
  }
};

// The mask of sequence n, and that of all of them packed.
template <class T>
struct PackedMask {
  std::string name;
  Mask<T> all;
  std::function<Mask<T>(Index n)> of;
  // The shape of the bias, (batch, heads, longest len_q, longest len_kv), if there is one.
  Shape bias = {};
};

// Runs forward and backward of `op` on packed sequences, and compares all results with calls on
// each sequence. g has no lengths.
template <class Op>
void check_packed(const std::string& name, const Op& op, Geometry g, const Lengths& lengths,
                  const PackedMask<typename Op::Scalar>& mask, Options options = {}) {
  using T = typename Op::Scalar;
  using heed::StoredView;
  const heed::Packed<T> packed = lengths.packed<T>();
  const std::vector<Index> q_at = Lengths::sums(lengths.queries),
                           k_at = Lengths::sums(lengths.keys);
  g.batch = 1;
  g.len_q = q_at.back();
  g.len_kv = k_at.back();
  INFO(name << ", " << mask.name << ", threads " << options.threads);
  constexpr Index maps = Op::NormaliserType::maps;
  const bool gives_steps = op.readout.without_steps() == nullptr;
  const bool gives_lse = Op::NormaliserType::differentiates_lse;

  heed::OpCall<Op> all(op, g, mask.all, options);
  heed::PackedInputs<T> in = all.inputs();
  in.packed = &packed;
  const Shape lse_shape{1, g.heads, g.len_q, maps}, steps_shape{1, g.heads, g.len_q, 1};
  std::vector<T> lse(std::size_t(g.heads * g.len_q * maps)),
      steps(std::size_t(gives_steps ? g.heads * g.len_q : 0)), grad_lse(lse.size()),
      grad_steps(steps.size());
  for (std::size_t i = 0; i < lse.size(); ++i) grad_lse[i] = T(0.1) * T(std::sin(double(i)));
  for (std::size_t i = 0; i < steps.size(); ++i) grad_steps[i] = T(0.1) * T(std::cos(double(i)));
  const auto lse_view = [&](auto& of) { return heed::TensorView(of.data(), lse_shape); };
  const auto steps_view = [&](auto& of) { return heed::TensorView(of.data(), steps_shape); };
  heed::Outputs<T> out(all.out.data(), g.out_shape());
  out.lse = lse_view(lse);
  if (gives_steps) out.steps = steps_view(steps);
  heed::forward(op, in, mask.all, out, &all.saved, options);

  const T nan = std::numeric_limits<T>::quiet_NaN();
  const auto room = [&](const Shape& shape) {
    return std::vector<T>(std::size_t(heed::element_count(shape, "test")), nan);
  };
  std::vector<T> dq = room(g.query_shape()), dk = room(g.key_shape()), dv = room(g.value_shape()),
                 de(all.extra.size(), nan), dqi(all.query_inputs.size(), nan),
                 dki(all.key_inputs.size(), nan), dbias = room(mask.bias);
  heed::Gradients<T> grads{
      {dq.data(), g.query_shape()}, {dk.data(), g.key_shape()}, {dv.data(), g.value_shape()}};
  if (!de.empty()) grads.extra = {de.data(), in.extra.shape()};
  if (!dqi.empty()) grads.query_inputs = {dqi.data(), in.query_inputs.shape()};
  if (!dki.empty()) grads.key_inputs = {dki.data(), in.key_inputs.shape()};
  if (!dbias.empty()) grads.bias = {dbias.data(), mask.bias};
  heed::OutputGradients<T> output(all.grad_out.data(), g.out_shape());
  if (gives_lse) output.lse = lse_view(std::as_const(grad_lse));
  if (gives_steps) output.steps = steps_view(std::as_const(grad_steps));
  Op grad_op = op;
  heed::backward(op, in, mask.all, all.saved, StoredView<const T>(all.out.data(), g.out_shape()),
                 output, grads, &grad_op, options);

  std::vector<double> sums;  // sums of the parameters' gradients
  std::vector<double> dbias_sum(dbias.size());
  for (Index n = 0; n < lengths.count(); ++n) {
    const std::size_t i = std::size_t(n);
    INFO("sequence " << n << " of " << lengths.queries[i] << " queries, " << lengths.keys[i]
                     << " keys");
    Geometry own = g;
    own.len_q = lengths.queries[i];
    own.len_kv = lengths.keys[i];
    const auto of_queries = [&](const std::vector<T>& x, Index heads) {
      return cut_rows(x, heads, g.len_q, q_at[i], own.len_q);
    };
    const auto of_keys = [&](const std::vector<T>& x, Index heads) {
      return cut_rows(x, heads, g.len_kv, k_at[i], own.len_kv);
    };
    Options with = options;
    with.dropout.first_batch = n;
    heed::OpCall<Op> one(op, own, mask.of(n), with,
                         {of_queries(all.query, g.query_heads), of_keys(all.key, g.kv_heads),
                          of_keys(all.value, g.kv_heads), of_queries(all.extra, g.heads),
                          of_queries(all.grad_out, g.heads), of_queries(all.query_inputs, g.heads),
                          of_keys(all.key_inputs, g.heads)});
    one.lse.assign(std::size_t(g.heads * own.len_q * maps), T(0));
    if (gives_steps) one.steps.assign(std::size_t(g.heads * own.len_q), T(0));
    if (gives_lse) one.grad_lse = of_queries(grad_lse, g.heads);
    if (gives_steps) one.grad_steps = of_queries(grad_steps, g.heads);
    one.forward();
    one.backward();
    CHECK(same_bits(of_queries(all.out, g.heads), one.out));
    CHECK(same_bits(of_queries(lse, g.heads), one.lse));
    if (gives_steps) CHECK(same_bits(of_queries(steps, g.heads), one.steps));
    for (std::size_t d = 0; d < one.saved.diagnostics.size(); ++d)
      CHECK(same_bits(of_queries(all.saved.diagnostics[d], g.heads), one.saved.diagnostics[d]));
    CHECK(same_bits(of_queries(dq, g.query_heads), one.grad_query));
    CHECK(same_bits(of_keys(dk, g.kv_heads), one.grad_key));
    CHECK(same_bits(of_keys(dv, g.kv_heads), one.grad_value));
    if (!de.empty()) CHECK(same_bits(of_queries(de, g.heads), one.grad_extra));
    if (!dqi.empty()) CHECK(same_bits(of_queries(dqi, g.heads), one.grad_query_inputs));
    if (!dki.empty()) CHECK(same_bits(of_keys(dki, g.heads), one.grad_key_inputs));
    add_to(sums, numbers_of(one.grad_op));
    const Shape corner = one.mask.bias.shape();
    for (Index h = 0; h < corner.heads; ++h)
      for (Index r = 0; r < corner.len; ++r)
        for (Index c = 0; c < corner.dim; ++c) {
          const Index batch = mask.bias.batch == 1 ? 0 : n;
          dbias_sum[std::size_t(((batch * corner.heads + h) * mask.bias.len + r) * mask.bias.dim +
                                c)] +=
              double(one.grad_bias[std::size_t((h * corner.len + r) * corner.dim + c)]);
        }
  }
  constexpr double eps = kShareBound<T>;
  double worst = 0;
  for (std::size_t i = 0; i < dbias.size(); ++i) {
    const double error = std::abs(double(dbias[i]) - dbias_sum[i]) / (1 + std::abs(dbias_sum[i]));
    if (!(error <= worst || std::isnan(worst))) worst = error;
  }
  CHECK(worst <= eps);
  std::size_t at = 0;
  double largest = 1;
  for (const double sum : sums) largest = std::max(largest, std::abs(sum));
  grad_op.visit([&](const char* param_name, const auto& param) {
    for (Index p = 0; p < param.size(); ++p, ++at) {
      INFO("gradient of " << param_name);
      CHECK(std::abs(double(param[p]) - (sums.empty() ? 0 : sums[at])) <= eps * largest);
    }
  });
}

}  // namespace heed_test
