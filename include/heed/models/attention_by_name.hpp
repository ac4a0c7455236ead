// SPDX-License-Identifier: Apache-2.0
#pragma once

// Attention layers by the names of the list of variants (variants.hpp), for programs that choose at run
// time. Every variant gets the same frame: c_attn with bias for q, k, v and the op's extra input if it has
// one, c_proj with bias; and learns its op's parameters, but those of a converged gate.

#include <heed/nn/attention_layers.hpp>
#include <heed/variants.hpp>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace heed::inline HEED_ABI::nn {

namespace detail {

// The source's lambda_init depends on the layer, counted from 1.
template <class T>
void set_depth(DifferentialV1<T>& op, Index depth) {
  op.normaliser.lambda_init = lambda_init_at(depth);
  op.readout.factor = 1.0 - op.normaliser.lambda_init;
}

}  // namespace detail

// Plain attention with low-rank keys and values, a quarter of the width: a control beside the variants.
inline constexpr const char* kLatentAttention = "sdpa-latent";

// Names of all variants.
[[nodiscard]] inline std::vector<std::string> attention_names() {
  std::vector<std::string> names;
  for_each_variant<float>({1, 2, 2, 2, 1, 1, 4, 4},
                          [&](const auto& variant) { names.push_back(variant.name); });
  return names;
}

// The causal layer `name` for layer `layer` (from 0) of a model. Throws for a name that is not in the list.
template <class T>
[[nodiscard]] std::unique_ptr<AttentionLayer<T>> attention_by_name(const std::string& name, Index width,
                                                                   Index heads, Index layer,
                                                                   Index prototypes = 16,
                                                                   std::uint64_t seed = 1) {
  std::unique_ptr<AttentionLayer<T>> made;
  std::string known;
  const AttentionOptions even = AttentionOptions::even(width, heads);
  if (name == kLatentAttention)
    return std::make_unique<ProjectedAttention<ScaledDot<T>>>(
        latent_attention<T>(width, heads, std::max<Index>(1, width / 4)));
  for_each_variant<T>(
      even.heads,
      [&]<class Op>(const Variant<Op>& variant) {
        known += (known.empty() ? "" : ", ") + std::string(variant.name);
        if (name != variant.name) return;
        AttentionOptions options = even;
        options.heads = variant.geometry;
        Op op = variant.op;
        if constexpr (std::is_same_v<Op, DifferentialV1<T>>) detail::set_depth(op, layer + 1);
        auto made_layer = std::make_unique<ProjectedAttention<Op>>(options, std::move(op), causal<T>());
        // What it learns might leave the bound below which the fixed point is one.
        if constexpr (std::is_same_v<Op, Dar<T>>)
          made_layer->stage.learns = !made_layer->stage.op.score.converged;
        made = std::move(made_layer);
      },
      prototypes, seed + std::uint64_t(layer));
  require(made != nullptr, "attention_by_name: ", name, " is no variant; there are ", known, ", ",
          kLatentAttention);
  return made;
}

}  // namespace heed::inline HEED_ABI::nn
