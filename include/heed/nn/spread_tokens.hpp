// SPDX-License-Identifier: Apache-2.0
#pragma once

// Sequences that are too long for one process: each rank has some tokens of every sequence, and
// only attention reads the tokens of other ranks (heed/mpi, gathered). Rows of a layer are the
// tokens of this rank, sequence by sequence, in their order.

#include <heed/mpi/any_communicator.hpp>

#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace nn {

struct SpreadTokens {
  mpi::AnyCommunicator comm;
  mpi::Shards shards;         // parts of each sequence
  std::vector<Index> tokens;  // positions of this rank's tokens in their sequence

  SpreadTokens(mpi::AnyCommunicator ranks, mpi::Shards of_ranks)
      : comm(std::move(ranks)), shards(std::move(of_ranks)) {
    require(shards.ranks() == comm.size(), "SpreadTokens: the shards are for ", shards.ranks(),
            " ranks, the communicator has ", comm.size());
    for (int r = 0; r < shards.ranks(); ++r)
      require(shards.held(r) > 0, "SpreadTokens: rank ", r, " of ", shards.ranks(),
              " has none of the ", shards.len(), " tokens of a sequence; each must have some");
    for (const mpi::Tokens& piece : shards.pieces(comm.rank()))
      for (Index t = piece.begin; t < piece.end; ++t) tokens.push_back(t);
  }

  // Number of tokens of the whole sequence, and of this rank.
  [[nodiscard]] Index len() const { return shards.len(); }
  [[nodiscard]] Index held() const { return Index(tokens.size()); }
};

}  // namespace nn
}  // namespace HEED_ABI
}  // namespace heed
