// SPDX-License-Identifier: Apache-2.0
#pragma once

// The engine's two products for one or few queries, as in decoding: vectors run along the columns of keys and values,
// which are read once for four queries, in the order of memory and as they are stored. A query's results have the same
// bits whatever other queries stand beside it.
//
// Cost  dim / W FMAs per key and query in each product, a load per two to four of them, and a sum of W lanes per key and
//       query; a panel of one vector of queries takes dim FMAs per key, whether its lanes are in use or not.

#include <heed/simd/transpose.hpp>
#include <heed/simd/widen.hpp>

#include <algorithm>
#include <cstdint>

namespace heed {
inline namespace HEED_ABI {

// Up to this many queries these products are faster than a panel of one vector.
template <class Real>
inline constexpr Index kFewRows = kLanes<Real> >= 8 ? 8 : kLanes<Real>;

// A query, and the memory for its dot products: room for whole vectors of keys.
template <class Real>
struct DotQuery {
  const Real* query;
  Real* dots;
};
// The weights of a query's keys, and the memory to which their products with the values are added.
template <class Real>
struct AccumulateQuery {
  const Real* weights;
  Real* out;
};

// Rows that lie anywhere: row k begins at rows[k] + column. Prefetching reads kRowsAhead addresses behind the last one.
template <class Real>
struct ScatteredRows {
  using Number = Real;
  const Real* const* rows;
  Index column = 0;

  [[nodiscard]] ScatteredRows from(Index row, Index c) const { return {rows + row, column + c}; }
};
inline constexpr Index kRowsAhead = 16;
template <class Real>
[[nodiscard, gnu::always_inline]] inline Pack<Real> load_row(const ScatteredRows<Real>& rows,
                                                             Index k, Index c) {
  return Pack<Real>::load(rows.rows[k] + rows.column + c);
}
template <class Real>
inline void convert(const ScatteredRows<Real>& rows, Index count, Real* to) {
  std::copy_n(rows.rows[0] + rows.column, count, to);
}

// Numbers c, c + 1, ..., c + W - 1 of row k.
template <class Real, class Number>
[[nodiscard, gnu::always_inline]] inline Pack<Real> load_row(const StoredRows<Number>& rows,
                                                             Index k, Index c) {
  const Number* from = rows.data + k * rows.stride + c;
  if constexpr (std::is_same_v<Number, Real>) {
    return Pack<Real>::load(from);
  } else if constexpr (std::is_same_v<Real, float>) {
    return load_widened(from);
  } else {
    Real lanes[kLanes<Real>];
    widen(from, kLanes<Real>, lanes);
    return Pack<Real>::load(lanes);
  }
}
template <class Real>
[[nodiscard, gnu::always_inline]] inline Pack<Real> load_row(const ScaledRows& rows, Index k,
                                                             Index c) {
  if constexpr (std::is_same_v<Real, float>) {
    return load_widened(rows.data + k * rows.stride + c) *
           Pack<float>(rows.scales[k * rows.scale_stride]);
  } else {
    Real lanes[kLanes<Real>];
    convert(rows.from(k, c), kLanes<Real>, lanes);
    return Pack<Real>::load(lanes);
  }
}

// The first `count` < W numbers of a row, with zeros in the lanes behind them.
template <class Real, class Row>
[[nodiscard]] inline Pack<Real> load_part(const Row& row, Index count) {
  Real lanes[kLanes<Real>] = {};
  convert(row, count, lanes);
  return Pack<Real>::load(lanes);
}

namespace detail {

// Bytes by which prefetching runs ahead: a page of most systems, where the processor's own prefetching stops.
inline constexpr Index kPrefetchBytes = 4096;

// Numbers per cache line, at least a vector of Real.
template <class Real, class Stored>
inline constexpr Index kLine = std::max<Index>(64 / Index(sizeof(Stored)), kLanes<Real>);

// Fetches the cache line kPrefetchBytes behind `line`, which need not be memory of the program.
template <class Stored>
[[gnu::always_inline]] inline void prefetch_behind(const Stored* line) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(line) +
                                                   std::uintptr_t(kPrefetchBytes)));
}

