// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products of layers on the engine's panels: out = a b, out += a b, out = bias + a b.
//
//   b is packed once, in panels of as many columns as a panel of queries has lanes. Workers take a block of rows
//   of a and a block of columns of b at a time, and go through the depth in blocks: a block of a stays in the second
//   level of cache, a panel of b in the first.
//
// In a product of more depth than rows, such as a gradient of weights, each worker packs a block of
// the depth at a time for itself.
//
// A product of few rows, as in generation, reads b once in the order of memory and does not pack it.
//
// Cost      rows depth columns multiply-adds; memory depth x columns for the packed copy, or half a
//           MiB a thread if there is more depth than rows.
// Results   do not depend on the number of threads, not in their last bit.
// Mixed     with Precision::mixed both factors are rounded to bfloat16 on the way, and their products are added up in
//           float; a product of few rows stays in float, since reading b takes most of its time.

#include <heed/core/parallel.hpp>
#include <heed/nn/context.hpp>
#include <heed/simd/few_products.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/panel_gemm.hpp>
#include <heed/simd/transpose.hpp>

#include <algorithm>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

// An operand at any strides, one of which is 1: element (i, k) is data[i * row + k * column].
template <class Real>
struct Factor {
  const Real* data;
  Index row, column;
};
template <class Real>
[[nodiscard]] Factor<std::remove_const_t<Real>> factor(const MatrixView<Real>& m) {
  return {m.data, m.stride, 1};
}
template <class Real>
[[nodiscard]] Factor<std::remove_const_t<Real>> transposed(const MatrixView<Real>& m) {
  return {m.data, 1, m.stride};
}

enum class Into { overwrite, add };

namespace detail {

[[nodiscard]] constexpr Index parts_of(Index count, Index size) {
  return (count + size - 1) / size;
}

// A block of a that stays in the second level of cache: 96 x 256 floats are 96 KiB. The rows are a multiple of those
// of the micro-kernel.
inline constexpr Index kRowBlock = 96;
inline constexpr Index kDepthBlock = 256;
inline constexpr Index kColumnPanels = 16;
// Panels of b beside such a block: 8 x 256 rows of 64 floats are 512 KiB.
inline constexpr Index kDeepPanels = 8;
// Most rows of a product that reads b unpacked.
inline constexpr Index kFewRows = 4;

// Element: the type in which the kernel reads a and b, Real or pairs along the depth.
template <class Real, class Element>
class Product {
 public:
  static constexpr Index W = kLanes<Real>, L = kPanelLanes<Real>;
  static constexpr bool kPairs = !std::is_same_v<Element, Real>;

  Product(Context<Real>& c, Index depth, const Factor<Real>& a, const Factor<Real>& b,
          const MatrixView<Real>& out, Into into, const Real* bias)
      : c_(c), depth_(depth), a_(a), b_(b), out_(out), into_(into), bias_(bias) {}

  void run() {
    const int threads = worth_threads();
    if (out_.rows <= kFewRows && a_.column == 1) return run_few(threads);
    const Index panels = parts_of(out_.columns, L);
    if (depth_ > out_.rows) return run_deep(threads, panels);
    packed().resize(panels * elements(depth_), L);
    const auto of_panel = [&](Index p) { return packed().view().row(p * elements(depth_)); };
    const Index row_blocks = parts_of(out_.rows, kRowBlock);
    const Index column_blocks = parts_of(panels, kColumnPanels);
    const int workers = int(std::min<Index>(threads, row_blocks * column_blocks));
    Dispenser unpacked(panels), units(row_blocks * column_blocks);
    Turnstiles packed(1);
    const auto work = [&](int) {
      Block block;
      for (Index p = unpacked.next(); p >= 0; p = unpacked.next()) {
        for_depth(
            [&](Index k, Index deep) { pack(p, k, deep, block, of_panel(p) + elements(k) * L); });
        packed.pass(0);
      }
      packed.wait(0, panels);
      for (Index u = units.next(); u >= 0; u = units.next()) {
        const Index panel = u / row_blocks * kColumnPanels,
                    last = std::min(panel + kColumnPanels, panels);
        for_depth([&](Index k, Index deep) {
          multiply_block(u % row_blocks * kRowBlock, k, deep, panel, last,
                         of_panel(panel) + elements(k) * L, elements(depth_) * L, block);
        });
      }
    };
    run_workers(workers, work, [&] { packed.abandon(); });
  }

 private:
  // Memory of a worker.
  struct Block {
    static constexpr Index kNumbers = std::max(kRowBlock, L) * kDepthBlock;
    Scratch<Real> scratch{kNumbers + kRowBlock * L};
    Scratch<Element> pair_scratch{kPairs ? kRowBlock * kDepthBlock / 2 : 0};
    Real* numbers = scratch.take(kNumbers);    // a block of a, or of a panel of b
    Real* edge = scratch.take(kRowBlock * L);  // a block at the edge of `out`
    Element* pairs = pair_scratch.take(kPairs ? kRowBlock * kDepthBlock / 2 : 0);
  };

