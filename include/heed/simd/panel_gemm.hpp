// SPDX-License-Identifier: Apache-2.0
#pragma once

// The matrix product of the engine: C[rows][lanes] (+)= A[rows][depth] * B[depth][lanes].
//
// A is read in place, at any strides, one scalar at a time, which is broadcast to a vector. B and C are rows of
// vectors. No operand is copied. The micro-kernel keeps rows x vectors accumulators in registers: 6 x 4 of 32
// registers, 6 x 2 of 16, or 5 x 4 on Arm, whose products take a scalar from a register. Elements of A and B are those of
// C, or pairs of 16-bit numbers (bfloat_pairs.hpp), of which depth is the number.
//
// Cost  one vector FMA per rows x depth x vectors; 96 % of the FMA peak when B fits in L1.

#include <heed/simd/pack.hpp>

#include <algorithm>

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace heed {
inline namespace HEED_ABI {

// The left operand: element (i, k) is data[i * row + k * depth].
template <class Element>
struct Broadcast {
  const Element* data;
  Index row, depth;
  [[nodiscard]] Broadcast skip_rows(Index n) const { return {data + n * row, row, depth}; }
};

// The same with columns in segments of `period` columns, which lie `segment` apart: data[i * row +
// (k % period) * depth + (k / period) * segment].
template <class Element>
struct SegmentedBroadcast {
  const Element* data;
  Index row, depth;
  Index period, segment;
  [[nodiscard]] SegmentedBroadcast skip_rows(Index n) const {
    return {data + n * row, row, depth, period, segment};
  }
};

// Overwrites C, adds to it, or overwrites it while keeping the maximum of each column.
enum class Store { overwrite, add, overwrite_and_max };

namespace detail {

template <class Real>
using VectorOf = typename Pack<Real>::Vector;

#if defined(__aarch64__)
// x in lane 0 of a vector, from which a product takes it. clang would load x to every lane, which takes a turn of a unit that
// multiplies: four fifths of the speed of this load, by a model of the processor.
template <class Vector, class Element>
[[nodiscard, gnu::always_inline]] inline Vector first_lane(const Element& x) {
  Vector lanes;
  if constexpr (sizeof(Element) == 4)
    asm("ldr %s0, %1" : "=w"(lanes) : "m"(x));
  else
    asm("ldr %d0, %1" : "=w"(lanes) : "m"(x));
  return lanes;
}
#endif

// The kernel's way to read elements of A and B, and to multiply them: as the scalars that C holds.
template <class Element>
struct Elements {
  using Sum = Element;
  using Vector = VectorOf<Element>;
  [[nodiscard, gnu::always_inline]] static Vector load(const Element* from) {
    return Pack<Element>::load(from).v;
  }
#if defined(__aarch64__)
  [[nodiscard, gnu::always_inline]] static Vector broadcast(const Element& x) {
    return first_lane<Vector>(x);
  }
  [[nodiscard, gnu::always_inline]] static Vector add_product(Vector a, Vector b, Vector sum) {
    if constexpr (sizeof(Element) == 4)
      return Vector(vfmaq_laneq_f32(float32x4_t(sum), float32x4_t(b), float32x4_t(a), 0));
    else
      return Vector(vfmaq_laneq_f64(float64x2_t(sum), float64x2_t(b), float64x2_t(a), 0));
  }
#else
  [[nodiscard, gnu::always_inline]] static Vector broadcast(Element x) { return x - Vector{}; }
  [[nodiscard, gnu::always_inline]] static Vector add_product(Vector a, Vector b, Vector sum) {
    return fused_multiply_add(a, b, sum);
  }
#endif
};
template <class Element>
using SumOf = typename Elements<Element>::Sum;

// Any left operand of `depth` columns as segments, so that one kernel serves all kinds.
template <class Element>
[[nodiscard]] SegmentedBroadcast<Element> in_segments(const Broadcast<Element>& a, Index depth) {
  return {a.data, a.row, a.depth, depth, 0};
}
template <class Element>
[[nodiscard]] SegmentedBroadcast<Element> in_segments(const SegmentedBroadcast<Element>& a, Index) {
  return a;
}

// Kernels of every shape are compiled for each kind of element, but not for each Store: the Store
// is tested before and behind the loop over the depth, which takes nearly all of the time.
template <int Rows, int Vectors, class Element>
[[gnu::always_inline]] inline void micro_kernel(Store store, Index depth,
                                                const SegmentedBroadcast<Element>& a,
                                                const Element* b, Index b_row, SumOf<Element>* c,
                                                Index c_row, SumOf<Element>* running_max,
                                                const SumOf<Element>* first_row) {
  using E = Elements<Element>;
  using P = Pack<SumOf<Element>>;
  constexpr int W = P::width;
  typename P::Vector acc[std::size_t(Rows)][std::size_t(Vectors)];
#pragma GCC unroll 32
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) acc[i][v] = typename P::Vector{};
  const auto start_with = [&](const SumOf<Element>* rows, Index stride) {
#pragma GCC unroll 32
    for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) acc[i][v] = P::load(rows + i * stride + v * W).v;
  };
  if (store == Store::add)
    start_with(c, c_row);
  else if (first_row)
    start_with(first_row, 0);
  // Invariant: acc[i][v] is the initial value of C plus the sum of a(i, k) b[k][v] over the columns
  // k so far, in their order.
  const Element* segment = a.data;
#pragma GCC unroll 1
  for (Index first = 0; first < depth; first += a.period, segment += a.segment) {
    const Element* from = segment;
    const Index count = std::min(a.period, depth - first);
#pragma GCC unroll 1
    for (Index k = 0; k < count; ++k, b += b_row) {
      typename E::Vector row[std::size_t(Vectors)];
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) row[v] = E::load(b + v * W);
#pragma GCC unroll 32
      for (int i = 0; i < Rows; ++i) {
        const typename E::Vector element = E::broadcast(from[i * a.row + k * a.depth]);
#pragma GCC unroll 8
        for (int v = 0; v < Vectors; ++v) acc[i][v] = E::add_product(element, row[v], acc[i][v]);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < Rows; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) P(acc[i][v]).store(c + i * c_row + v * W);
  if (store != Store::overwrite_and_max) return;
#pragma GCC unroll 8
  for (int v = 0; v < Vectors; ++v) {
    P m = P::load(running_max + v * W);
#pragma GCC unroll 32
    for (int i = 0; i < Rows; ++i) m = max(P(acc[i][v]), m);
    m.store(running_max + v * W);
  }
}

// Rows per micro-kernel: as many as leave registers for B's row and one broadcast, or on Arm for those of all rows, which
// compilers load first; with one vector per row, as many as hide the latency of a product.
#if defined(__aarch64__)
template <int Vectors>
inline constexpr int kMicroRows = Vectors >= 3 ? 5 : 8;
#else
template <int Vectors>
inline constexpr int kMicroRows = Vectors >= 3 ? 6
                                  : Vectors == 1 ? 8
                                                 : (kRegisters == 32 ? 12 : 6);
#endif

// Rows that the next kernel reads for the first time: rows of A where these lie one behind the
// other, or rows of C where it is added to.
template <int Rows, int Vectors, class Element>
[[gnu::always_inline]] inline void prefetch_next_rows(Store store, Index depth,
                                                      const SegmentedBroadcast<Element>& a,
                                                      const SumOf<Element>* c, Index c_row) {
  using Sum = SumOf<Element>;
  constexpr Index line = 64 / Index(sizeof(Sum));
  if (a.depth != 1) return;
  const bool adds = store == Store::add;
  for (int i = Rows; i < 2 * Rows; ++i)
    if (adds)
      for (Index at = 0; at < Vectors * kLanes<Sum>; at += line)
        __builtin_prefetch(c + i * c_row + at, 1);
    else
      for (Index at = 0; at < depth; at += line) __builtin_prefetch(a.data + i * a.row + at);
}

// `times` kernels of `Rows` rows each, one below the other. A function of its own, so that its pointers get the registers.
template <int Rows, int Vectors, class Element>
[[gnu::noinline]] void run_kernels(Store store, Index times, Index depth,
                                   SegmentedBroadcast<Element> a, const Element* b, Index b_row,
                                   SumOf<Element>* c, Index c_row, SumOf<Element>* running_max,
                                   const SumOf<Element>* first_row) {
  for (; times > 0; --times) {
    if constexpr (Vectors == kPanelVectors && Rows > 4)
      if (times > 1) prefetch_next_rows<Rows, Vectors>(store, depth, a, c, c_row);
    micro_kernel<Rows, Vectors>(store, depth, a, b, b_row, c, c_row, running_max, first_row);
    a = a.skip_rows(Rows);
    c += Rows * c_row;
  }
}

template <int Vectors, class Element>
void gemm_vectors(Store store, Index rows, Index depth, SegmentedBroadcast<Element> a,
                  const Element* b, Index b_row, SumOf<Element>* c, Index c_row,
                  SumOf<Element>* running_max, const SumOf<Element>* first_row) {
  constexpr int most = kMicroRows<Vectors>;
  const auto run = [&]<int Rows>(Index times) {
    if (times == 0) return;
    run_kernels<Rows, Vectors>(store, times, depth, a, b, b_row, c, c_row, running_max, first_row);
    a = a.skip_rows(times * Rows);
    c += times * Rows * c_row;
    rows -= times * Rows;
  };
  // Kernels of most and of most - 1 rows together make up any larger count. A remainder of few rows is avoided: each
  // vector of B that it loads would serve few products, which would wait for each other.
  const Index rest = rows % most;
  Index whole = rows / most, shorter = 0;  // kernels of most and of most - 1 rows
  if (rest > 0 && most - rest <= whole + 1) {
    shorter = most - rest;
    whole += 1 - shorter;
  } else if (most == 6 && rest == 2 && whole > 0) {  // 8 = 5 + 3
    --whole;
    shorter = 1;
  } else if (most == 12 && rest == 4 && whole > 0) {  // 16 = 8 + 8
    --whole;
  }
  run.template operator()<most>(whole);
  run.template operator()<most - 1>(shorter);
  if constexpr (most > 8) run.template operator()<8>(rows / 8);
  if constexpr (most > 6) run.template operator()<6>(rows / 6);
  run.template operator()<3>(rows / 3);
  run.template operator()<1>(rows);
}

// panel_gemm() for any element type.
template <class Element>
void panel_product(Store store, Index rows, Index depth, int vectors,
                   const SegmentedBroadcast<Element>& a, const Element* b, Index b_row,
                   SumOf<Element>* c, Index c_row, SumOf<Element>* running_max,
                   const SumOf<Element>* first_row) {
  const auto run = [&]<int Vectors>() {
    gemm_vectors<Vectors>(store, rows, depth, a, b, b_row, c, c_row, running_max, first_row);
  };
  switch (vectors) {
    case 1: return run.template operator()<1>();
    case 2: return run.template operator()<2>();
    default: break;
  }
  if constexpr (kPanelVectors == 4)
    vectors == 3 ? run.template operator()<3>() : run.template operator()<4>();
}

// gemm_add() for any element type.
template <class Element>
void add_product(Index rows, Index depth, Index columns, const SegmentedBroadcast<Element>& a,
                 const Element* b, Index b_row, SumOf<Element>* c, Index c_row) {
  using Sum = SumOf<Element>;
  constexpr Index W = kLanes<Sum>;
  Index done = 0;
  while (columns - done >= W) {
    const int vectors = int(std::min<Index>((columns - done) / W, kPanelVectors));
    panel_product<Element>(Store::add, rows, depth, vectors, a, b + done, b_row, c + done, c_row,
                           nullptr, nullptr);
    done += vectors * W;
  }
  if (done == columns) return;
  constexpr Index block = 12;
  Sum edge[std::size_t(block * W)] = {};
  for (Index r = 0; r < rows; r += block) {
    const Index n = std::min(block, rows - r);
    for (Index i = 0; i < n; ++i)
      for (Index col = done; col < columns; ++col)
        edge[i * W + col - done] = c[(r + i) * c_row + col];
    panel_product<Element>(Store::add, n, depth, 1, a.skip_rows(r), b + done, b_row, edge, W,
                           nullptr, nullptr);
    for (Index i = 0; i < n; ++i)
      for (Index col = done; col < columns; ++col)
        c[(r + i) * c_row + col] = edge[i * W + col - done];
  }
}

}  // namespace detail

// C[rows][vectors * W] over `depth`, by `store`. With Store::overwrite_and_max, running_max[lane] is raised to the
// largest number of its column (NaN is passed over). With Store::overwrite, first_row[vectors * W], if given, is added to
// each row of the product, in front of its terms. vectors in [1, kPanelVectors].
template <class Element, template <class> class A>
void panel_gemm(Store store, Index rows, Index depth, int vectors, const A<Element>& a,
                const Element* b, Index b_row, detail::SumOf<Element>* c, Index c_row,
                detail::SumOf<Element>* running_max = nullptr,
                const detail::SumOf<Element>* first_row = nullptr) {
  detail::panel_product<Element>(store, rows, depth, vectors, detail::in_segments(a, depth), b,
                                 b_row, c, c_row, running_max, first_row);
}

// C[rows][columns] += A[rows][depth] * B[depth][columns] for any number of columns; the terms join C one after
// the other, so that a product may be taken in parts of its depth without a change of bits. Rows of B must be
// readable up to the next multiple of W columns; C is touched in its own columns only.
template <class Element, template <class> class A>
void gemm_add(Index rows, Index depth, Index columns, const A<Element>& a, const Element* b,
              Index b_row, detail::SumOf<Element>* c, Index c_row) {
  detail::add_product<Element>(rows, depth, columns, detail::in_segments(a, depth), b, b_row, c,
                               c_row);
}

}  // namespace HEED_ABI
}  // namespace heed
