// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's two products for a panel that holds one or few queries, as in decoding: vectors run along
// the columns of keys and values, which are read once, in the order of memory.
//
// Cost  dim / W loads and FMAs per key and query in each product, and a transpose per W keys; a panel of
//       one vector of queries takes dim FMAs per key, whether its lanes are in use or not.

#include <heed/simd/transpose.hpp>
#include <heed/simd/widen.hpp>

#include <algorithm>
#include <cstdint>

namespace heed {
inline namespace HEED_ABI {

// Up to this many queries these products are faster than a panel of one vector.
template <class Real>
inline constexpr Index kNarrowRows = kLanes<Real> >= 8 ? kLanes<Real> / 4 : 1;

// W numbers of a row.
template <class Real, class Stored>
[[nodiscard, gnu::always_inline]] inline Pack<Real> load_row(const Stored* from) {
  if constexpr (std::is_same_v<Stored, Real>) {
    return Pack<Real>::load(from);
  } else if constexpr (std::is_same_v<Real, float>) {
    return load_widened(from);
  } else {
    Real lanes[kLanes<Real>];
    widen(from, kLanes<Real>, lanes);
    return Pack<Real>::load(lanes);
  }
}

// A pack of `count` < W numbers, with zeros in the lanes behind them.
template <class Real, class Stored>
[[nodiscard]] inline Pack<Real> load_part(const Stored* from, Index count) {
  Real lanes[kLanes<Real>] = {};
  convert(from, count, lanes);
  return Pack<Real>::load(lanes);
}

namespace detail {

// How many bytes ahead rows are fetched into cache: a page of most systems, at whose end the processor's own
// prefetching stops.
inline constexpr Index kPrefetchBytes = 4096;

// Numbers in a line of cache, at least a vector of Real.
template <class Real, class Stored>
inline constexpr Index kLine = std::max<Index>(64 / Index(sizeof(Stored)), kLanes<Real>);

// Fetches the line of cache that lies kPrefetchBytes behind `line`; there need not be memory.
template <class Stored>
[[gnu::always_inline]] inline void prefetch_behind(const Stored* line) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(line) +
                                                   std::uintptr_t(kPrefetchBytes)));
}

// Dot products of `Keys` <= W rows with one query; lanes from Keys on hold 0.
template <class Real, int Keys, class Stored>
[[nodiscard]] inline Pack<Real> dots_of_rows(const Stored* rows, Index stride, Index columns,
                                             const Real* query) {
  constexpr Index W = kLanes<Real>, line = kLine<Real, Stored>;
  Pack<Real> sums[W];
  for (Index k = 0; k < W; ++k) sums[k] = Real(0);
  Index c = 0;
  const auto step = [&](Index at) {
    const Pack<Real> q = Pack<Real>::load(query + at);
#pragma GCC unroll 16
    for (Index k = 0; k < Keys; ++k)
      sums[k] = mul_add(load_row<Real>(rows + k * stride + at), q, sums[k]);
  };
  for (; c + line <= columns; c += line) {
#pragma GCC unroll 16
    for (Index k = 0; k < Keys; ++k) prefetch_behind(rows + k * stride + c);
#pragma GCC unroll 4
    for (Index at = 0; at < line; at += W) step(c + at);
  }
  for (; c + W <= columns; c += W) step(c);
  if (c < columns) {
    const Pack<Real> q = load_part<Real>(query + c, columns - c);
    for (Index k = 0; k < Keys; ++k)
      sums[k] = mul_add(load_part<Real>(rows + k * stride + c, columns - c), q, sums[k]);
  }
  return sums_of_lanes(sums);
}

// sums[v] += sum over keys of weights[key * weights_row] * rows[key][v * W ...]
template <class Real, int Vectors, class Stored>
inline void mix_vectors(const Stored* rows, Index stride, Index keys, const Real* weights,
                        Index weights_row, Real* sums) {
  constexpr Index W = kLanes<Real>;
  Pack<Real> acc[Vectors];
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) acc[v] = Pack<Real>::load(sums + v * W);
#pragma GCC unroll 2
  for (Index j = 0; j < keys; ++j) {
    const Pack<Real> weight = weights[j * weights_row];
#pragma GCC unroll 8
    for (Index c = 0; c < Vectors * W; c += kLine<Real, Stored>)
      prefetch_behind(rows + j * stride + c);
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v)
      acc[v] = mul_add(weight, load_row<Real>(rows + j * stride + v * W), acc[v]);
  }
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) acc[v].store(sums + v * W);
}

}  // namespace detail

// out[key] = rows[key] . query, 0 behind the last key: `out` has room for whole vectors.
template <class Real, class Stored>
void row_dots(const Stored* rows, Index stride, Index keys, Index columns, const Real* query,
              Real* out) {
  constexpr Index W = kLanes<Real>;
  for (Index j = 0; j < keys; j += W) {
    const Index count = std::min(W, keys - j);
    const Stored* block = rows + j * stride;
    Pack<Real> dots = Real(0);
    if (count == W)
      dots = detail::dots_of_rows<Real, int(W)>(block, stride, columns, query);
    else
      for (Index k = 0; k < count; ++k)
        dots.v[k] = detail::dots_of_rows<Real, 1>(block + k * stride, stride, columns, query).v[0];
    dots.store(out + j);
  }
}

// out[key][i] = rows[key] . queries[i] for i < query_rows; 0 in the lanes behind.
// queries: dense rows of `columns` numbers; out: [keys][lanes]; row: room for keys in whole vectors.
template <class Real>
void narrow_dots(const Real* rows, Index stride, Index keys, Index columns, const Real* queries,
                 Index query_rows, Real* out, Index lanes, Real* row) {
  for (Index i = 0; i < query_rows; ++i) {
    row_dots(rows, stride, keys, columns, queries + i * columns, row);
    for (Index j = 0; j < keys; ++j) {
      if (i == 0) std::fill(out + j * lanes, out + (j + 1) * lanes, Real(0));
      out[j * lanes + i] = row[j];
    }
  }
}

// out[column * out_step] += sum over keys of rows[key][column] * weights[key * weight_step]
template <class Real, class Stored>
void row_mix(const Stored* rows, Index stride, Index keys, Index columns, const Real* weights,
             Index weight_step, Real* out, Index out_step) {
  constexpr Index W = kLanes<Real>;
  constexpr int kBlock = 8;
  Index c = 0;
  const auto block = [&]<int Vectors>() {
    Real sums[Vectors * W] = {};
    detail::mix_vectors<Real, Vectors>(rows + c, stride, keys, weights, weight_step, sums);
    for (Index n = 0; n < Vectors * W; ++n) out[(c + n) * out_step] += sums[n];
    c += Vectors * W;
  };
  while (c + kBlock * W <= columns) block.template operator()<kBlock>();
  if (c + 4 * W <= columns) block.template operator()<4>();
  while (c + W <= columns) block.template operator()<1>();
  for (; c < columns; ++c) {
    Real sum = Real(0);
    for (Index j = 0; j < keys; ++j) sum += weights[j * weight_step] * Real(rows[j * stride + c]);
    out[c * out_step] += sum;
  }
}

// out[column][i] += sum over keys of rows[key][column] * weights[key][i] for i < query_rows; rows of weights and
// out have `lanes` numbers.
template <class Real>
void narrow_mix(const Real* rows, Index stride, Index keys, Index columns, const Real* weights,
                Index query_rows, Real* out, Index lanes) {
  for (Index i = 0; i < query_rows; ++i)
    row_mix(rows, stride, keys, columns, weights + i, lanes, out + i, lanes);
}

}  // namespace HEED_ABI
}  // namespace heed
