// SPDX-License-Identifier: Apache-2.0
#pragma once

// GPT-2's stack around any attention, and the language model of the dialectical source.

#include <heed/models/language_model.hpp>
#include <heed/nn/attention_layers.hpp>

#include <functional>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// A function that makes the attention of layer 0, 1, ...
template <class Real>
using AttentionMaker = std::function<std::unique_ptr<AttentionLayer<Real>>(Index layer)>;

struct GptOptions {
  Index vocabulary = 0, width = 0, heads = 1, depth = 1, max_len = 0;
  Index hidden = 0;  // width of the MLP; 0: four times the width
  bool tied = true;
  double dropout = 0;            // rate for the embeddings and for what each block adds
  double attention_dropout = 0;  // rate for the attention's weights
  NormKind norm = NormKind::layer;
  bool mlp_bias = true;
  Activation activation = Activation::gelu_erf;
};

// GPT-2 with pre-norm blocks around any attention.
template <class Real>
[[nodiscard]] LanguageModel<Real> make_gpt(const GptOptions& o,
                                           const AttentionMaker<Real>& attention) {
  LanguageModelOptions model;
  model.vocabulary = o.vocabulary;
  model.width = o.width;
  model.max_len = o.max_len;
  model.tied = o.tied;
  model.final_norm = o.norm;
  model.dropout = o.dropout;
  model.attention_dropout = o.attention_dropout;
  std::deque<TransformerBlock<Real>> blocks;
  const Index hidden = o.hidden > 0 ? o.hidden : 4 * o.width;
  for (Index layer = 0; layer < o.depth; ++layer) {
    blocks.emplace_back(BlockNames{}, o.norm, o.width, attention(layer),
                        Mlp<Real>(o.width, hidden, o.activation, o.mlp_bias, "0", "2"));
    blocks.back().dropout = o.dropout;
  }
  return LanguageModel<Real>(model, std::move(blocks));
}

// The source's LM around one dialectical block: emb, pos, block, and a head lm with bias; no final norm.
// Causal unless told otherwise; the source has no mask.
template <class Real>
[[nodiscard]] LanguageModel<Real> make_dialectical_lm(Index vocabulary, Index width, Index dim,
                                                      Index max_len, Index mlp_factor,
                                                      const DialecticalOptions& halting,
                                                      bool causal = true) {
  LanguageModelOptions model;
  model.vocabulary = vocabulary;
  model.width = width;
  model.max_len = max_len;
  model.tied = false;
  model.head_bias = true;
  model.final_norm = {};
  model.embedding = "emb";
  model.position = "pos";
  model.blocks = "block";
  model.head = "lm";
  model.numbered = false;
  std::deque<TransformerBlock<Real>> blocks;
  blocks.emplace_back(BlockNames{"ln1", "attn", "out", "ff.0", "ff"}, NormKind::layer, width,
                      std::make_unique<ProjectedAttention<Dialectical<Real>>>(
                          dialectical_head<Real>(width, dim, halting, causal)),
                      Mlp<Real>(width, mlp_factor * width, Activation::silu, true, "1", "3"),
                      std::optional<Linear<Real>>(Linear<Real>(dim, width, true)));
  return LanguageModel<Real>(model, std::move(blocks));
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
