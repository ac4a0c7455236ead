// SPDX-License-Identifier: Apache-2.0
#pragma once

// Scaled dot-product attention, the baseline.
//
//   s_ij = scale * q_i . k_j          P = softmax_j(s)          out_i = sum_j P_ij v_j
//
//   dV = P^T dO      X = dO V^T      dS = P o (X - rowsum(P o X))      dQ = scale dS K
//   dK = scale dS^T Q
//
// Shapes  query (batch, heads, len_q, dim_qk), key (batch, kv_heads, len_kv, dim_qk), value (batch,
//         kv_heads, len_kv, dim_v), out (batch, heads, len_q, dim_v); kv_heads divides heads.
// Errors  of out, gradients on hard inputs (README.md beside this file):
//         accuracy of sdpa  float 8e-6, 1e-4; double 1e-14, 2e-13
//         second derivatives of sdpa  float 2e-4, of rows of width 1 2e-6
// Source  A. Vaswani et al., Attention is all you need (2017), equation 1; streamed as in T. Dao et al.,
//         FlashAttention (2022).

#include <heed/plug/attention.hpp>

namespace heed {
inline namespace HEED_ABI {

template <class Real>
using ScaledDot = Attention<Real, DotScore<Real>, Softmax<Real>, Identity<Real>>;

}  // namespace HEED_ABI
}  // namespace heed
