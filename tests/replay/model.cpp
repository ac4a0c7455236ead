// SPDX-License-Identifier: Apache-2.0
#include "layer_ops.hpp"

#include <heed/models/source_stacks.hpp>
#include <heed/nn/adamw.hpp>

namespace heed_test {

namespace {

namespace nn = heed::nn;

template <class T>
nn::LanguageModel<T> model_of(const GoldenCase& golden) {
  const Index vocabulary = golden.integer("vocab");
  if (golden.variant() == "model_dialectical")
    return nn::make_dialectical_lm<T>(
        vocabulary, golden.integer("d_model"), golden.integer("d_head"), golden.integer("max_len"),
        golden.integer("ff_mult"), dialectical_options(golden), golden.flag("causal"));
  nn::GptOptions options;
  options.vocabulary = vocabulary;
  options.width = golden.integer("dim");
  options.heads = golden.integer("heads");
  options.depth = golden.integer("depth");
  options.max_len = golden.integer("max_pos");
  options.tied = golden.flag("tied");
  if (golden.variant() == "model_gpt2_ara_dyn")
    return nn::make_ode_lm<T>(options, ode_of_layer<T>(golden));
  return nn::make_gpt<T>(options, [&](Index) {
    return std::make_unique<nn::ProjectedAttention<heed::Dar<T>>>(
        nn::dar_attention<T>(options.width, options.heads, dar_of_layer<T>(golden)));
  });
}

nn::AdamWOptions adamw_of(const GoldenCase& golden) {
  nn::AdamWOptions options;
  options.learning_rate = golden.number("lr");
  options.beta1 = golden.number("beta1");
  options.beta2 = golden.number("beta2");
  options.epsilon = golden.number("adam_eps");
  options.weight_decay = golden.number("weight_decay");
  return options;
}

std::vector<Index> whole_numbers(const GoldenCase& golden, const std::string& name) {
  std::vector<Index> result;
  for (const double x : golden.tensor(name)) result.push_back(Index(x));
  return result;
}

// Weights of the model that the case stores as <prefix>.<name>.
template <class T>
void collect_weights(nn::LanguageModel<T>& model, const GoldenCase& golden,
                     const std::string& prefix, Tensors& to) {
  model.visit(nn::Visitor<T>([&](const std::string& name, heed::Param<T>& value, heed::Param<T>&) {
    const std::string key = prefix + "." + name;
    if (golden.has(key)) to[key] = numbers(value.data(), value.size());
  }));
}

// Gradients at the start, and five steps on one batch.
template <class T>
struct ModelRun {
  Tensors start, after;
  std::vector<double> losses;

  ModelRun(const GoldenCase& golden, bool rounded) {
    nn::LanguageModel<T> model = model_of<T>(golden);
    load_weights<T>(model, golden, rounded);
    nn::Context<T> c;
    c.threads = 2;
    const std::vector<Index> ids = whole_numbers(golden, "ids"),
                             targets = whole_numbers(golden, "targets");
    const Index batch = golden.integer("B"), tokens = Index(ids.size());
    nn::Matrix<T> logits(tokens, golden.integer("vocab"));
    model.forward(c, batch, ids, logits.view());
    start["logits"] = numbers(logits.view().data, logits.rows() * logits.columns());
    nn::AdamW<T> optimiser(adamw_of(golden));
    const Index steps = golden.integer("steps");
    for (Index step = 0; step < steps; ++step) {
      nn::clear_gradients<T>(model);
      losses.push_back(model.gradient(c, batch, ids, targets));
      if (step == 0) collect_gradients<T>(model, start);
      optimiser.step(c, model);
      if (step == 0) collect_weights(model, golden, "after1", after);
    }
    losses.push_back(model.loss(c, batch, ids, targets));
    collect_weights(model, golden, "after" + std::to_string(steps), after);
  }
};

// AdamW turns rounding noise in a gradient that is zero in exact arithmetic into steps of up to the
// learning rate.
bool has_no_gradient(const std::string& name) {
  return name.find("b_pos") != std::string::npos || name.find("b_neg") != std::string::npos;
}

}  // namespace

void replay_model(const GoldenCase& golden, Report& report) {
  const ModelRun<double> exact(golden, false);
  for (const auto& [name, values] : exact.start) report.exact(name, values, golden.tensor(name));
  report.exact("losses", exact.losses, golden.tensor("losses"));
  for (const auto& [name, values] : exact.after)
    if (!has_no_gradient(name)) {
      const std::vector<double>& want = golden.tensor(name);
      report.near(name, values, want, 1e-9 * Report::largest(want));
    }
  const ModelRun<double> wide(golden, true);
  const ModelRun<float> narrow(golden, true);
  for (const auto& [name, values] : wide.start)
    report.rounded(
        name, narrow.start.at(name), values,
        std::vector<double>(values.size(), std::max(1e-5 * Report::largest(values), 5e-6)));
  report.rounded("losses", narrow.losses, wide.losses,
                 std::vector<double>(wide.losses.size(), 1e-4));
}

}  // namespace heed_test
