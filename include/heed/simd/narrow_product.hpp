// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's two products for a panel that holds one or few queries, as in decoding: vectors run along
// the columns of keys and values, which are read once, in the order of memory.
//
// Cost  dim / W loads and FMAs per key and query in each product, and a transpose per W keys; a panel of
//       one vector of queries takes dim FMAs per key, whether its lanes are in use or not.

#include <heed/simd/transpose.hpp>

#include <algorithm>
#include <cstdint>

namespace heed::inline HEED_ABI {

// Up to this many queries these products are faster than a panel of one vector.
template <class T>
inline constexpr Index kNarrowRows = kLanes<T> >= 8 ? kLanes<T> / 4 : 1;

// `count` < W numbers, zeros behind.
template <class T>
[[nodiscard]] inline Pack<T> load_part(const T* from, Index count) {
  T lanes[kLanes<T>] = {};
  std::copy(from, from + count, lanes);
  return Pack<T>::load(lanes);
}

namespace detail {

// How far ahead rows are asked for, in bytes: a page of most systems, where hardware stops looking ahead.
inline constexpr Index kPrefetchBytes = 4096;

// Numbers in a line of cache.
template <class T>
inline constexpr Index kLine = std::max<Index>(64 / Index(sizeof(T)), kLanes<T>);

// Asks for the line kPrefetchBytes behind; it need not exist.
template <class T>
[[gnu::always_inline]] inline void prefetch_behind(const T* line) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(line) +
                                                   std::uintptr_t(kPrefetchBytes)));
}

// Dot products of `Keys` <= W rows with one query; lanes from Keys on hold 0.
template <class T, int Keys>
[[nodiscard]] inline Pack<T> dots_of_rows(const T* rows, Index stride, Index columns,
                                          const T* query) {
  constexpr Index W = kLanes<T>;
  Pack<T> sums[W];
  for (Index k = 0; k < W; ++k) sums[k] = T(0);
  Index c = 0;
  const auto step = [&](Index at) {
    const Pack<T> q = Pack<T>::load(query + at);
#pragma GCC unroll 16
    for (Index k = 0; k < Keys; ++k)
      sums[k] = mul_add(Pack<T>::load(rows + k * stride + at), q, sums[k]);
  };
  for (; c + kLine<T> <= columns; c += kLine<T>) {
#pragma GCC unroll 16
    for (Index k = 0; k < Keys; ++k) prefetch_behind(rows + k * stride + c);
#pragma GCC unroll 4
    for (Index at = 0; at < kLine<T>; at += W) step(c + at);
  }
  for (; c + W <= columns; c += W) step(c);
  if (c < columns) {
    const Pack<T> q = load_part(query + c, columns - c);
    for (Index k = 0; k < Keys; ++k)
      sums[k] = mul_add(load_part(rows + k * stride + c, columns - c), q, sums[k]);
  }
  return sums_of_lanes(sums);
}

// sums[v] += sum over keys of weights[key * weights_row] * rows[key][v * W ...]
template <class T, int Vectors>
inline void mix_vectors(const T* rows, Index stride, Index keys, const T* weights,
                        Index weights_row, T* sums) {
  constexpr Index W = kLanes<T>;
  Pack<T> acc[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) acc[v] = Pack<T>::load(sums + v * W);
#pragma GCC unroll 2
  for (Index j = 0; j < keys; ++j) {
    const Pack<T> weight = weights[j * weights_row];
#pragma GCC unroll 8
    for (Index c = 0; c < Vectors * W; c += kLine<T>) prefetch_behind(rows + j * stride + c);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v)
      acc[v] = mul_add(weight, Pack<T>::load(rows + j * stride + v * W), acc[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) acc[v].store(sums + v * W);
}

}  // namespace detail

// out[key] = rows[key] . query, 0 behind the last key: `out` has room for whole vectors.
template <class T>
void row_dots(const T* rows, Index stride, Index keys, Index columns, const T* query, T* out) {
  constexpr Index W = kLanes<T>;
  for (Index j = 0; j < keys; j += W) {
    const Index count = std::min(W, keys - j);
    const T* block = rows + j * stride;
    Pack<T> dots = T(0);
    if (count == W)
      dots = detail::dots_of_rows<T, int(W)>(block, stride, columns, query);
    else
      for (Index k = 0; k < count; ++k)
        dots.v[k] = detail::dots_of_rows<T, 1>(block + k * stride, stride, columns, query).v[0];
    dots.store(out + j);
  }
}

// out[key][i] = rows[key] . queries[i] for i < query_rows; 0 in the lanes behind.
// queries: dense rows of `columns` numbers; out: [keys][lanes]; row: room for keys in whole vectors.
template <class T>
void narrow_dots(const T* rows, Index stride, Index keys, Index columns, const T* queries,
                 Index query_rows, T* out, Index lanes, T* row) {
  for (Index i = 0; i < query_rows; ++i) {
    row_dots(rows, stride, keys, columns, queries + i * columns, row);
    for (Index j = 0; j < keys; ++j) {
      if (i == 0) std::fill(out + j * lanes, out + (j + 1) * lanes, T(0));
      out[j * lanes + i] = row[j];
    }
  }
}

// out[column * out_step] += sum over keys of rows[key][column] * weights[key * weight_step]
template <class T>
void row_mix(const T* rows, Index stride, Index keys, Index columns, const T* weights,
             Index weight_step, T* out, Index out_step) {
  constexpr Index W = kLanes<T>;
  constexpr int kBlock = 8;
  Index c = 0;
  const auto block = [&]<int Vectors>() {
    T sums[Vectors * W] = {};
    detail::mix_vectors<T, Vectors>(rows + c, stride, keys, weights, weight_step, sums);
    for (Index n = 0; n < Vectors * W; ++n) out[(c + n) * out_step] += sums[n];
    c += Vectors * W;
  };
  while (c + kBlock * W <= columns) block.template operator()<kBlock>();
  if (c + 4 * W <= columns) block.template operator()<4>();
  while (c + W <= columns) block.template operator()<1>();
  for (; c < columns; ++c) {
    T sum = T(0);
    for (Index j = 0; j < keys; ++j) sum += weights[j * weight_step] * rows[j * stride + c];
    out[c * out_step] += sum;
  }
}

// The same for the columns i < query_rows of weights and out, both of `lanes` numbers per row.
template <class T>
void narrow_mix(const T* rows, Index stride, Index keys, Index columns, const T* weights,
                Index query_rows, T* out, Index lanes) {
  for (Index i = 0; i < query_rows; ++i)
    row_mix(rows, stride, keys, columns, weights + i, lanes, out + i, lanes);
}

}  // namespace heed::inline HEED_ABI
