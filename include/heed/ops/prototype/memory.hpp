// SPDX-License-Identifier: Apache-2.0
#pragma once

// The prototypes W of prototype attention (ops/prototype.hpp), and their exchange with ART memories.
//
//   u(x) = x / (|x| + eps)     winner of a row x = argmax_m x . u(W_m), the lowest among equals
//
// All u(x) . u(W_m) of a row share |x|, so the winner needs the norms of the prototypes only.
//
// Shapes   W (heads, M, dim_qk). Heads may have fewer than M prototypes: counts[h] of them; rows
//          behind are padding, which wins no row and gets no gradient. Empty W (M = 0) or counts[h]
//          = 0: no prototypes; the score term and the pull of that head are 0.
// Bounds   winner 0 for a row of zeros and for one with a NaN.
// Learning memory.take(memories) -> forward() -> learn_after_forward(memories, keys): the rows of a
//          call never see what they teach.

#include <heed/core/geometry.hpp>
#include <heed/core/param.hpp>
#include <heed/core/view.hpp>
#include <heed/ops/prototype/art_memory.hpp>
#include <heed/simd/row_norm.hpp>

#include <algorithm>
#include <cmath>
#include <vector>

namespace heed {
inline namespace HEED_ABI {

struct PrototypeOptions {
  std::vector<Index> counts;  // prototypes of each head; empty: M
  double eps = 1e-8;
};

template <class Real>
struct PrototypeMemory : PrototypeOptions {
  Param<Real> W;  // (heads, M, dim_qk), or empty

  [[nodiscard]] std::vector<Index> memory_shape(const Geometry& g) const {
    return {g.heads, -1, g.dim_qk};
  }
  // M; 0 without prototypes.
  [[nodiscard]] Index rows() const { return W.given() ? W.extent(1) : 0; }
  [[nodiscard]] Index count(Index head) const {
    return counts.empty() || !W.given() ? rows() : counts[std::size_t(head)];
  }
  [[nodiscard]] const Real* prototype(Index head, Index m) const { return W.data() + at(head, m); }
  [[nodiscard]] Real* prototype(Index head, Index m) { return W.data() + at(head, m); }
  // |W_m|
  [[nodiscard]] Real norm(Index head, Index m) const {
    const Real* w = prototype(head, m);
    return row_norm<Real>(W.extent(2), [=](Index c) { return w[c]; });
  }

  // Copies prototypes and counts from one memory per head; M becomes the largest count.
  void take(const std::vector<ArtMemory<Real>>& memories) {
    const Index dim = memories.empty() ? 0 : memories[0].dim();
    std::vector<Index> sizes;
    Index largest = 0;
    for (const ArtMemory<Real>& memory : memories) {
      require(memory.dim() == dim, "PrototypeMemory::take: memory ", sizes.size(), " has dim ",
              memory.dim(), ", memory 0 has ", dim);
      sizes.push_back(memory.count());
      largest = std::max(largest, memory.count());
    }
    Param<Real> rows(std::vector<Index>{Index(memories.size()), largest, dim});
    for (std::size_t h = 0; h < memories.size(); ++h) {
      const auto from = memories[h].prototypes();
      std::copy(from.begin(), from.end(), rows.data() + Index(h) * largest * dim);
    }
    W = std::move(rows);
    counts = std::move(sizes);
  }
  // Returns prototypes that an optimiser has moved to the memories they were taken from. Throws std::invalid_argument where
  // their number or width differs, or a prototype is not finite; all memories are then unchanged.
  void give(std::vector<ArtMemory<Real>>& memories) const {
    const bool taken = W.shape().size() == 3;
    const Index heads = taken ? W.extent(0) : 0, given = Index(memories.size());
    require(given == heads, "PrototypeMemory::give: there are ", given, " memories, W has ", heads,
            " heads");
    require(counts.empty() || Index(counts.size()) == heads, "PrototypeMemory::give: counts has ",
            counts.size(), " values, W has ", heads, " heads");
    std::vector<ArtMemory<Real>> changed = memories;
    for (Index h = 0; h < heads; ++h) {
      ArtMemory<Real>& memory = changed[std::size_t(h)];
      require(memory.dim() == W.extent(2), "PrototypeMemory::give: memory ", h, " has dim ",
              memory.dim(), ", W has ", W.extent(2));
      const Index n = count(h);
      require(n >= 0 && n <= rows(), "PrototypeMemory::give: counts holds ", n, " for head ", h,
              ", it must lie in [0, ", rows(), "], the prototypes that W has per head");
      const Real* from = n > 0 ? prototype(h, 0) : nullptr;
      memory.set_prototypes({from, std::size_t(n * memory.dim())}, n);
    }
    memories.swap(changed);
  }

  void check_memory(const Geometry& g, const char* where) const {
    require(eps >= kSmallestEps && std::isfinite(eps), where, ": eps is ", eps,
            ", it must be finite and at least ", kSmallestEps);
    require(rows() <= kMostRows, where, ": W has ", rows(), " prototypes per head, at most ",
            kMostRows, " can be told apart");
    require(counts.empty() || Index(counts.size()) == g.heads, where, ": counts has ",
            counts.size(), " values, the call has ", g.heads,
            " heads; it needs one value per head, or none");
    for (const Index n : counts)
      require(n >= 0 && n <= rows(), where, ": counts holds ", n, ", it must lie in [0, ", rows(),
              "], the prototypes that W has per head");
  }

 private:
  static constexpr double kSmallestEps = 1e-37;       // 1 / eps is finite in float as well
  static constexpr Index kMostRows = Index(1) << 24;  // largest whole numbers that a float holds

  [[nodiscard]] Index at(Index head, Index m) const { return (head * rows() + m) * W.extent(2); }
};

// Each memory learns its head's rows (batch, heads or kv_heads, len, dim), in (batch, token) order: keys of a finished
// call, plain numbers without a gradient. Where memories are a multiple of the rows' heads, neighbours share a head, as
// query heads share keys. Returns one tally per memory. A refused call changes no memory.
template <class Real>
std::vector<ArtTally> learn_after_forward(std::vector<ArtMemory<Real>>& memories,
                                          const TensorView<const Real>& rows) {
  const Index heads = rows.shape().heads, count = Index(memories.size());
  require(count == 0 || (heads > 0 && count % heads == 0), "learn_after_forward: there are ", count,
          " memories, the rows have ", heads, " heads; it must be a multiple");
  std::vector<ArtMemory<Real>> taught = memories;
  std::vector<ArtTally> tallies;
  for (Index h = 0; h < count; ++h)
    tallies.push_back(taught[std::size_t(h)].learn(rows, h / (count / heads)));
  memories.swap(taught);
  return tallies;
}

}  // namespace HEED_ABI
}  // namespace heed
