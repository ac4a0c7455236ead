// SPDX-License-Identifier: Apache-2.0
#include "link.hpp"

#include <heed/mpi/communicator.hpp>

#include <map>
#include <vector>

namespace heed_program {

namespace {

using heed::mpi::detail::for_counts;
using heed::mpi::detail::require_success;

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
  // Without close() the process does not finalise MPI: MPI_Finalize() would wait for ranks that may be lost.
  ~MpiLink() override = default;

  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int count() const override { return count_; }

  [[nodiscard]] Request send(int to, int kind, std::span<const std::byte> bytes) override {
    std::vector<MPI_Request> requests;
    for_counts(bytes.size(), [&](std::size_t at, int count) {
      require_success(
          MPI_Isend(bytes.data() + at, count, MPI_BYTE, to, kind, all_, &requests.emplace_back()),
          "MPI_Isend");
    });
    return open(std::move(requests));
  }
  [[nodiscard]] Request receive(int from, int kind, std::span<std::byte> bytes) override {
    std::vector<MPI_Request> requests;
    for_counts(bytes.size(), [&](std::size_t at, int count) {
      require_success(
          MPI_Irecv(bytes.data() + at, count, MPI_BYTE, from, kind, all_, &requests.emplace_back()),
          "MPI_Irecv");
    });
    return open(std::move(requests));
  }
  [[nodiscard]] bool done(Request request) override {
    const auto found = requests_.find(request);
    if (found == requests_.end()) return true;
    int is_done = 0;
    std::vector<MPI_Request>& parts = found->second;
    require_success(MPI_Testall(int(parts.size()), parts.data(), &is_done, MPI_STATUSES_IGNORE),
                    "MPI_Testall");
    if (is_done != 0) requests_.erase(found);
    return is_done != 0;
  }
  [[nodiscard]] std::optional<Arrival> arrived(int kind) override {
    int is_there = 0, bytes = 0;
    MPI_Status status;
    require_success(MPI_Iprobe(MPI_ANY_SOURCE, kind, all_, &is_there, &status), "MPI_Iprobe");
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
  [[nodiscard]] Request open(std::vector<MPI_Request> parts) {
    requests_.emplace(next_, std::move(parts));
    return next_++;
  }

  MPI_Comm all_ = MPI_COMM_NULL;
  int rank_ = 0, count_ = 1;
  Request next_ = 0;
  std::map<Request, std::vector<MPI_Request>> requests_;  // parts of the requests that are not done
};

}  // namespace

std::unique_ptr<Link> open_link() {
  if (launched_processes() == 0) return nullptr;
  return std::make_unique<MpiLink>();
}

}  // namespace heed_program
