// SPDX-License-Identifier: Apache-2.0
#include "link.hpp"

#include "program.hpp"

#include <mpi.h>

#include <limits>
#include <map>

namespace heed_program {

namespace {

void require_success(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int size = 0;
  MPI_Error_string(code, text, &size);
  throw std::runtime_error(std::string(what) + ": " + text);
}

// MPI counts bytes by int.
[[nodiscard]] int count_of(std::size_t bytes) {
  if (bytes > std::size_t(std::numeric_limits<int>::max()))
    throw std::runtime_error("a message between ranks has " + std::to_string(bytes) +
                             " bytes, MPI takes at most 2147483647; more ranks have shorter ones");
  return int(bytes);
}

class MpiLink final : public Link {
 public:
  MpiLink() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_dup(MPI_COMM_WORLD, &all_);
    MPI_Comm_set_errhandler(all_, MPI_ERRORS_RETURN);
    MPI_Comm_rank(all_, &rank_);
    MPI_Comm_size(all_, &count_);
  }
  // Without close() the process leaves MPI as it is: MPI_Finalize() would wait for ranks that may be lost.
  ~MpiLink() override = default;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int count() const override { return count_; }

  [[nodiscard]] Request send(int to, int kind, std::span<const std::byte> bytes) override {
    MPI_Request request;
    require_success(
        MPI_Isend(bytes.data(), count_of(bytes.size()), MPI_BYTE, to, kind, all_, &request),
        "a message cannot be sent");
    return open(request);
  }
  [[nodiscard]] Request receive(int from, int kind, std::span<std::byte> bytes) override {
    MPI_Request request;
    require_success(
        MPI_Irecv(bytes.data(), count_of(bytes.size()), MPI_BYTE, from, kind, all_, &request),
        "a message cannot be received");
    return open(request);
  }
  [[nodiscard]] bool done(Request request) override {
    const auto found = requests_.find(request);
    if (found == requests_.end()) return true;
    int is_done = 0;
    require_success(MPI_Test(&found->second, &is_done, MPI_STATUS_IGNORE),
                    "a message between ranks is lost");
    if (is_done != 0) requests_.erase(found);
    return is_done != 0;
  }
  [[nodiscard]] std::optional<Arrival> arrived(int kind) override {
    int is_there = 0, bytes = 0;
    MPI_Status status;
    require_success(MPI_Iprobe(MPI_ANY_SOURCE, kind, all_, &is_there, &status),
                    "messages cannot be asked for");
    if (is_there == 0) return std::nullopt;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    return Arrival{status.MPI_SOURCE, std::size_t(bytes)};
  }

  void close() override {
    MPI_Comm_free(&all_);
    MPI_Finalize();
  }
  void abort(int code) override { MPI_Abort(all_, code); }

 private:
  [[nodiscard]] Request open(MPI_Request request) {
    requests_.emplace(next_, request);
    return next_++;
  }

  MPI_Comm all_ = MPI_COMM_NULL;
  int rank_ = 0, count_ = 1;
  Request next_ = 0;
  std::map<Request, MPI_Request> requests_;  // those that are not done
};

}  // namespace

std::unique_ptr<Link> open_link() {
  if (launched_processes() == 0) return nullptr;
  return std::make_unique<MpiLink>();
}

}  // namespace heed_program