  [[nodiscard]] const PairProducts& products() const { return *c_.precision.products(); }
  // Elements along a depth of n numbers.
  [[nodiscard]] static constexpr Index elements(Index n) { return kPairs ? pairs_of(n) : n; }
  [[nodiscard]] Matrix<Element>& packed() const {
    if constexpr (kPairs)
      return c_.packed_pairs;
    else
      return c_.packed_factors;
  }
  [[nodiscard]] int worth_threads() const {
    const int threads = resolve_threads(c_.threads);
    const double flops = 2.0 * double(out_.rows) * double(out_.columns) * double(depth_);
    return c_.threads > 0 ? threads : int(std::min<double>(threads, 1.0 + flops / 1e6));
  }

  // Calls f(k, deep) for each block of the depth, in order; once where there is no depth.
  template <class F>
  void for_depth(const F& f) const {
    Index k = 0;
    do {
      f(k, std::min(kDepthBlock, depth_ - k));
      k += kDepthBlock;
    } while (k < depth_);
  }

  // A packed copy of all of b would be larger than the product and leave the cache before it is read: each worker packs the
  // block of b that it needs next.
  void run_deep(int threads, Index panels) {
    const Index together = std::min(parts_of(panels, threads), kDeepPanels);
    const Index column_units = parts_of(panels, together);
    const Index row_blocks = parts_of(out_.rows, kRowBlock);
    const Index row_units = std::min(row_blocks, parts_of(threads, column_units));
    const Index unit_rows = parts_of(row_blocks, row_units) * kRowBlock;
    const int workers = int(std::min<Index>(threads, row_units * column_units));
    const Index own = together * elements(kDepthBlock);  // rows of `packed` of a worker
    packed().resize(workers * own, L);
    Dispenser units(row_units * column_units);
    const auto work = [&](int worker) {
      Block block;
      Element* const to = packed().view().row(worker * own);
      for (Index u = units.next(); u >= 0; u = units.next()) {
        const Index panel = u / row_units * together, last = std::min(panel + together, panels);
        const Index first = u % row_units * unit_rows, end = std::min(first + unit_rows, out_.rows);
        for_depth([&](Index k, Index deep) {
          const Index stride = elements(deep) * L;
          for (Index p = panel; p < last; ++p) pack(p, k, deep, block, to + (p - panel) * stride);
          for (Index row = first; row < end; row += kRowBlock)
            multiply_block(row, k, deep, panel, last, to, stride, block);
        });
      }
    };
    run_workers(workers, work, [] {});
  }

  // Packs panel p of b from row k on as [elements(deep)][L], with zeros behind the last column.
  void pack(Index p, Index k, Index deep, const Block& block, Element* to) const {
    if constexpr (kPairs) {
      copy_panel(p, k, deep, block.numbers);
      products().by_rows(block.numbers, L, deep, L, to, L);
    } else {
      copy_panel(p, k, deep, to);
    }
  }
  // to[0 ... deep)[L]: panel p of b from row k on.
  void copy_panel(Index p, Index k, Index deep, Real* to) const {
    const Index first = p * L, count = std::min(L, out_.columns - first);
    const Real* from = b_.data + k * b_.row + first * b_.column;
    if (b_.column != 1) return pack_lanes(from, b_.column, count, deep, to, L);
    for (Index row = 0; row < deep; ++row, from += b_.row, to += L) {
      std::copy(from, from + count, to);
      std::fill(to + count, to + L, Real(0));
    }
  }

  // Adds a block of the depth to the block of the product with the rows from `first` on and the
  // panels [panel, last), whose parts of b stand in `packed`, `stride` apart. The first block of
  // the depth overwrites the product, unless this call adds to it.
  void multiply_block(Index first, Index k, Index deep, Index panel, Index last,
                      const Element* packed, Index stride, const Block& block) const {
    const Index count = std::min(kRowBlock, out_.rows - first);
    const Broadcast<Element> a = block_of_a(first, count, k, deep, block);
    const bool adds = into_ == Into::add || k > 0;
    for (Index p = panel; p < last; ++p, packed += stride)
      multiply_panel(a, count, elements(deep), packed, first, p * L, adds, block.edge);
  }

  // A block of a: rows whose elements lie side by side are read in place, others are copied; pairs are copies of both.
  [[nodiscard]] Broadcast<Element> block_of_a(Index first, Index count, Index k, Index deep,
                                              const Block& block) const {
    const Real* from = a_.data + first * a_.row + k * a_.column;
    if (a_.column == 1) {
      if constexpr (kPairs) {
        products().by_columns(from, a_.row, count, deep, block.pairs, elements(deep));
        return {block.pairs, elements(deep), 1};
      } else {
        return {from, a_.row, 1};
      }
    }
    for (Index d = 0; d < deep; ++d, from += a_.column)  // a_.row is 1
      std::copy(from, from + count, block.numbers + d * count);
    if constexpr (kPairs) {
      products().by_rows(block.numbers, count, deep, count, block.pairs, count);
      return {block.pairs, 1, count};
    } else {
      return {block.numbers, 1, count};
    }
  }

