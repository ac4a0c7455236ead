// SPDX-License-Identifier: Apache-2.0

// Step 12 of 15. You learn to use heed inside of PyTorch. A torch::autograd::Function around resonant attention reads
// tensors where they lie. The gradients, that of each head's strength among them, are compared with torch's autograd.

#include <heed/attention.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

using torch::Tensor, torch::autograd::AutogradContext;

heed::TensorView<double> view(const Tensor& x) {
  return {x.data_ptr<double>(),
          {x.size(0), x.size(1), x.size(2), x.size(3)},
          {x.stride(0), x.stride(1), x.stride(2)}};
}

struct Kept : torch::CustomClassHolder {
  heed::Dar<double> op, grad_op;
  heed::Saved<double> saved;
};

struct DarFunction : torch::autograd::Function<DarFunction> {
  static Tensor forward(AutogradContext* context, Tensor q, Tensor k, Tensor v, Tensor strength) {
    const Tensor out = torch::empty(v.sizes(), v.options());
    const auto kept = c10::make_intrusive<Kept>();
    const double* heads = strength.data_ptr<double>();
    kept->op.score.strength = {{strength.numel()}, {heads, heads + strength.numel()}};
    heed::forward(kept->op, {view(q), view(k), view(v)}, heed::causal<double>(), view(out),
                  &kept->saved);
    context->save_for_backward({q, k, v, out});
    context->saved_data["kept"] = c10::IValue::make_capsule(kept);
    return out;
  }
  static std::vector<Tensor> backward(AutogradContext* context, std::vector<Tensor> grads) {
    const auto in = context->get_saved_variables();
    const auto capsule = context->saved_data["kept"].toCapsule();
    auto& kept = static_cast<Kept&>(*capsule);
    const Tensor d[] = {torch::empty_like(in[0]), torch::empty_like(in[1]),
                        torch::empty_like(in[2])};
    const Tensor grad_out = grads[0].contiguous();  // heed reads rows of neighbouring numbers
    heed::backward(kept.op, {view(in[0]), view(in[1]), view(in[2])}, heed::causal<double>(),
                   kept.saved, view(in[3]), view(grad_out), {view(d[0]), view(d[1]), view(d[2])},
                   &kept.grad_op);
    auto& strength = kept.grad_op.score.strength;
    return {d[0], d[1], d[2],
            torch::from_blob(strength.data(), strength.size(), torch::kDouble).clone()};
  }
};

// The op's formula in torch's words: vigilance 0.6, sharpness 8.
Tensor in_torch(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& strength) {
  const auto direction = [](const Tensor& x) { return x / (x.norm(2, -1, true) + 1e-8); };
  const Tensor resonance =
      torch::sigmoid(8 * (direction(q).matmul(direction(k).transpose(2, 3)) - 0.6));
  const Tensor score = q.matmul(k.transpose(2, 3)) / 4.0 + strength.view({-1, 1, 1}) * resonance;
  const Tensor hidden = torch::ones({50, 50}, torch::kBool).triu(1);
  return torch::softmax(score.masked_fill(hidden, -INFINITY), -1).matmul(v);
}

int main() {
  const auto learnable = torch::dtype(torch::kDouble).requires_grad(true);
  const Tensor packed =
      torch::randn({2, 50, 3, 4, 16}, learnable);  // batch, len, (q, k, v), heads, dim
  const Tensor q = packed.select(2, 0).transpose(1, 2), k = packed.select(2, 1).transpose(1, 2);
  const Tensor v = packed.select(2, 2).transpose(1, 2), strength = torch::rand(4, learnable);
  const Tensor ours = DarFunction::apply(q, k, v, strength), theirs = in_torch(q, k, v, strength);
  const Tensor grad_out = torch::randn({2, 4, 16, 50}, torch::kDouble).transpose(2, 3);
  const auto our_grads = torch::autograd::grad({ours}, {q, k, v, strength}, {grad_out});
  const auto their_grads = torch::autograd::grad({theirs}, {q, k, v, strength}, {grad_out});

  double worst = (ours - theirs).abs().max().item<double>();
  for (std::size_t i = 0; i < 4; ++i)
    worst = std::max(worst, (our_grads[i] - their_grads[i]).abs().max().item<double>());
  std::printf("output and gradients are within %.1e of torch's\n", worst);
  return worst < 1e-11 ? 0 : 1;
}
