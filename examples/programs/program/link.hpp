// SPDX-License-Identifier: Apache-2.0
#pragma once

// Messages between the processes of one run. Only link_mpi.cpp uses MPI; link_none.cpp replaces it if MPI was not found.

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace heed_program {

// Only the thread that opened it may use a link. Two messages of one kind between two ranks arrive in the order in which
// they were sent.
class Link {
 public:
  using Request = std::size_t;
  struct Arrival {
    int from;
    std::size_t size;  // bytes
  };

  virtual ~Link() = default;
  [[nodiscard]] virtual int rank() const = 0;
  [[nodiscard]] virtual int count() const = 0;

  // Begin to send and to receive; the memory must not change until the request is done. `kind` is at least 0.
  [[nodiscard]] virtual Request send(int to, int kind, std::span<const std::byte> bytes) = 0;
  [[nodiscard]] virtual Request receive(int from, int kind, std::span<std::byte> bytes) = 0;
  // Moves all messages on. Returns true once the request is done.
  [[nodiscard]] virtual bool done(Request request) = 0;
  // The first message of that kind, of less than 1 GiB, that has arrived and has no receiver yet.
  [[nodiscard]] virtual std::optional<Arrival> arrived(int kind) = 0;

  // Closes the link together with all other ranks, which must call it, too; no request may be open.
  virtual void close() = 0;
  // Ends this process and all others.
  virtual void abort(int code) = 0;
};

// The number of processes that a launcher (mpirun, srun) started together with this one, from its environment; 0 without a
// launcher. A launcher that does not say how many counts as 2.
[[nodiscard]] inline int launched_processes() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"})
    if (const char* count = std::getenv(name)) return std::atoi(count);
  return std::getenv("PMIX_RANK") != nullptr ? 2 : 0;
}

// The link to all processes that a launcher started; null without a launcher. Throws UsageError if
// this program has no MPI and a launcher started several.
[[nodiscard]] std::unique_ptr<Link> open_link();

}  // namespace heed_program
