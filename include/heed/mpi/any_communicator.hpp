// SPDX-License-Identifier: Apache-2.0
#pragma once

// A communicator of any class. Calls of heed::mpi take one, with or without MPI behind it, and go on with an AnyCommunicator, so
// that their code is compiled once for all classes. A class needs the members
//
//   rank(), size()            int
//   start(sends, receives)    begins to send and to receive all of these messages; returns a Transfer, which can be moved, whose
//                             wait() returns when all are through, and whose poke() looks after them meanwhile. Messages
//                             between two ranks arrive in the order in which they were started

#include <heed/core/config.hpp>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <utility>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

// Bytes for a rank, and room for bytes of a rank.
struct Send {
  int to;
  const void* data;
  std::size_t bytes;
};
struct Receive {
  int from;
  void* data;
  std::size_t bytes;
};

class AnyCommunicator {
  struct Held {
    virtual ~Held() = default;
    virtual void wait() = 0;
    virtual void poke() = 0;
  };
  template <class Kind>
  struct HeldTransfer final : Held {
    Kind transfer;
    explicit HeldTransfer(Kind of) : transfer(std::move(of)) {}
    void wait() override { transfer.wait(); }
    void poke() override { transfer.poke(); }
  };

 public:
  // `comm` must outlive this object.
  template <class Comm>
  explicit AnyCommunicator(const Comm& comm)
      : rank_(comm.rank()),
        size_(comm.size()),
        start_([&comm](std::span<const Send> sends, std::span<const Receive> receives) {
          using Kind = decltype(comm.start(sends, receives));
          return std::unique_ptr<Held>(new HeldTransfer<Kind>(comm.start(sends, receives)));
        }) {}

  class Transfer {
   public:
    Transfer() = default;
    void wait() {
      if (held_) held_->wait();
    }
    void poke() {
      if (held_) held_->poke();
    }

   private:
    friend class AnyCommunicator;
    explicit Transfer(std::unique_ptr<Held> held) : held_(std::move(held)) {}
    std::unique_ptr<Held> held_;
  };

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  [[nodiscard]] Transfer start(std::span<const Send> sends,
                               std::span<const Receive> receives) const {
    return Transfer(start_(sends, receives));
  }

 private:
  int rank_, size_;
  std::function<std::unique_ptr<Held>(std::span<const Send>, std::span<const Receive>)> start_;
};

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
