// SPDX-License-Identifier: Apache-2.0
#pragma once

// Tensors of 16-bit or int8 numbers in a call that computes with Real. What one query reads or writes is copied as a whole;
// keys and values of forward are widened a tile at a time, so that they are read from memory once, as they are stored.

#include <heed/core/parallel.hpp>
#include <heed/engine/tensors.hpp>
#include <heed/simd/scratch.hpp>
#include <heed/simd/widen.hpp>

#include <algorithm>
#include <memory>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

// to = rows, the first `count` of head (b, h) from `first` on, at `stride`. They lie on one page.
template <class Real>
[[gnu::noinline]] void widen_rows(const StoredView<const Real>& rows, Index b, Index h, Index first,
                                  Index count, Real* to, Index stride) {
  if (count > 0) rows.storage()->widen(rows.rows(b, h, first), count, rows.shape().dim, to, stride);
}

// Dense tensors of Real that stand for those of a call that are stored in other ways.
template <class Real>
class WidenedTensors {
 public:
  // threads: as in Options.
  explicit WidenedTensors(int threads) : threads_(resolve_threads(threads)) {}
  WidenedTensors(const WidenedTensors&) = delete;  // the views refer to its memory

  // `from` itself, or a copy of its numbers.
  [[nodiscard, gnu::noinline]] TensorView<const Real> read(const StoredView<const Real>& from) {
    return from.narrow() ? copy(from) : from.plain();
  }
  [[nodiscard]] TensorView<Real> copy(const StoredView<const Real>& from) {
    const TensorView<Real> copy = memory_for(from.shape());
    if (!from.narrow())
      for_rows(copy, [&](Real* row, Index b, Index h, Index t) {
        std::copy_n(from.plain().row(b, h, t), from.shape().dim, row);
      });
    else
      for_heads(from.shape(), [&](Index b, Index h) {
        const Index page = from.page_rows() > 0 ? from.page_rows() : from.shape().len;
        for (Index t = 0; t < from.shape().len; t += page)
          widen_rows(from, b, h, t, std::min(page, from.shape().len - t), copy.row(b, h, t),
                     copy.strides().row);
      });
    return copy;
  }

  // `to` itself, or memory whose numbers round() puts there.
  [[nodiscard, gnu::noinline]] TensorView<Real> write(const StoredView<Real>& to) {
    if (!to.narrow()) return to.plain();
    const TensorView<Real> copy = memory_for(to.shape());
    copies_.back().from = copy;
    copies_.back().to = to;
    return copy;
  }

  // Sets of them, whose rows are those of the call.
  template <class To, class From>
  [[nodiscard]] To read_all(const From& from, const Share& share = {}) {
    return detail::map_tensors<To>(from, [&](const auto& tensor, detail::TokensOf tokens) {
      return detail::rows_of_call(read(tensor), share, tokens);
    });
  }
  template <class To, class From>
  [[nodiscard]] To write_all(const From& to, const Share& share = {}) {
    return detail::map_tensors<To>(to, [&](const auto& tensor, detail::TokensOf tokens) {
      return detail::rows_of_call(write(tensor), share, tokens);
    });
  }
  // What forward() writes, or gradients or tangents of it.
  [[nodiscard]] OutputSet<TensorView<const Real>> read_outputs(const auto& from, Index before = 0) {
    return {detail::rows_of_call(read(from.out), before),
            detail::rows_of_call(read(from.lse), before),
            detail::rows_of_call(read(from.steps), before)};
  }
  [[nodiscard]] OutputSet<TensorView<Real>> write_outputs(const auto& to, Index before = 0) {
    return {detail::rows_of_call(write(to.out), before),
            detail::rows_of_call(write(to.lse), before),
            detail::rows_of_call(write(to.steps), before)};
  }

  // body(row, b, h, t) for all rows of a tensor.
  template <class Body>
  void for_rows(const TensorView<Real>& of, Body&& body) const {
    for_heads(of.shape(), [&](Index b, Index h) {
      for (Index t = 0; t < of.shape().len; ++t) body(of.row(b, h, t), b, h, t);
    });
  }

  // After the call: what was written, rounded to the nearest numbers of 16 bits.
  void round() const {
    for (const Copy& written : copies_)
      for_heads(written.to.shape(), [&](Index b, Index h) {
        const Shape& shape = written.to.shape();
        if (shape.len > 0)
          written.to.storage()->narrow(written.from.row(b, h, 0), written.from.strides().row,
                                       shape.len, shape.dim, written.to.rows(b, h, 0));
      });
  }

 private:
  struct Copy {
    std::unique_ptr<Real[]> memory;
    TensorView<Real> from = {};  // with `to`: what was written, and goes there
    StoredView<Real> to = {};
  };
  // Numbers that are worth a thread of their own.
  static constexpr Index kThreadNumbers = Index(1) << 18;

  [[nodiscard]] TensorView<Real> memory_for(const Shape& shape) {
    const auto count = std::size_t(element_count(shape, "a copy of a 16-bit tensor"));
    copies_.push_back({std::unique_ptr<Real[]>(new Real[count])});
    return {copies_.back().memory.get(), shape};
  }
  template <class Body>
  void for_heads(const Shape& s, Body&& body) const {
    const Index worth = 1 + s.batch * s.heads * s.len * s.dim / kThreadNumbers;
    parallel_for(s.batch * s.heads, int(std::min<Index>(threads_, worth)),
                 [&](Index unit) { body(unit / s.heads, unit % s.heads); });
  }

  int threads_;
  std::vector<Copy> copies_;
};

// Keys or values as a worker reads them: where they lie, or, of those that are stored in other ways, one tile after the
// other in memory of the worker's own.
template <class Real>
class TileOfRows {
 public:
  // tile: rows per tile. all_heads: does a tile hold the rows of all heads, or of one?
  TileOfRows(const StoredView<const Real>& rows, Index tile, bool all_heads, Scratch<Real>& scratch)
      : rows_(rows), view_(rows.plain()), tile_(tile), all_heads_(all_heads) {
    if (!rows.narrow()) return;
    const Shape& s = rows.shape();
    memory_ = scratch.take((all_heads ? s.heads : 1) * tile * s.dim);
    // Every page is this memory: row t of the view is row t % tile of it.
    const std::size_t tiles = std::size_t((s.len + tile - 1) / tile);
    pages_.reset(new const Real*[tiles]);
    std::fill_n(pages_.get(), tiles, memory_);
    const Strides strides{0, all_heads ? tile * s.dim : 0, s.dim};
    view_ = TensorView<const Real>::paged(pages_.get(), tile, s, strides);
  }
  TileOfRows(const TileOfRows&) = delete;  // the view refers to pages_

  [[nodiscard]] const TensorView<const Real>& view() const { return view_; }
  [[nodiscard]] bool copies() const { return rows_.narrow(); }

  // From now on view() has rows [first, first + count), which lie in one tile, of head (b, h) or of all heads of b.
  void load(Index b, Index h, Index first, Index count) const {
    if (!rows_.narrow()) return;
    const Strides& strides = view_.strides();
    const Index from = all_heads_ ? 0 : h, to = all_heads_ ? rows_.shape().heads : h + 1;
    for (Index head = from; head < to; ++head)
      widen_rows(rows_, b, head, first, count,
                 memory_ + head * strides.head + first % tile_ * strides.row, strides.row);
  }

 private:
  StoredView<const Real> rows_;
  TensorView<const Real> view_;
  Index tile_;
  bool all_heads_;
  Real* memory_ = nullptr;
  std::unique_ptr<const Real*[]> pages_;  // [tile]
};

}  // namespace HEED_ABI
}  // namespace heed
