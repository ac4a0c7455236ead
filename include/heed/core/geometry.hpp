// SPDX-License-Identifier: Apache-2.0
#pragma once

// The sizes of a call, shared by ops, engine and masks.

#include <heed/core/view.hpp>

namespace heed {
inline namespace HEED_ABI {

// Numbers of queries and keys of a call that are not at hand, because several processes share it (Inputs::share): the first
// and last queries, and the first and last keys. Lengths and counts of the call include them.
struct Share {
  Index queries_before = 0, queries_behind = 0;
  Index keys_before = 0, keys_behind = 0;
  bool operator==(const Share&) const = default;
};

// The sizes of one attention call. query_heads is 2 * heads for differential V2, and heads for
// every other variant. Output head h reads key and value head h / (heads / kv_heads).
struct Geometry {
  Index batch = 0, heads = 0, query_heads = 0, kv_heads = 0;
  Index len_q = 0, len_kv = 0;
  Index dim_qk = 0, dim_v = 0;
  Index first_query = 0;  // where query 0 stands among the keys' positions (Inputs::first_query)
  Share share = {};       // how much of it is at hand
  bool queries_at_end = false;  // for masks (Inputs::queries_at_end)
  bool operator==(const Geometry&) const = default;

  // Numbers of queries and keys at hand.
  [[nodiscard]] Index held_queries() const {
    return len_q - share.queries_before - share.queries_behind;
  }
  [[nodiscard]] Index held_keys() const { return len_kv - share.keys_before - share.keys_behind; }
  [[nodiscard]] Index held_queries_end() const { return len_q - share.queries_behind; }
  [[nodiscard]] Index held_keys_end() const { return len_kv - share.keys_behind; }

  // Shapes (batch, heads, len, dim) of the tensors of a call; `extra` is op.extra_dim(geometry),
  // the width of its extra input.
  [[nodiscard]] Shape query_shape() const { return {batch, query_heads, held_queries(), dim_qk}; }
  [[nodiscard]] Shape key_shape() const { return {batch, kv_heads, held_keys(), dim_qk}; }
  [[nodiscard]] Shape value_shape() const { return {batch, kv_heads, held_keys(), dim_v}; }
  [[nodiscard]] Shape extra_shape(Index extra) const {
    return {batch, heads, held_queries(), extra};
  }
  [[nodiscard]] Shape out_shape() const { return {batch, heads, held_queries(), dim_v}; }

  // Number of output heads that read the same key and value head.
  [[nodiscard]] Index group() const { return kv_heads > 0 ? heads / kv_heads : 0; }
  [[nodiscard]] Index kv_head(Index head) const { return head / group(); }
  // The position of query i, as scores, transforms, features and normalisers read it; key j has position j.
  [[nodiscard]] Index query_position(Index i) const { return first_query + i; }
  // Number of query rows at hand.
  [[nodiscard]] Index query_rows() const { return batch * heads * held_queries(); }
  // Number of row (b, h, i) among all query_rows().
  [[nodiscard]] Index row_index(Index b, Index h, Index i) const {
    return (b * heads + h) * held_queries() + i - share.queries_before;
  }
};

}  // namespace HEED_ABI
}  // namespace heed
