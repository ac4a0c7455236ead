// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks of a launcher of MPI (program/ranks.hpp) that train cells for rank 0. Rank 0 gives each of
// them a cell as soon as it has none, and reads its output: the lines of jobs.hpp.

#include "jobs.hpp"

#include "../program/ranks.hpp"

#include <vector>

namespace compare {

// Rank 0's view of all other ranks; empty if the launcher started one rank.
class RankWorkers {
 public:
  // The ranks must outlive the object; null for none.
  explicit RankWorkers(heed_program::Ranks* ranks);

  // Gives the piece to a rank that has none; returns false if all have one.
  [[nodiscard]] bool give(std::size_t piece, const std::string& order);
  [[nodiscard]] bool none() const { return busy_.empty(); }
  [[nodiscard]] bool any_busy() const;
  // Calls line(piece, text) for each line that has arrived; line() returns true for the last one of a piece. Throws
  // LostRank if a rank with a piece has ended, or has written nothing for the time-out of the ranks.
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
  std::vector<Busy> busy_;  // states of ranks 1, 2, ...
  Clock::time_point looked_ = Clock::now();
};

// The side of the other ranks: works on each order of rank 0 until dismiss().
void serve(heed_program::Ranks& ranks,
           const std::function<std::string(const std::string& order, const Say& say)>& work);
// Ends serve() on all other ranks; rank 0 calls it.
void dismiss(heed_program::Ranks& ranks);

}  // namespace compare
