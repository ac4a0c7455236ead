// SPDX-License-Identifier: Apache-2.0
#pragma once

// Neighbouring ranks of a run, as a communicator of heed::mpi (heed/mpi/any_communicator.hpp): waiting for their messages notices
// ranks that have ended, failed or got stuck, as every exchange of the run does.

#include "ranks.hpp"

#include <heed/mpi/any_communicator.hpp>

#include <span>
#include <utility>
#include <vector>

namespace heed_program {

class RankGroup {
 public:
  // Ranks [first, first + count) of the run, this one among them.
  RankGroup(Ranks& ranks, int first, int count) : ranks_(&ranks), first_(first), count_(count) {}

  [[nodiscard]] int rank() const { return ranks_->rank() - first_; }
  [[nodiscard]] int size() const { return count_; }

  // Messages on their way. The memory must outlive this object.
  class Transfer {
   public:
    Transfer() = default;
    Transfer(Transfer&& other) noexcept
        : ranks_(other.ranks_), pending_(std::exchange(other.pending_, {})) {}
    Transfer& operator=(Transfer&& other) noexcept {
      std::swap(ranks_, other.ranks_);
      std::swap(pending_, other.pending_);
      return *this;
    }
    ~Transfer() {
      if (!pending_.empty()) ranks_->open_ = true;
    }
    void wait() {
      if (!pending_.empty()) ranks_->wait(std::exchange(pending_, {}));
    }
    void poke() {
      std::erase_if(pending_,
                    [&](const Ranks::Pending& one) { return ranks_->link_->done(one.request); });
    }

   private:
    friend class RankGroup;
    Ranks* ranks_ = nullptr;
    std::vector<Ranks::Pending> pending_;
  };

  [[nodiscard]] Transfer start(std::span<const heed::mpi::Send> sends,
                               std::span<const heed::mpi::Receive> receives) const {
    Transfer transfer;
    transfer.ranks_ = ranks_;
    Link& link = *ranks_->link_;
    for (const heed::mpi::Receive& message : receives) {
      const std::span bytes(static_cast<std::byte*>(message.data), message.bytes);
      const int from = first_ + message.from;
      transfer.pending_.push_back({link.receive(from, Ranks::kData, bytes), from, true});
    }
    for (const heed::mpi::Send& message : sends) {
      const std::span bytes(static_cast<const std::byte*>(message.data), message.bytes);
      const int to = first_ + message.to;
      transfer.pending_.push_back({link.send(to, Ranks::kData, bytes), to, false});
    }
    return transfer;
  }

 private:
  Ranks* ranks_;
  int first_, count_;
};

}  // namespace heed_program
