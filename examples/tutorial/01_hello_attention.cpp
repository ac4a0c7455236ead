// SPDX-License-Identifier: Apache-2.0

// Step 1 of 15. You learn the two calls of heed, forward() and backward(). They run resonant attention over two
// sequences that lie in plain memory, (batch, len, heads, dim), and give the gradients of its inputs and of its
// parameter `strength`.

#include <heed/attention.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  using namespace heed;
  const Index batch = 2, len = 128, heads = 4, dim = 32;
  const std::size_t count = batch * len * heads * dim;
  std::vector<float> query(count), key(count), value(count), out(count), grad_out(count, 1.0F);
  for (std::size_t i = 0; i < count; ++i) {
    query[i] = 0.01F * float(i % 97) - 0.5F;
    key[i] = 0.01F * float(i % 89) - 0.4F;
    value[i] = 0.01F * float(i % 83) + 0.1F;
  }
  const auto view = [&](auto& memory) { return view_bthd(memory.data(), batch, len, heads, dim); };

  Dar<float> op;
  op.score.strength = {0.1F, 0.2F, 0.3F, 0.4F};  // one per head
  const auto mask = causal<float>() & key_lengths<float>({128, 100});
  const Inputs<float> in{view(query), view(key), view(value)};
  Saved<float> saved;  // the numbers that backward needs
  forward(op, in, mask, view(out), &saved);

  std::vector<float> grad_query(count), grad_key(count), grad_value(count);
  Dar<float> grad_op;
  backward(op, in, mask, saved, TensorView<const float>(view(out)),
           TensorView<const float>(view(grad_out)),
           {view(grad_query), view(grad_key), view(grad_value)}, &grad_op);

  std::printf("out[0] = %.6f, dL/dstrength of head 0 = %.6f\n", double(out[0]),
              double(grad_op.score.strength[0]));
  return std::abs(out[0] - value[0]) < 1e-6F ? 0 : 1;  // the first token sees itself alone
}
