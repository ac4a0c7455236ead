// SPDX-License-Identifier: Apache-2.0
#pragma once

// The attention layers of the sources, with the sources' names for their weights.

#include <heed/nn/projected_attention.hpp>
#include <heed/ops/dar.hpp>
#include <heed/ops/dialectical.hpp>
#include <heed/ops/differential.hpp>
#include <heed/ops/intent_gate.hpp>
#include <heed/ops/resonant_ode.hpp>
#include <heed/ops/scaled_dot.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

template <class Real>
[[nodiscard]] Mask<Real> causal_or_full(bool causal) {
  return causal ? heed::causal<Real>() : Mask<Real>();
}

// Weights c_attn (3 C, C) and c_proj (C, C), both with bias; C is the width. Strength, vigilance, sharpness and feedback are
// constants, as in the source, unless `learns`.
template <class Real>
[[nodiscard]] ProjectedAttention<Dar<Real>> dar_attention(Index width, Index heads,
                                                          const Dar<Real>& op = {},
                                                          bool causal = true, bool learns = false) {
  ProjectedAttention<Dar<Real>> layer(AttentionOptions::even(width, heads), op,
                                      causal_or_full<Real>(causal));
  layer.stage.learns = learns;
  return layer;
}

// Weights q_proj, k_proj, v_proj and out_proj (C, C) with bias, and lambda. The halves of a head are its two maps.
template <class Real>
[[nodiscard]] ProjectedAttention<Differential<Real>> differential_attention(
    Index width, Index heads, const Differential<Real>& op = {}, bool causal = true) {
  AttentionOptions options = AttentionOptions::even(width, heads);
  options.names = split_names();
  return {options, op, causal_or_full<Real>(causal)};
}

// Microsoft's first form: q_proj, k_proj, v_proj and out_proj without bias; four lambda vectors, drawn with standard
// deviation 0.1; a norm per head whose weight is named "weight". `depth` counts the layers from 1.
template <class Real>
[[nodiscard]] ProjectedAttention<DifferentialV1<Real>> differential_v1_attention(
    Index width, Index heads, Index depth, bool causal = true, std::uint64_t seed = 1) {
  AttentionOptions options = AttentionOptions::even(width, heads);
  options.names = split_names();
  options.bias = false;
  auto op = make_differential_v1<Real>(options.heads.dim_qk / 2, depth);
  std::uint64_t stream = std::uint64_t(depth) << 8;
  visit_parameters(op.normaliser, [&](const char*, Param<Real>& vector) {
    fill_normal(vector, 0.1, seed, stream++);
  });
  return {options, std::move(op), causal_or_full<Real>(causal)};
}

// Microsoft's second form: twice the query heads, q_proj (2 C, C), and a lambda per token and head from lambda_proj.
template <class Real>
[[nodiscard]] ProjectedAttention<DifferentialV2<Real>> differential_v2_attention(
    Index width, Index heads, bool causal = true) {
  AttentionOptions options = AttentionOptions::even(width, heads);
  options.names = split_names();
  options.names.extra = "lambda_proj";
  options.bias = false;
  options.heads.query_heads = 2 * heads;
  return {options, DifferentialV2<Real>{}, causal_or_full<Real>(causal)};
}

// The QKVI layer: c_attn (4 C, C) gives q, k, v and the intent; or the gate comes from q (w_g), or
// is calculated from q, k and v (w_q, w_k, w_v). Query-key norm, then rotation. No bias.
template <class Real>
[[nodiscard]] ProjectedAttention<IntentGated<Real>> intent_attention(Index width, Index heads,
                                                                     ExtraSource gate,
                                                                     RopePairs pairs,
                                                                     double theta = 10000,
                                                                     bool causal = true) {
  AttentionOptions options = AttentionOptions::even(width, heads);
  options.bias = false;
  options.query_key_norm = true;
  options.rope = Rope{options.heads.dim_qk, theta, pairs};
  options.extra = gate;
  return {options, IntentGated<Real>{}, causal_or_full<Real>(causal)};
}

// Weights q_proj, k_proj, v_proj and out_proj without bias. rho and eta are constants unless `learns`.
template <class Real>
[[nodiscard]] ProjectedAttention<ResonantOde<Real>> resonant_attention(
    Index width, Index heads, const ResonantOde<Real>& op = {}, bool causal = true,
    bool learns = false) {
  AttentionOptions options = AttentionOptions::even(width, heads);
  options.names = split_names();
  options.bias = false;
  ProjectedAttention<ResonantOde<Real>> layer(options, op, causal_or_full<Real>(causal));
  layer.stage.learns = learns;
  return layer;
}

// Plain attention whose keys and values are projected from `rank` columns: weights q_proj, kv_down (rank, C), k_up and
// v_up (C, rank), out_proj.
template <class Real>
[[nodiscard]] ProjectedAttention<ScaledDot<Real>> latent_attention(Index width, Index heads,
                                                                   Index rank, bool causal = true) {
  AttentionOptions options = AttentionOptions::even(width, heads);
  options.names = split_names();
  options.latent = rank;
  return {options, ScaledDot<Real>{}, causal_or_full<Real>(causal)};
}

// One head of width `dim`: weights q, k and v (dim, C) without bias, and those of the op; no output projection.
template <class Real>
[[nodiscard]] ProjectedAttention<Dialectical<Real>> dialectical_head(
    Index width, Index dim, const DialecticalOptions& halting = {}, bool causal = true) {
  AttentionOptions options;
  options.width = width;
  options.heads = {1, 1, 1, 1, 1, 1, dim, dim};
  options.names = {"", "q", "k", "v", "", ""};
  options.bias = false;
  return {options, make_dialectical<Real>(options.heads, halting), causal_or_full<Real>(causal)};
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
