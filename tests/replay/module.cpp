// SPDX-License-Identifier: Apache-2.0
#include "layer_ops.hpp"

#include <heed/check/named_tensor.hpp>
#include <heed/models/transformer_block.hpp>
#include <heed/nn/attention_layers.hpp>

namespace heed_test {

namespace {

namespace nn = heed::nn;

template <class T>
nn::ProjectedAttention<heed::IntentGated<T>> intent_of(const GoldenCase& golden) {
  const std::string &gate = golden.text("gate"), &pairs = golden.text("rope");
  return nn::intent_attention<T>(
      golden.integer("C"), golden.integer("heads"),
      gate == "intent"   ? nn::ExtraSource::projected
      : gate == "from_q" ? nn::ExtraSource::from_query
                         : nn::ExtraSource::calculated,
      pairs == "half" ? nn::RopePairs::halves : nn::RopePairs::interleaved, golden.number("theta"));
}

// The layer on x (B, T, C); a block and an attention layer have the same calls.
template <class T, class Layer>
LayerResult run_layer(Layer& layer, const GoldenCase& golden, bool rounded) {
  load_weights<T>(layer, golden, rounded);
  nn::Context<T> c;
  c.threads = 2;
  const Index batch = golden.integer("B"), width = golden.integer("C");
  const Index out_width = golden.extents("out").back();
  const std::vector<T> x = input<T>(golden, "x", rounded), dout = input<T>(golden, "dout", rounded);
  const Index tokens = Index(x.size()) / width;
  const nn::MatrixView<const T> in(x.data(), tokens, width), dy(dout.data(), tokens, out_width);
  nn::Matrix<T> y(tokens, out_width), dx(tokens, width);
  layer.forward(c, batch, in, y.view());
  layer.backward(c, batch, in, dy, dx.view());
  LayerResult r;
  r.values["out"] = numbers(y.view().data, tokens * out_width);
  r.values["dx"] = numbers(dx.view().data, tokens * width);
  collect_gradients<T>(layer, r.gradients);
  return r;
}

// Steps and tension per token; the case stores them as doubles.
template <class T>
void add_reports(LayerResult& r, const heed::Saved<T>& saved) {
  for (const char* name : {"steps_used", "updates", "tension"}) {
    const auto& rows = saved.diagnostic(name);
    r.values[name] = numbers(rows.data(), Index(rows.size()));
  }
}

template <class T>
LayerResult run_cross(const GoldenCase& golden, bool rounded) {
  auto layer = nn::differential_attention<T>(golden.integer("C"), golden.integer("heads"), {},
                                             golden.flag("causal"));
  load_weights<T>(layer, golden, rounded);
  nn::Context<T> c;
  const Index batch = golden.integer("B"), width = golden.integer("C");
  const std::vector<T> x = input<T>(golden, "x", rounded), kv = input<T>(golden, "kv", rounded),
                       dout = input<T>(golden, "dout", rounded);
  const Index tokens = Index(x.size()) / width, others = Index(kv.size()) / width;
  const nn::MatrixView<const T> in(x.data(), tokens, width), memory(kv.data(), others, width),
      dy(dout.data(), tokens, width);
  nn::Matrix<T> y(tokens, width), dx(tokens, width), dkv(others, width);
  layer.forward(c, batch, in, memory, y.view());
  layer.backward(c, batch, in, memory, dy, dx.view(), dkv.view());
  LayerResult r;
  r.values = {{"out", numbers(y.view().data, tokens * width)},
              {"dx", numbers(dx.view().data, tokens * width)},
              {"dkv", numbers(dkv.view().data, others * width)}};
  collect_gradients<T>(layer, r.gradients);
  return r;
}

template <class T>
LayerResult run_intent(const GoldenCase& golden, bool rounded) {
  auto layer = intent_of<T>(golden);
  LayerResult r = run_layer<T>(layer, golden, rounded);
  const Index batch = golden.integer("B");
  r.values["intent"] = heed::dense_numbers<double>(layer.inputs(batch).extra);
  if (golden.has("q_rot"))
    r.values["q_rot"] = heed::dense_numbers<double>(layer.inputs(batch).query);
  if (golden.has("k_rot")) r.values["k_rot"] = heed::dense_numbers<double>(layer.inputs(batch).key);
  return r;
}

template <class T>
LayerResult run_intent_block(const GoldenCase& golden, bool rounded) {
  const Index width = golden.integer("C");
  nn::TransformerBlock<T> block(
      {}, nn::NormKind::rms, width,
      std::make_unique<nn::ProjectedAttention<heed::IntentGated<T>>>(intent_of<T>(golden)),
      nn::Mlp<T>(width, 4 * width, nn::Activation::gelu_erf, false, "0", "2"));
  return run_layer<T>(block, golden, rounded);
}

template <class T>
LayerResult run_dialectical_block(const GoldenCase& golden, bool rounded) {
  const Index width = golden.integer("C"), dim = golden.integer("d_head");
  auto head = std::make_unique<nn::ProjectedAttention<heed::Dialectical<T>>>(
      nn::dialectical_head<T>(width, dim, dialectical_options(golden), golden.flag("causal")));
  const auto& saved = head->saved();
  nn::TransformerBlock<T> block(
      {"ln1", "attn", "out", "ff.0", "ff"}, nn::NormKind::layer, width, std::move(head),
      nn::Mlp<T>(width, golden.integer("ff_mult") * width, nn::Activation::silu, true, "1", "3"),
      nn::Linear<T>(dim, width, true));
  LayerResult r = run_layer<T>(block, golden, rounded);
  add_reports(r, saved);
  return r;
}

}  // namespace

void replay_module(const GoldenCase& golden, Report& report) {
  const std::string& variant = golden.variant();
  const Index width = golden.integer("C");
  const auto heads = [&] { return golden.integer("heads"); };
  const auto check = [&](const auto& run) { check_layer(report, golden, run); };
  if (variant == "module_dar")
    return check([&]<class T>(bool rounded) {
      auto layer = nn::dar_attention<T>(width, heads(), dar_of_layer<T>(golden));
      return run_layer<T>(layer, golden, rounded);
    });
  if (variant == "module_diff" && golden.has("kv"))
    return check([&]<class T>(bool rounded) { return run_cross<T>(golden, rounded); });
  if (variant == "module_diff")
    return check([&]<class T>(bool rounded) {
      auto layer = nn::differential_attention<T>(width, heads(), {}, golden.flag("causal"));
      return run_layer<T>(layer, golden, rounded);
    });
  if (variant == "module_neon")
    return check([&]<class T>(bool rounded) { return run_intent<T>(golden, rounded); });
  if (variant == "module_neon_block")
    return check([&]<class T>(bool rounded) { return run_intent_block<T>(golden, rounded); });
  if (variant == "module_resonant")
    return check([&]<class T>(bool rounded) {
      auto layer = nn::resonant_attention<T>(width, heads(), ode_of_layer<T>(golden));
      return run_layer<T>(layer, golden, rounded);
    });
  if (variant == "module_dialhead")
    return check([&]<class T>(bool rounded) {
      auto layer = nn::dialectical_head<T>(width, golden.integer("d_head"),
                                           dialectical_options(golden), golden.flag("causal"));
      LayerResult r = run_layer<T>(layer, golden, rounded);
      add_reports(r, layer.saved());
      return r;
    });
  if (variant == "module_dialblock")
    return check([&]<class T>(bool rounded) { return run_dialectical_block<T>(golden, rounded); });
  report.fail("the layer " + variant + " is unknown");
}

}  // namespace heed_test
