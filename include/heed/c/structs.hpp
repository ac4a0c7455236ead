// SPDX-License-Identifier: Apache-2.0
#pragma once

// Structs of c.h that begin with their size. A caller may know fewer fields of them, or more.
//
//   shorter than ours   it ends where one of our fields ends, or behind the padding that follows
//                       there; missing fields are 0
//   longer than ours    all bytes behind ours are 0
//
// A new field must not lie in what was padding: an older caller leaves anything there.

#include <heed/c.h>
#include <heed/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace heed {
inline namespace HEED_ABI {
namespace c {

// Calls f(field...) with all fields of a struct, in order. The compiler refuses an incomplete list.
template <class F>
[[nodiscard]] auto with_fields(const heed_mask& all, F&& f) {
  const auto& [size, causal, causal_align, causal_offset, windows, window_count, key_ranges,
               key_range_count, key_lengths, key_length_count, allowed, bias, query_documents,
               query_document_count, key_documents, key_document_count, alibi, alibi_count,
               alibi_align, soft_cap, visible, visible_context, visible_align, alibi_offset,
               visible_offset, list_start, list_start_count, list_indices, list_index_count,
               list_query_block, list_key_block, list_batch, list_heads] = all;
  return f(size, causal, causal_align, causal_offset, windows, window_count, key_ranges,
           key_range_count, key_lengths, key_length_count, allowed, bias, query_documents,
           query_document_count, key_documents, key_document_count, alibi, alibi_count, alibi_align,
           soft_cap, visible, visible_context, visible_align, alibi_offset, visible_offset,
           list_start, list_start_count, list_indices, list_index_count, list_query_block,
           list_key_block, list_batch, list_heads);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_call& all, F&& f) {
  const auto& [size, variant, query, key, value, extra, parameters, parameter_count, mask, scale,
               threads, precision, dropout, dropout_seed, first_query, query_inputs, key_inputs,
               queries_at_end, packed, cache] = all;
  return f(size, variant, query, key, value, extra, parameters, parameter_count, mask, scale,
           threads, precision, dropout, dropout_seed, first_query, query_inputs, key_inputs,
           queries_at_end, packed, cache);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_outputs& all, F&& f) {
  const auto& [size, out, lse, steps] = all;
  return f(size, out, lse, steps);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_gradients& all, F&& f) {
  const auto& [size, query, key, value, extra, bias, parameters, parameter_count, query_inputs,
               key_inputs] = all;
  return f(size, query, key, value, extra, bias, parameters, parameter_count, query_inputs,
           key_inputs);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_tangents& all, F&& f) {
  const auto& [size, query, key, value, extra, bias, parameters, parameter_count, query_inputs,
               key_inputs] = all;
  return f(size, query, key, value, extra, bias, parameters, parameter_count, query_inputs,
           key_inputs);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_shapes& all, F&& f) {
  const auto& [size, out, lse, steps, extra] = all;
  return f(size, out, lse, steps, extra);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_parameter_info& all, F&& f) {
  const auto& [size, name, kind, required, ndim, shape, number, text, choices] = all;
  return f(size, name, kind, required, ndim, shape, number, text, choices);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_start& all, F&& f) {
  const auto& [size, seed, depth, prototypes] = all;
  return f(size, seed, depth, prototypes);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_packed& all, F&& f) {
  const auto& [size, queries, query_count, keys, key_count, first_query, first_query_count, caches,
               cache_count] = all;
  return f(size, queries, query_count, keys, key_count, first_query, first_query_count, caches,
           cache_count);
}
template <class F>
[[nodiscard]] auto with_fields(const heed_cache_sizes& all, F&& f) {
  const auto& [size, batch, kv_heads, dim_qk, dim_v, dtype, page_rows] = all;
  return f(size, batch, kv_heads, dim_qk, dim_v, dtype, page_rows);
}

// Bytes of a struct of this size in an array.
template <class Struct>
[[nodiscard]] constexpr std::size_t padded(std::size_t size) {
  return (size + alignof(Struct) - 1) / alignof(Struct) * alignof(Struct);
}

// True if a struct of this size ends with a field behind its size.
template <class Struct>
[[nodiscard]] bool ends_with_field(std::size_t size) {
  const Struct all{};
  return with_fields(all, [&](const std::size_t&, const auto&... fields) {
    const auto ends = [&](const auto& field) {
      const auto end = std::size_t(reinterpret_cast<const std::byte*>(&field + 1) -
                                   reinterpret_cast<const std::byte*>(&all));
      return size == end || size == padded<Struct>(end);
    };
    return (ends(fields) || ...);
  });
}

// Limit on the size of a caller's struct: a size that was never set could make the library read any memory.
inline constexpr std::size_t kMostGrowth = 4096;

// A copy of the caller's struct in our layout.
template <class Struct>
[[nodiscard]] Struct adopt(const Struct* given, const char* name, const char* where) {
  require(given != nullptr, where, ": ", name, " is a null pointer");
  const std::size_t size = given->size;
  require(size >= sizeof(Struct) || ends_with_field<Struct>(size), where, ": the size of ", name,
          " is ", size, ", it must be that of its struct, ", sizeof(Struct),
          ", or of an older one, which ends with a field");
  require(size <= sizeof(Struct) + kMostGrowth, where, ": the size of ", name, " is ", size,
          ", it must be that of its struct, ", sizeof(Struct), ", or of a later one, up to ",
          sizeof(Struct) + kMostGrowth);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t n = sizeof(Struct); n < size; ++n)
    require(bytes[n] == 0, where, ": ", name, " has something at byte ", n,
            ", this library knows the first ", sizeof(Struct), " bytes");
  Struct own{};
  std::memcpy(&own, given, std::min(size, sizeof(Struct)));
  return own;
}

// Writes our struct to the caller's, as far as that reaches; its size does not change.
template <class Struct>
void write_back(Struct own, Struct* given) {
  own.size = given->size;
  std::memcpy(given, &own, std::min(own.size, sizeof(Struct)));
}

}  // namespace c
}  // namespace HEED_ABI
}  // namespace heed
