// SPDX-License-Identifier: Apache-2.0
#pragma once

// Dropout of the weights of an attention call, as an option of that call.
//
//   weight_ij <- keep_ij ? weight_ij / (1 - rate) : 0
//
// keep_ij is a function of (seed, batch, head, i, j) alone. row_keys() turns the first four into a key of 64
// random bits per row; simd/keep_bits.hpp says which columns j a key keeps.

#include <heed/core/random.hpp>

namespace heed {
inline namespace HEED_ABI {

struct Dropout {
  double rate = 0;         // in [0, 1): the fraction of weights that becomes 0
  std::uint64_t seed = 0;  // calls with the same seed drop the same pairs
  // Batch b of a call draws as batch first_batch + b, for calls that each compute some batches of a larger call.
  Index first_batch = 0;
  bool operator==(const Dropout&) const = default;

  [[nodiscard]] bool valid() const { return rate >= 0 && rate < 1; }
  // The keys of the rows of one head: bits(i) is the key of query i.
  [[nodiscard]] CounterRandom row_keys(Index batch, Index head) const {
    return CounterRandom(
        CounterRandom(seed, std::uint64_t(first_batch + batch)).bits(std::uint64_t(head)));
  }
};

}  // namespace HEED_ABI
}  // namespace heed
