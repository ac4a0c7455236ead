// SPDX-License-Identifier: Apache-2.0
#pragma once

// Top-k attention: each query reads the keys with its largest scores, and softmax is over these.
//
//   K_i = the 64 visible keys j with the largest q_i . k_j      the lower position wins among equal ones
//   out_i = sum_{j in K_i} softmax_j(q_i . k_j / sqrt(d)) v_j
//
// The choice is a constant for the gradients. It costs the scores of all visible pairs; what follows costs 64 keys a query.
//
// Source  A. Gupta et al., Memory-efficient Transformers via Top-k Attention (2021), where keys are 64, 128 or 256.

#include "kit.hpp"

#include <heed/measure/select.hpp>

namespace zoo::top_k {

template <class T>
using Op = heed::ScaledDot<T>;

inline constexpr Index kKeys = 64;

template <class T>
heed::Variant<Op<T>> variant(const heed::Geometry& g) {
  return {"zoo:top-k",
          "64 keys",
          g,
          {},
          {},
          nullptr,
          [](const auto& in, const auto& mask, const auto& options) {
            return heed::block_lists<T>(heed::select_keys(in, mask, kKeys, options));
          }};
}

// In plain loops.
inline Numbers plain(const Op<double>&, const PlainRow& row) {
  const PlainRow seen = row.largest(kKeys, 1, logits(row));
  return mixed(seen, softmax(logits(seen)));
}

}  // namespace zoo::top_k