// Fetches what will be read some rows behind numbers c, ... of row k.
template <class Rows>
[[gnu::always_inline]] inline void prefetch_row(const Rows& rows, Index k, Index c) {
  prefetch_behind(rows.data + k * rows.stride + c);
}
template <class Real>
[[gnu::always_inline]] inline void prefetch_row(const ScatteredRows<Real>& rows, Index k, Index c) {
  __builtin_prefetch(rows.rows[k + kRowsAhead] + rows.column + c);
}

// Keys that a block of `Queries` queries takes at once, and columns in vectors: enough accumulators
// to hide the latency of an FMA on two units.
template <class Real, int Queries>
inline constexpr int kBlockKeys = Queries == 1 ? kLanes<Real>
                                               : std::min(kLanes<Real>,
                                                          (kRegisters == 32 ? 16 : 8) / Queries);
template <int Queries>
inline constexpr int kBlockVectors = Queries == 1 ? 8 : (kRegisters == 32 ? 16 : 8) / Queries;

// Fetches the memory that lies kPrefetchBytes behind `count` rows of `columns` numbers.
template <class Real, class Rows>
[[gnu::always_inline]] inline void prefetch_rows(const Rows& rows, Index count, Index columns) {
  constexpr Index line = kLine<Real, typename Rows::Number>;
  for (Index c = 0; c < columns; c += line)
#pragma GCC unroll 4
    for (Index k = 0; k < count; ++k) prefetch_row(rows, k, c);
}

// sums[q][k] = dot product of row k * step with query q, as a pack whose lanes remain to be added.
// Rows shorter than a vector are taken number by number.
template <int Queries, int Keys, class Real, class Rows>
[[gnu::always_inline]] inline void dot_packs(
    const Rows& rows, Index step, Index columns, const DotQuery<Real>* queries,
    Pack<Real> (&sums)[std::size_t(Queries)][std::size_t(Keys)]) {
  constexpr Index W = kLanes<Real>;
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 16
    for (int k = 0; k < Keys; ++k) sums[q][k] = Real(0);
  const Real* query[std::size_t(Queries)];
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q) query[q] = queries[q].query;
  const auto add = [&](const auto& row_pack, const auto& query_pack)
      __attribute__((always_inline)) {
    if constexpr (Queries == 1) {  // registers cannot hold this many rows beside their sums
      const Pack<Real> x = query_pack(0);
#pragma GCC unroll 16
      for (int k = 0; k < Keys; ++k) sums[0][k] = mul_add(row_pack(k), x, sums[0][k]);
    } else {
      Pack<Real> row[std::size_t(Keys)];
#pragma GCC unroll 16
      for (int k = 0; k < Keys; ++k) row[k] = row_pack(k);
#pragma GCC unroll 16
      for (int q = 0; q < Queries; ++q) {
        const Pack<Real> x = query_pack(q);
#pragma GCC unroll 16
        for (int k = 0; k < Keys; ++k) sums[q][k] = mul_add(row[k], x, sums[q][k]);
      }
    }
  };
  Index c = 0;
#pragma GCC unroll 2
  for (; c + W <= columns; c += W)
    add(
        [&](int k) __attribute__((always_inline)) { return load_row<Real>(rows, k * step, c); },
        [&](int q) __attribute__((always_inline)) { return Pack<Real>::load(query[q] + c); });
  if (c == columns) return;
  if (columns >= W) {  // the last W numbers; those already summed count as 0
    const auto counted = Pack<Real>::iota() < Pack<Real>(Real(c - (columns - W)));
    add(
        [&](int k) __attribute__((always_inline)) {
          return zero_where(counted, load_row<Real>(rows, k * step, columns - W));
        },
        [&](int q) __attribute__((always_inline)) {
          return zero_where(counted, Pack<Real>::load(query[q] + columns - W));
        });
  } else if constexpr (Keys == 1) {
    add([&](int k) { return load_part<Real>(rows.from(k * step, 0), columns); },
        [&](int q) {
          return load_part<Real>(StoredRows<Real>{query[q], 0}, columns);
        });
  }
}

