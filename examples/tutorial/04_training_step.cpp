// SPDX-License-Identifier: Apache-2.0

// Step 4 of 15. You learn to train: a layer around an op, an optimiser, and a loop. Four heads of resonant attention
// between two projections learn to repeat the token before; the op's own parameters are learnt with the weights.

#include <heed/core/random.hpp>
#include <heed/nn/adamw.hpp>
#include <heed/nn/projected_attention.hpp>
#include <heed/ops/dar.hpp>

#include <cstdio>

int main() {
  using namespace heed;
  const Index batch = 4, len = 16, width = 32, tokens = batch * len;
  nn::ProjectedAttention<Dar<float>> layer(nn::AttentionOptions::even(width, 4), Dar<float>{},
                                           causal<float>());
  std::uint64_t stream = 0;
  layer.visit([&](const std::string& name, Param<float>& value, Param<float>&) {
    const CounterRandom random(1, ++stream);
    if (value.shape().size() > 1)
      for (Index i = 0; i < value.size(); ++i)
        value[i] = float(0.2 * random.normal(std::uint64_t(i)));
    std::printf("%s (%td)  ", name.c_str(), value.size());
  });

  nn::Matrix<float> x(tokens, width), y(tokens, width), dy(tokens, width), dx(tokens, width);
  const CounterRandom random(2, 1);
  for (Index t = 0; t < tokens; ++t)
    for (Index i = 0; i < width; ++i)
      x.view().row(t)[i] = float(random.normal(std::uint64_t(t * width + i)));

  nn::Context<float> context;
  nn::AdamW<float> optimiser;
  optimiser.options.learning_rate = 1e-2;
  double first = 0, loss = 0;
  for (int step = 0; step < 30; ++step) {
    layer.forward(context, batch, x.view(), y.view());
    loss = 0;
    for (Index t = 0; t < tokens; ++t)
      for (Index i = 0; i < width; ++i) {
        const float target = t % len > 0 ? x.view().row(t - 1)[i] : 0.0F;
        const float error = y.view().row(t)[i] - target;
        dy.view().row(t)[i] = 2 * error / float(tokens * width);
        loss += double(error) * double(error) / double(tokens * width);
      }
    if (step == 0) first = loss;
    layer.visit([](const std::string&, Param<float>&, Param<float>& grad) { grad.set_zero(); });
    layer.backward(context, batch, x.view(), dy.view(), dx.view());
    optimiser.step(context, layer);
  }
  std::printf("\nloss %.4f -> %.4f in 30 steps\n", first, loss);
  return loss < 0.9 * first ? 0 : 1;
}