  // Writes the product of a and a panel of b to a panel of `out`, or adds it; a written panel begins with the bias.
  void multiply_panel(const Broadcast<Element>& a, Index count, Index deep, const Element* b,
                      Index first, Index column, bool adds, Real* edge) const {
    const Index columns = std::min(L, out_.columns - column);
    const int vectors = int((columns + W - 1) / W);
    Real* out = out_.row(first) + column;
    const Real* bias = bias_ && !adds ? bias_ + column : nullptr;
    if (columns % W == 0)
      return multiply_panel(adds ? Store::add : Store::overwrite, count, deep, vectors, a, b, out,
                            out_.stride, bias);
    const auto copy = [&](const Real* from, Index from_row, Real* to, Index to_row) {
      for (Index r = 0; r < count; ++r)
        std::copy(from + r * from_row, from + r * from_row + columns, to + r * to_row);
    };
    std::fill(edge, edge + count * L, Real(0));
    if (adds) copy(out, out_.stride, edge, L);
    if (bias) copy(bias, 0, edge, L);
    multiply_panel(Store::add, count, deep, vectors, a, b, edge, L, nullptr);
    copy(edge, L, out, out_.stride);
  }
  void multiply_panel(Store store, Index rows, Index deep, int vectors, const Broadcast<Element>& a,
                      const Element* b, Real* to, Index stride, const Real* bias) const {
    if constexpr (kPairs)
      products().panel(store, rows, deep, vectors, a, b, L, to, stride, nullptr, bias);
    else
      panel_gemm(store, rows, deep, vectors, a, b, L, to, stride, nullptr, bias);
  }

  void run_few(int threads) {
    const Index chunk = 8 * L, chunks = (out_.columns + chunk - 1) / chunk;
    parallel_for(chunks, threads, [&](Index n) {
      const Index first = n * chunk, count = std::min(chunk, out_.columns - first);
      Real sums[std::size_t(chunk + W)];
      for (Index r = 0; r < out_.rows; ++r) {
        const Real* row = a_.data + r * a_.row;
        if (b_.row == 1) {
          const DotQuery<Real> query{row, sums};
          row_dots(StoredRows<Real>{b_.data + first * b_.column, b_.column}, count, depth_, &query,
                   1);
        } else {
          std::fill(sums, sums + count, Real(0));
          const AccumulateQuery<Real> query{row, sums};
          row_accumulate(StoredRows<Real>{b_.data + first, b_.row}, depth_, count, &query, 1, 1, 1);
        }
        Real* out = out_.row(r) + first;
        if (into_ == Into::overwrite) {
          std::fill(out, out + count, Real(0));
          if (bias_) std::copy(bias_ + first, bias_ + first + count, out);
        }
        for (Index j = 0; j < count; ++j) out[j] += sums[j];
      }
    });
  }

  Context<Real>& c_;
  Index depth_;
  Factor<Real> a_, b_;
  MatrixView<Real> out_;
  Into into_;
  const Real* bias_;
};

}  // namespace detail

// out (rows, columns) = or += a (rows, depth) b (depth, columns); with Into::overwrite `bias`, if given,
// is added to every row. out must not overlap a or b.
template <class Real>
void multiply(Context<Real>& c, Index depth, const Factor<Real>& a, const Factor<Real>& b,
              const MatrixView<Real>& out, Into into = Into::overwrite,
              const Real* bias = nullptr) {
  if (c.before_product) c.before_product();
  if (out.rows == 0 || out.columns == 0) return;
  if constexpr (std::is_same_v<Real, float>)
    if (c.precision.mixes())
      return detail::Product<float, BfloatPair>(c, depth, a, b, out, into, bias).run();
  require(
      std::is_same_v<Real, float> || !c.precision.mixes(),
      "multiply: the precision is mixed, which is for products in float; this one is in double");
  detail::Product<Real, Real>(c, depth, a, b, out, into, bias).run();
}

// out[column] += sum of the column over all rows
template <class Real>
void add_column_sums(Context<Real>& c, const MatrixView<const Real>& rows, Real* out) {
  constexpr Index chunk = 64;
  const Index chunks = (rows.columns + chunk - 1) / chunk;
  parallel_for(chunks, resolve_threads(c.threads), [&](Index n) {
    const Index first = n * chunk, count = std::min(chunk, rows.columns - first);
    Real sums[chunk] = {};
    for (Index r = 0; r < rows.rows; ++r)
      for (Index j = 0; j < count; ++j) sums[j] += rows.row(r)[first + j];
    for (Index j = 0; j < count; ++j) out[first + j] += sums[j];
  });
}

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
