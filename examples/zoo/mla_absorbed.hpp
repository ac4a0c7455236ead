// SPDX-License-Identifier: Apache-2.0
#pragma once

// Multi-head latent attention as it decodes: all heads share one latent row per token, which is key and value at once.
//
//   score_ij = s [q_i W_h ; r_i].[c_j ; p_j]       out_i = sum_j softmax_j(score) c_j
//
// Query, key and value of the op are [q W; r], [c; p] and c: the widths of keys and queries are that of the latent c, and half
// a head's for the positions p. A caller passes the memory of [c; p] as key and its first columns
// as value, and adds up both gradients; a layer of heed projects key and value separately.
//
// Source  DeepSeek-AI, DeepSeek-V2 (2024), section 2.1. There the scale is that of the heads before absorption.

#include "kit.hpp"

namespace zoo::mla_absorbed {

template <class T>
using Op = heed::ScaledDot<T>;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  heed::Geometry latent = g;
  latent.kv_heads = 1;
  latent.dim_qk = g.dim_v + std::max<Index>(1, g.dim_qk / 2);
  return {"zoo:mla-absorbed", "one latent head, positions of half a head", latent, {}};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  return mixed(row, softmax(logits(row)));
}

}  // namespace zoo::mla_absorbed