// The dot products of up to W rows with one query, 0 behind them; in the order of block_dots(), so that a query's bits are
// the same.
template <class Real, class Rows>
[[gnu::noinline]] void few_dots(const Rows& rows, Index keys, Index columns,
                                const DotQuery<Real>& query, Index first) {
  Pack<Real> sums[kLanes<Real>];
  std::fill_n(sums, kLanes<Real>, Pack<Real>(Real(0)));
  for (Index k = 0; k < keys; ++k) {
    Pack<Real> one[1][1];
    dot_packs<1, 1>(rows.from(k, 0), 0, columns, &query, one);
    sums[k] = one[0][0];
  }
  sums_of_lanes(sums).store(query.dots + first);
}

// The dot products of `keys` <= W rows with `Queries` queries, 0 behind them; their places begin at dots + first.
template <int Queries, class Real, class Rows>
[[gnu::noinline]] void block_dots(const Rows& rows, Index keys, Index columns,
                                  const DotQuery<Real>* queries, Index first) {
  constexpr int W = kLanes<Real>, Keys = kBlockKeys<Real, Queries>, Steps = W / Keys;
  if (keys < W || columns < W) {
    for (int q = 0; q < Queries; ++q) few_dots(rows, keys, columns, queries[q], first);
    return;
  }
  // Rows k, k + Steps, ... at once: the first additions of their lanes are done in registers.
  Pack<Real> parts[std::size_t(Queries)][std::size_t(Steps)];
#pragma GCC unroll 1
  for (Index k = 0; k < Steps; ++k) {
    Pack<Real> sums[std::size_t(Queries)][std::size_t(Keys)];
    dot_packs<Queries, Keys>(rows.from(k, 0), Steps, columns, queries, sums);
#pragma GCC unroll 16
    for (int q = 0; q < Queries; ++q) {
      add_halves<Real, W / 2, Keys>(sums[q]);
      parts[q][k] = sums[q][0];
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q) {
    add_halves<Real, Steps / 2, Steps>(parts[q]);
    parts[q][0].store(queries[q].dots + first);
  }
}

// sums[q][v] = sum over rows j of (weight j of query q) * (columns v * W ... of row j).
template <int Queries, int Vectors, class Real, class Rows>
[[gnu::always_inline]] inline void mix_vectors(
    const Rows& rows, Index keys, const AccumulateQuery<Real>* queries, Index weight_step,
    Real (&sums)[std::size_t(Queries)][std::size_t(Vectors * kLanes<Real>)]) {
  constexpr int W = kLanes<Real>;
  Pack<Real> acc[std::size_t(Queries)][std::size_t(Vectors)];
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) acc[q][v] = Real(0);
#pragma GCC unroll 2
  for (Index j = 0; j < keys; ++j) {
#pragma GCC unroll 8
    for (Index c = 0; c < Vectors * W; c += kLine<Real, typename Rows::Number>)
      prefetch_row(rows, j, c);
    Pack<Real> row[std::size_t(Vectors)];
    if constexpr (Queries > 1)
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) row[v] = load_row<Real>(rows, j, v * W);
#pragma GCC unroll 16
    for (int q = 0; q < Queries; ++q) {
      const Pack<Real> weight = queries[q].weights[j * weight_step];
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v)
        acc[q][v] =
            mul_add(weight, Queries > 1 ? row[v] : load_row<Real>(rows, j, v * W), acc[q][v]);
    }
  }
#pragma GCC unroll 16
  for (int q = 0; q < Queries; ++q)
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) acc[q][v].store(sums[q] + v * W);
}

