// SPDX-License-Identifier: Apache-2.0
#pragma once

// Matrix products of layers on the engine's panels: out = a b, out += a b, out = bias + a b.
//
//   b is packed once, in panels of as many columns as a panel of queries has lanes. Workers take a block of rows
//   of a and a block of columns of b at a time, and go through the depth in blocks: a block of a stays in the second
//   level of cache, a panel of b in the first.
//
// A product of few rows, as in generation, reads b once in the order of memory and does not pack it.
//
// Cost      rows depth columns multiply-adds; memory depth x columns for the packed copy.
// Results   do not depend on the number of threads, not in their last bit.
// Mixed     with Precision::mixed both factors are rounded to bfloat16 on the way, and their products are added up in
//           float; a product of few rows stays in float, since reading b is what it waits for.

#include <heed/core/parallel.hpp>
#include <heed/nn/context.hpp>
#include <heed/simd/instructions.hpp>
#include <heed/simd/narrow_product.hpp>
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

// A block of a that stays in the second level of cache: 96 x 256 floats are 96 KiB. The rows are a multiple of those
// of the micro-kernel.
inline constexpr Index kRowBlock = 96;
inline constexpr Index kDepthBlock = 256;
inline constexpr Index kColumnPanels = 16;
// Products of at most so many rows read b as it lies.
inline constexpr Index kFewRows = 4;

// Element: what the kernel reads of a and b, Real or pairs along the depth.
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
    const Index panels = (out_.columns + L - 1) / L;
    packed().resize(panels * elements(depth_), L);
    const Index row_blocks = (out_.rows + kRowBlock - 1) / kRowBlock;
    const Index column_blocks = (panels + kColumnPanels - 1) / kColumnPanels;
    const int workers = int(std::min<Index>(threads, row_blocks * column_blocks));
    Dispenser unpacked(panels), units(row_blocks * column_blocks);
    Turnstiles packed(1);
    const auto work = [&](int) {
      Block block;
      for (Index p = unpacked.next(); p >= 0; p = unpacked.next()) {
        pack(p, block);
        packed.pass(0);
      }
      packed.wait(0, panels);
      for (Index u = units.next(); u >= 0; u = units.next())
        multiply_block(u % row_blocks * kRowBlock, u / row_blocks * kColumnPanels, panels, block);
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
    Real* edge = scratch.take(kRowBlock * L);  // of `out`
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

  // Packs panel p of b as [elements][L], with zeros behind the last column.
  void pack(Index p, const Block& block) {
    Element* to = packed().view().row(p * elements(depth_));
    if constexpr (kPairs) {
      for (Index k = 0; k < depth_; k += kDepthBlock) {
        const Index deep = std::min(kDepthBlock, depth_ - k);
        copy_panel(p, k, deep, block.numbers);
        products().by_rows(block.numbers, L, deep, L, to + elements(k) * L, L);
      }
    } else {
      copy_panel(p, 0, depth_, to);
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

  // Computes the block of the product with the rows from `first` on and the panels from `panel` on.
  void multiply_block(Index first, Index panel, Index panels, const Block& block) {
    const Index count = std::min(kRowBlock, out_.rows - first);
    const Index last = std::min(panel + kColumnPanels, panels);
    start(first, count, panel * L, std::min(last * L, out_.columns));
    for (Index k = 0; k < depth_; k += kDepthBlock) {
      const Index deep = std::min(kDepthBlock, depth_ - k);
      const Broadcast<Element> a = block_of_a(first, count, k, deep, block);
      for (Index p = panel; p < last; ++p)
        multiply_panel(a, count, elements(deep),
                       packed().view().row(p * elements(depth_) + elements(k)), first, p * L,
                       block.edge);
    }
  }

  // Sets a block of `out` to the bias or to zeros, unless the product is to be added to what is there.
  void start(Index first, Index count, Index from, Index to) const {
    if (into_ == Into::add) return;
    for (Index r = first; r < first + count; ++r) {
      if (bias_)
        std::copy(bias_ + from, bias_ + to, out_.row(r) + from);
      else
        std::fill(out_.row(r) + from, out_.row(r) + to, Real(0));
    }
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
    for (Index d = 0; d < deep; ++d)
      for (Index r = 0; r < count; ++r)
        block.numbers[d * count + r] = from[r * a_.row + d * a_.column];
    if constexpr (kPairs) {
      products().by_rows(block.numbers, count, deep, count, block.pairs, count);
      return {block.pairs, 1, count};
    } else {
      return {block.numbers, 1, count};
    }
  }

  void multiply_panel(const Broadcast<Element>& a, Index count, Index deep, const Element* b,
                      Index first, Index column, Real* edge) const {
    const Index columns = std::min(L, out_.columns - column);
    const int vectors = int((columns + W - 1) / W);
    Real* out = out_.row(first) + column;
    if (columns % W == 0) return add_product(count, deep, vectors, a, b, out, out_.stride);
    const auto copy = [&](const Real* from, Index from_row, Real* to, Index to_row) {
      for (Index r = 0; r < count; ++r)
        std::copy(from + r * from_row, from + r * from_row + columns, to + r * to_row);
    };
    std::fill(edge, edge + count * L, Real(0));
    copy(out, out_.stride, edge, L);
    add_product(count, deep, vectors, a, b, edge, L);
    copy(edge, L, out, out_.stride);
  }

  // to += a b for one panel of b.
  void add_product(Index rows, Index deep, int vectors, const Broadcast<Element>& a,
                   const Element* b, Real* to, Index stride) const {
    if constexpr (kPairs)
      products().panel(Store::add, rows, deep, vectors, a, b, L, to, stride, nullptr);
    else
      panel_gemm<Store::add>(rows, deep, vectors, a, b, L, to, stride);
  }

  void run_few(int threads) {
    const Index chunk = 8 * L, chunks = (out_.columns + chunk - 1) / chunk;
    parallel_for(chunks, threads, [&](Index n) {
      const Index first = n * chunk, count = std::min(chunk, out_.columns - first);
      Real sums[chunk + W];
      for (Index r = 0; r < out_.rows; ++r) {
        const Real* row = a_.data + r * a_.row;
        if (b_.row == 1) {
          const DotQuery<Real> query{row, sums};
          row_dots(StoredRows<Real>{b_.data + first * b_.column, b_.column}, count, depth_, &query,
                   1);
        } else {
          std::fill(sums, sums + count, Real(0));
          const MixQuery<Real> query{row, sums};
          row_mix(StoredRows<Real>{b_.data + first, b_.row}, depth_, count, &query, 1, 1, 1);
        }
        start(r, 1, first, first + count);
        Real* out = out_.row(r) + first;
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
  if (out.rows == 0 || out.columns == 0) return;
  if constexpr (std::is_same_v<Real, float>)
    if (c.precision.mixes())
      return detail::Product<float, BfloatPair>(c, depth, a, b, out, into, bias).run();
  require(
      std::is_same_v<Real, float> || !c.precision.mixes(),
      "multiply: the precision is mixed, which is for products in float; this one is in double");
  detail::Product<Real, Real>(c, depth, a, b, out, into, bias).run();
}

// out[column] += sum over rows
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
