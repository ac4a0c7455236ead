// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks of a launcher of MPI (program/ranks.hpp) that train cells for rank 0. Rank 0 gives each of them a cell as soon as it
// has none, and takes what it writes: the lines of jobs.hpp.

#include "jobs.hpp"

#include "../program/ranks.hpp"

#include <vector>

namespace compare {

// Rank 0's view of all others; nobody where the launcher started one rank.
class RankWorkers {
 public:
  // The ranks must outlive the object; null for none.
  explicit RankWorkers(heed_program::Ranks* ranks);

  // Gives the piece to a rank that has none; false where all have one.
  [[nodiscard]] bool give(std::size_t piece, const std::string& order);
  [[nodiscard]] bool none() const { return busy_.empty(); }
  [[nodiscard]] bool any_busy() const;
  // Calls line(piece, text) for each line that has arrived; line() returns true for the last one of a piece. Throws LostRank
  // where a rank that has a piece has ended, or has written nothing for the time-out of the ranks.
  using Line = std::function<bool(std::size_t piece, const std::string& line)>;
  void read(const Line& line);

 private:
  using Clock = std::chrono::steady_clock;
  struct Busy {
    bool has_piece = false;
    std::size_t piece = 0;
    Clock::time_point heard;
  };
  heed_program::Ranks* ranks_;
  std::vector<Busy> busy_;  // of ranks 1, 2, ...
  Clock::time_point looked_ = Clock::now();
};

// The other side: works on each order that rank 0 gives until dismiss().
void serve(heed_program::Ranks& ranks,
           const std::function<std::string(const std::string& order, const Say& say)>& work);
// Rank 0 sends all others home.
void dismiss(heed_program::Ranks& ranks);

}  // namespace compare