// row_accumulate() for `Queries` queries.
template <int Queries, class Real, class Rows>
void block_mix(const Rows& rows, Index keys, Index columns, const AccumulateQuery<Real>* queries,
               Index weight_step, Index out_step) {
  constexpr int W = kLanes<Real>, kBlock = kBlockVectors<Queries>;
  Index c = 0;
  const auto block = [&]<int Vectors>() {
    Real sums[std::size_t(Queries)][std::size_t(Vectors * W)];
    mix_vectors<Queries, Vectors>(rows.from(0, c), keys, queries, weight_step, sums);
    for (int q = 0; q < Queries; ++q)
      for (Index n = 0; n < Vectors * W; ++n) queries[q].out[(c + n) * out_step] += sums[q][n];
    c += Vectors * W;
  };
  while (c + kBlock * W <= columns) block.template operator()<kBlock>();
  if constexpr (kBlock > 4)
    if (c + 4 * W <= columns) block.template operator()<4>();
  while (c + W <= columns) block.template operator()<1>();
  if (c == columns) return;
  if (columns >= W) {  // the last W columns; some of them are done already
    Real sums[std::size_t(Queries)][std::size_t(W)];
    mix_vectors<Queries, 1>(rows.from(0, columns - W), keys, queries, weight_step, sums);
    for (int q = 0; q < Queries; ++q)
      for (Index n = c; n < columns; ++n)
        queries[q].out[n * out_step] += sums[q][n - (columns - W)];
    return;
  }
  for (int q = 0; q < Queries; ++q) {
    Pack<Real> sum = Real(0);
    for (Index j = 0; j < keys; ++j)
      sum = mul_add(Pack<Real>(queries[q].weights[j * weight_step]),
                    load_part<Real>(rows.from(j, c), columns - c), sum);
    for (Index n = c; n < columns; ++n) queries[q].out[n * out_step] += sum.lane(int(n - c));
  }
}

// Calls body.operator()<Queries>(first) for blocks of queries that make up `count`.
template <class Body>
[[gnu::always_inline]] inline void for_query_blocks(Index count, Body&& body) {
  Index i = 0;
  for (; i + 4 <= count; i += 4) body.template operator()<4>(i);
  if (i + 2 <= count) {
    body.template operator()<2>(i);
    i += 2;
  }
  if (i < count) body.template operator()<1>(i);
}

}  // namespace detail

// dots[key] = rows[key] . query for each query, 0 behind the last key.
template <class Real, class Rows>
void row_dots(const Rows& rows, Index keys, Index columns, const DotQuery<Real>* queries,
              Index count) {
  constexpr Index W = kLanes<Real>;
  for (Index j = 0; j < keys; j += W) {
    const Rows block = rows.from(j, 0);
    const Index some = std::min(W, keys - j);
    detail::prefetch_rows<Real>(block, some, columns);
    detail::for_query_blocks(count, [&]<int Queries>(Index first) {
      detail::block_dots<Queries>(block, some, columns, queries + first, j);
    });
  }
}

// out[column * out_step] += sum over keys of rows[key][column] * weights[key * weight_step] for each query.
template <class Real, class Rows>
void row_accumulate(const Rows& rows, Index keys, Index columns,
                    const AccumulateQuery<Real>* queries, Index count, Index weight_step,
                    Index out_step) {
  detail::for_query_blocks(count, [&]<int Queries>(Index first) {
    detail::block_mix<Queries>(rows, keys, columns, queries + first, weight_step, out_step);
  });
}

// out[key][i] = rows[key] . queries[i] for i < query_rows <= kFewRows; 0 in the lanes behind.
// queries: dense rows of `columns` numbers; out: [keys][lanes]; dots: room for query_rows rows of keys in whole vectors.
template <class Real>
void few_dots(const Real* rows, Index stride, Index keys, Index columns, const Real* queries,
              Index query_rows, Real* out, Index lanes, Real* dots) {
  const Index row = whole_vectors<Real>(keys);
  DotQuery<Real> all[std::size_t(kFewRows<Real>)];
  for (Index i = 0; i < query_rows; ++i) all[i] = {queries + i * columns, dots + i * row};
  row_dots(StoredRows<Real>{rows, stride}, keys, columns, all, query_rows);
  pack_lanes(dots, row, query_rows, keys, out, lanes);
}

// out[column][i] += sum over keys of rows[key][column] * weights[key][i] for i < query_rows <= kFewRows; rows of weights and
// out have `lanes` numbers.
template <class Real>
void few_accumulate(const Real* rows, Index stride, Index keys, Index columns, const Real* weights,
                    Index query_rows, Real* out, Index lanes) {
  AccumulateQuery<Real> all[std::size_t(kFewRows<Real>)];
  for (Index i = 0; i < query_rows; ++i) all[i] = {weights + i, out + i};
  row_accumulate(StoredRows<Real>{rows, stride}, keys, columns, all, query_rows, lanes, lanes);
}

}  // namespace HEED_ABI
}  // namespace heed
