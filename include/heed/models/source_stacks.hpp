// SPDX-License-Identifier: Apache-2.0
#pragma once

// The language models of two sources that do not use GPT-2's frame.
//
//   QKVI   x1 = x + c_proj(sigma(i) o attention(rope(norm(q)), rope(norm(k)), v))    of rms(x)
//          y  = x1 + W2 gelu(W1 rms(x1))
//          RMS norm before each branch and before the head, no biases, no table of positions
//   ODE    GPT-2's blocks, norms, MLP and positions around the resonant flow; q, k, v and the output
//          projected without bias, a head of its own
//
// Source  "Neon016: QKVI Intent Attention", section 2, for the attention; norm and MLP of the block are
//         ours, the note has none. GPT2_ARA_Dyn for the ODE.

#include <heed/models/gpt.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// The width of a head must be even, since the rotation turns pairs of columns. `norm`, `mlp_bias` and `max_len` of the
// options are not read. A sequence may have any length.
template <class Real>
[[nodiscard]] LanguageModel<Real> make_qkvi_lm(GptOptions o, ExtraSource gate,
                                               RopePairs pairs = RopePairs::interleaved,
                                               double theta = 10000) {
  require(o.heads > 0 && o.width % (2 * o.heads) == 0, "make_qkvi_lm: a width of ", o.width,
          " for ", o.heads, " heads; heads must be of an even width");
  o.norm = NormKind::rms;
  o.mlp_bias = false;
  o.max_len = 0;
  return make_gpt<Real>(o, [&](Index) {
    return std::make_unique<ProjectedAttention<IntentGated<Real>>>(
        intent_attention<Real>(o.width, o.heads, gate, pairs, theta));
  });
}

// `norm`, `mlp_bias` and `tied` of the options are not read. rho and eta are constants unless `learns`.
template <class Real>
[[nodiscard]] LanguageModel<Real> make_ode_lm(GptOptions o, const ResonantOde<Real>& op = {},
                                              bool learns = false) {
  o.norm = NormKind::layer;
  o.mlp_bias = true;
  o.tied = false;
  return make_gpt<Real>(o, [&](Index) {
    return std::make_unique<ProjectedAttention<ResonantOde<Real>>>(
        resonant_attention<Real>(o.width, o.heads, op, true, learns));
  });
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
