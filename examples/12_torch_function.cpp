// SPDX-License-Identifier: Apache-2.0

// Learn here: heed inside of PyTorch. A torch::autograd::Function around resonant attention reads tensors
// where they lie; its gradients, also of the op's parameters, are compared with those of torch's autograd.

#include <heed/attention.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

namespace {

using torch::Tensor;
using Context = torch::autograd::AutogradContext;

// heed reads rows of neighbouring numbers. Others are copied: those of an expanded or transposed gradient.
Tensor with_rows(const Tensor& x) { return x.stride(3) == 1 ? x : x.contiguous(); }

heed::TensorView<double> view(const Tensor& x) {
  return {x.data_ptr<double>(), {x.size(0), x.size(1), x.size(2), x.size(3)},
          {x.stride(0), x.stride(1), x.stride(2)}};
}

heed::Param<double> param(const Tensor& x) {
  const Tensor dense = x.contiguous();
  return {{x.numel()}, {dense.data_ptr<double>(), dense.data_ptr<double>() + x.numel()}};
}
Tensor tensor(heed::Param<double>& p) { return torch::from_blob(p.data(), p.size(), torch::kDouble).clone(); }

struct Kept : torch::CustomClassHolder {
  heed::Dar<double> op;
  heed::Saved<double> saved;
};

// Causal; query, key, value (batch, heads, len, dim), strength, vigilance (heads).
struct DarFunction : torch::autograd::Function<DarFunction> {
  static Tensor forward(Context* context, const Tensor& query, const Tensor& key, const Tensor& value,
                        const Tensor& strength, const Tensor& vigilance) {
    const Tensor q = with_rows(query), k = with_rows(key), v = with_rows(value);
    const Tensor out = torch::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
    const auto kept = c10::make_intrusive<Kept>();
    kept->op.score.strength = param(strength);
    kept->op.score.vigilance = param(vigilance);
    heed::forward(kept->op, {view(q), view(k), view(v), {}}, heed::causal<double>(), view(out), &kept->saved);
    context->save_for_backward({q, k, v, out});
    context->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return out;
  }

  static std::vector<Tensor> backward(Context* context, const std::vector<Tensor>& grads) {
    const auto saved = context->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], grad_out = with_rows(grads[0]);
    const auto capsule = context->saved_data["kept"].toCapsule();
    const auto& kept = static_cast<const Kept&>(*capsule);
    const auto like = [](const Tensor& x) { return torch::empty(x.sizes(), x.options()); };
    const Tensor dq = like(q), dk = like(k), dv = like(v);
    heed::Dar<double> grad_op;
    heed::backward(kept.op, {view(q), view(k), view(v), {}}, heed::causal<double>(), kept.saved,
                   view(saved[3]), view(grad_out), {view(dq), view(dk), view(dv), {}, {}}, &grad_op);
    return {dq, dk, dv, tensor(grad_op.score.strength), tensor(grad_op.score.vigilance)};
  }
};

// The formula in torch's words, with the op's defaults sharpness 8 and eps 1e-8.
Tensor in_torch(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& strength,
                const Tensor& vigilance) {
  const auto direction = [](const Tensor& x) { return x / (x.norm(2, -1, true) + 1e-8); };
  const Tensor cosine = torch::matmul(direction(q), direction(k).transpose(2, 3));
  const Tensor resonance = torch::sigmoid(8 * (cosine - vigilance.view({-1, 1, 1})));
  const Tensor logit = torch::matmul(q, k.transpose(2, 3)) / std::sqrt(double(q.size(3)));
  const Tensor hidden = torch::ones({q.size(2), k.size(2)}, torch::kBool).triu(1);
  const Tensor score = (logit + strength.view({-1, 1, 1}) * resonance)
                           .masked_fill(hidden, -std::numeric_limits<double>::infinity());
  return torch::matmul(torch::softmax(score, -1), v);
}

}  // namespace

int main() {
  torch::manual_seed(1);
  const int batch = 2, len = 50, heads = 3, dim = 16;
  const auto learnable = torch::dtype(torch::kDouble).requires_grad(true);
  const Tensor packed = torch::randn({batch, len, 3, heads, dim}, learnable);
  const auto part = [&](int i) { return packed.select(2, i).transpose(1, 2); };  // no copy
  const std::vector<Tensor> in = {part(0), part(1), part(2), torch::rand(heads, learnable),
                                  torch::rand(heads, learnable)};
  const Tensor ours = DarFunction::apply(in[0], in[1], in[2], in[3], in[4]);
  const Tensor theirs = in_torch(in[0], in[1], in[2], in[3], in[4]);
  const Tensor grad_out = torch::randn({batch, heads, dim, len}, torch::kDouble).transpose(2, 3);
  const auto our_grads = torch::autograd::grad({ours}, in, {grad_out});
  const auto their_grads = torch::autograd::grad({theirs}, in, {grad_out});

  double worst = (ours - theirs).abs().max().item<double>();
  for (std::size_t i = 0; i < in.size(); ++i)
    worst = std::max(worst, (our_grads[i] - their_grads[i]).abs().max().item<double>());
  std::printf("output and gradients of query, key, value, strength, vigilance: %.1e from torch's at most\n",
              worst);
  return worst < 1e-11 ? 0 : 1;
}
