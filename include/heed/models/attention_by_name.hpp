// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention layers by the names of the list of variants (variants.hpp), for programs that choose at run time. Every variant
// gets the same frame: c_attn with bias for q, k, v and the op's extra input if it has one, and c_proj with bias. It learns
// its op's parameters; keep_in_range() keeps them within their bounds. The list also has layers that are no variant by
// themselves: controls, and variants with more than an op.

#include <heed/nn/attention_layers.hpp>
#include <heed/nn/ponder_attention.hpp>
#include <heed/nn/prototype_attention.hpp>
#include <heed/variants.hpp>

#include <memory>
#include <string>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// Plain attention with low-rank keys and values, a quarter of the width: a control beside the variants.
inline constexpr const char* kLatentAttention = "sdpa-latent";
// Plain attention with one sigmoid gate per head and token, projected from x (Qiu et al. 2025, "Gated
// Attention"): another control.
inline constexpr const char* kGatedAttention = "sdpa-gated";
// Prototypes that an ART memory learns from the keys; the second also pulls the keys towards them.
inline constexpr const char* kPrototypeArt = "prototype-art";
inline constexpr const char* kPrototypeArtPull = "prototype-art-pull";
// The dialectical recursion, 6 steps at most, that halts by learnt probabilities; set_ponder() makes steps cost something.
inline constexpr const char* kDialecticalAct = "dialectical-act";
// PonderNet around the same recursion, 6 steps at most, for the last block of a model alone. The
// other blocks of a model of this name have the list's dialectical layer: see name_in_block().
inline constexpr const char* kDialecticalPonderNet = "dialectical-pondernet";

// The name of the attention of block `layer` (from 0) of the `depth` blocks of the model `name`.
[[nodiscard]] inline std::string name_in_block(const std::string& name, Index layer, Index depth) {
  return name == kDialecticalPonderNet && layer + 1 < depth ? "dialectical" : name;
}

namespace detail {

// The most steps of layers that learn when to halt.
inline constexpr int kPonderSteps = 6;

template <class Real>
[[nodiscard]] std::unique_ptr<AttentionLayer<Real>> learning_prototypes(
    const AttentionOptions& options, Index prototypes, Real correction) {
  KeyMemoryOptions<Real> memory;
  memory.capacity = prototypes;
  memory.correction = correction;
  return std::make_unique<PrototypeAttention<Real>>(options, causal<Real>(), memory);
}

// Calls f(name, make) for every layer beside the variants. make.operator()<Real>(even, prototypes) makes the layer.
template <class F>
void for_each_extra_layer(F&& f) {
  f(kLatentAttention,
    []<class Real>(const AttentionOptions& even, Index) -> std::unique_ptr<AttentionLayer<Real>> {
      return std::make_unique<ProjectedAttention<ScaledDot<Real>>>(
          latent_attention<Real>(even.width, even.heads.heads, std::max<Index>(1, even.width / 4)));
    });
  f(kGatedAttention, []<class Real>(const AttentionOptions& even, Index) {
    IntentGated<Real> op;
    op.readout.grain = GateGrain::per_head;
    return std::make_unique<ProjectedAttention<IntentGated<Real>>>(even, std::move(op),
                                                                   causal<Real>());
  });
  f(kPrototypeArt, []<class Real>(const AttentionOptions& even, Index prototypes) {
    return learning_prototypes<Real>(even, prototypes, Real(0));
  });
  // 1e-4: a shift of all keys alike changes no loss of the model, so that AdamW follows even a weak pull;
  // at 1e-2 the keys collapse onto one direction.
  f(kPrototypeArtPull, []<class Real>(const AttentionOptions& even, Index prototypes) {
    return learning_prototypes<Real>(even, prototypes, Real(1e-4));
  });
  f(kDialecticalAct, []<class Real>(const AttentionOptions& even, Index) {
    return std::make_unique<ProjectedAttention<Dialectical<Real>>>(
        even,
        make_dialectical<Real>(even.heads,
                               {.max_steps = kPonderSteps, .halting = Halting::adaptive}),
        causal<Real>());
  });
  f(kDialecticalPonderNet, []<class Real>(const AttentionOptions& even, Index) {
    return std::make_unique<PonderAttention<Real>>(even, kPonderSteps, causal<Real>());
  });
}

}  // namespace detail

// Names of the layers beside the variants.
[[nodiscard]] inline std::vector<std::string> extra_attention_names() {
  std::vector<std::string> names;
  detail::for_each_extra_layer([&](const char* name, const auto&) { names.push_back(name); });
  return names;
}

// The causal layer `name` of the list beside the variants; null for a name that is not in it.
template <class Real>
[[nodiscard]] std::unique_ptr<AttentionLayer<Real>> extra_attention_by_name(const std::string& name,
                                                                            Index width,
                                                                            Index heads,
                                                                            Index prototypes = 16) {
  const AttentionOptions even = AttentionOptions::even(width, heads);
  std::unique_ptr<AttentionLayer<Real>> made;
  detail::for_each_extra_layer([&](const char* known, const auto& make) {
    if (name == known) made = make.template operator()<Real>(even, prototypes);
  });
  return made;
}

// The causal layer around a variant's op in the frame of all variants, for a model with these even sizes. Throws for a
// variant that reads later keys.
template <class Op>
[[nodiscard]] std::unique_ptr<AttentionLayer<typename Op::Scalar>> attention_of(
    const Variant<Op>& variant, AttentionOptions even) {
  require(!variant.traits.reads_later_keys, "attention_of: ", variant.name,
          " reads later keys, there is no causal layer of it");
  even.heads = variant.geometry;
  auto layer = std::make_unique<ProjectedAttention<Op>>(
      even, variant.op, variant.mask_with(causal<typename Op::Scalar>(), even.heads));
  layer->stage.choose = variant.choose;
  return layer;
}

// Names of all variants.
[[nodiscard]] inline std::vector<std::string> attention_names() { return variant_names(); }

// The causal layer `name` for layer `layer` (from 0) of a model, with `prototypes` prototypes per head where
// it has any. Throws for an unknown name.
template <class Real>
[[nodiscard]] std::unique_ptr<AttentionLayer<Real>> attention_by_name(const std::string& name,
                                                                      Index width, Index heads,
                                                                      Index layer,
                                                                      Index prototypes = 16,
                                                                      std::uint64_t seed = 1) {
  std::unique_ptr<AttentionLayer<Real>> made =
      extra_attention_by_name<Real>(name, width, heads, prototypes);
  if (made) return made;
  std::string known;
  const AttentionOptions even = AttentionOptions::even(width, heads);
  for_each_variant<Real>(
      even.heads,
      [&]<class Op>(const Variant<Op>& variant) {
        known += (known.empty() ? "" : ", ") + std::string(variant.name);
        if (name == variant.name) made = attention_of(variant, even);
      },
      {.prototypes = prototypes, .seed = seed + std::uint64_t(layer), .depth = layer + 1});
  for (const std::string& extra : extra_attention_names()) known += ", " + extra;
  require(made != nullptr, "attention_by_name: ", name,
          " is not a name of the list, it must be one of ", known);
  return made;
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
