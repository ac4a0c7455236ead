// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dropout of a panel's weights:
//
//   weight_ij <- keep_ij ? weight_ij / (1 - rate) : 0
//   backward, with X_ij = dL/d(new weight_ij):   dL/dweight_ij = keep_ij ? X_ij / (1 - rate) : 0
//
// keep_ij is a function of the seed, the batch, the head and the positions i and j in the call; both
// passes draw it. A softmax divides by the sum of all its weights, dropped or not, and its delta needs no
// bit: sum_j weight_ij dL/dweight_ij = sum_j (new weight_ij) X_ij = rowsum(dmixed o mixed).

#include <heed/core/dropout.hpp>
#include <heed/engine/tile/hidden_pairs.hpp>
#include <heed/plug/tile.hpp>
#include <heed/simd/keep_bits.hpp>

namespace heed {
inline namespace HEED_ABI {
namespace detail {

template <class Real>
class PanelDropout {
 public:
  explicit PanelDropout(const Dropout& dropout) : dropout_(dropout) {}

  [[nodiscard]] bool drops() const { return dropout_.rate > 0; }

  void move_to(const TilePlace& place) {
    if (!drops()) return;
    const CounterRandom keys = dropout_.row_keys(place.batch, place.head);
    for (Index i = 0; i < place.rows; ++i) keys_.set(i, keys.bits(std::uint64_t(place.query + i)));
  }

  // For the queries of vector `v`, from `key` on one key after the other.
  [[nodiscard]] Dropper<Real> along_queries(int v, Index key) const {
    return Dropper<Real>::along_rows(dropout_.rate, keys_, v, key);
  }
  // For query i of the panel, from `key` on W keys after the other.
  [[nodiscard]] Dropper<Real> along_keys(Index i, Index key) const {
    return Dropper<Real>::along_columns(dropout_.rate, keys_.key(i), key);
  }

  // The computed pairs of the tile at `place`, [key][lane].
  void drop(const LaneTile<Real>& tile, const TilePlace& place) const {
    if (!drops()) return;
    for (int v = 0; v < int(tile.lanes / kLanes<Real>); ++v) {
      const KeyRange keys = place.keys_of(v);
      Dropper<Real> dropper = along_queries(v, place.key + keys.begin);
      for (Index j = keys.begin; j < keys.end; ++j) {
        dropper.next();
        tile.store(j, v, dropper(tile.load(j, v)));
      }
    }
  }

 private:
  Dropout dropout_;
  LaneKeys<Real> keys_;
};

}  // namespace detail
}  // namespace HEED_ABI
}  // namespace heed
