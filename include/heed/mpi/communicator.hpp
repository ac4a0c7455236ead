// SPDX-License-Identifier: Apache-2.0
#pragma once

// A communicator of MPI, as heed uses it: bytes from rank to rank, in transfers that run while others compute. It owns
// nothing: MPI is initialised and finalised by the program, and the communicator, any intracommunicator, is the caller's.
// mpi/any_communicator.hpp lists the members that calls need of such a class.
//
// MPI must allow calls from the thread that calls heed (MPI_THREAD_FUNNELED for the main thread); heed's own threads make
// none. All messages carry kTag: on the same communicator no message of the program may carry it while a call of heed is at
// work. While a Communicator lives, errors of its communicator return and become exceptions with MPI's text.

#include <heed/core/error.hpp>
#include <heed/mpi/any_communicator.hpp>

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace mpi {

namespace detail {

// Throws std::runtime_error with MPI's text.
inline void require_success(int error, const char* function) {
  if (error == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  MPI_Error_string(error, text, &length);
  throw std::runtime_error("heed::mpi: " + std::string(function) + ": " +
                           printable({text, std::size_t(length)}));
}

// Calls begin(offset, count) for the pieces of a message of so many bytes, at least one: MPI counts by int.
template <class Begin>
void for_counts(std::size_t bytes, Begin&& begin) {
  constexpr std::size_t most = std::size_t(1) << 30;
  std::size_t at = 0;
  do {
    begin(at, int(std::min(most, bytes - at)));
    at += most;
  } while (at < bytes);
}

}  // namespace detail

class Communicator {
 public:
  static constexpr int kTag = 18533;

  explicit Communicator(MPI_Comm comm) : comm_(comm) {
    int initialised = 0, finalised = 0;
    MPI_Initialized(&initialised);
    MPI_Finalized(&finalised);
    require(initialised != 0 && finalised == 0, "heed::mpi::Communicator: MPI is ",
            finalised != 0 ? "finalised" : "not initialised",
            ", it must run from MPI_Init() to MPI_Finalize()");
    require(comm != MPI_COMM_NULL, "heed::mpi::Communicator: the communicator is MPI_COMM_NULL");
    detail::require_success(MPI_Comm_get_errhandler(comm, &before_), "MPI_Comm_get_errhandler");
    detail::require_success(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN),
                            "MPI_Comm_set_errhandler");
    detail::require_success(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
    detail::require_success(MPI_Comm_size(comm, &size_), "MPI_Comm_size");
  }
  Communicator(const Communicator&) = delete;
  ~Communicator() {
    MPI_Comm_set_errhandler(comm_, before_);
    MPI_Errhandler_free(&before_);
  }

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }

  // Messages on their way. The memory must outlive this object; the destructor waits.
  class Transfer {
   public:
    Transfer() = default;
    Transfer(Transfer&& other) noexcept : requests_(std::exchange(other.requests_, {})) {}
    Transfer& operator=(Transfer&& other) noexcept {
      std::swap(requests_, other.requests_);
      return *this;
    }
    ~Transfer() {
      if (!requests_.empty())
        MPI_Waitall(int(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    }
    // Throws std::runtime_error with MPI's text.
    void wait() {
      std::vector<MPI_Request> requests = std::exchange(requests_, {});
      std::vector<MPI_Status> states(requests.size());
      const int error = MPI_Waitall(int(requests.size()), requests.data(), states.data());
      if (error == MPI_ERR_IN_STATUS)
        for (const MPI_Status& state : states)
          detail::require_success(state.MPI_ERROR, "MPI_Waitall");
      detail::require_success(error, "MPI_Waitall");
    }

    // Lets MPI go on with large messages, which move only while it is called.
    void poke() {
      if (requests_.empty()) return;
      int done = 0;
      detail::require_success(
          MPI_Testall(int(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
          "MPI_Testall");
      if (done != 0) requests_.clear();
    }

   private:
    friend class Communicator;
    std::vector<MPI_Request> requests_;
  };

  [[nodiscard]] Transfer start(std::span<const Send> sends,
                               std::span<const Receive> receives) const {
    Transfer transfer;
    const auto add = [&](std::size_t bytes, auto&& begin) {
      detail::for_counts(bytes, [&](std::size_t at, int count) {
        transfer.requests_.emplace_back();
        begin(at, count, &transfer.requests_.back());
      });
    };
    for (const Receive& message : receives)
      add(message.bytes, [&](std::size_t at, int count, MPI_Request* request) {
        detail::require_success(MPI_Irecv(static_cast<std::byte*>(message.data) + at, count,
                                          MPI_BYTE, message.from, kTag, comm_, request),
                                "MPI_Irecv");
      });
    for (const Send& message : sends)
      add(message.bytes, [&](std::size_t at, int count, MPI_Request* request) {
        detail::require_success(MPI_Isend(static_cast<const std::byte*>(message.data) + at, count,
                                          MPI_BYTE, message.to, kTag, comm_, request),
                                "MPI_Isend");
      });
    return transfer;
  }

 private:
  MPI_Comm comm_;
  MPI_Errhandler before_{};
  int rank_ = 0, size_ = 1;
};

}  // namespace mpi
}  // namespace HEED_ABI
}  // namespace heed
