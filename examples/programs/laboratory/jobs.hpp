// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs pieces of work, one after another here, or several at a time in a process each. A process shares no memory with the
// others: no state of one piece can reach another, and one that is ended by the system takes no other with it.

#include <cstddef>
#include <functional>
#include <string>

namespace heed_program {
class Ranks;
}

namespace compare {

// The first character of each line that a process writes about its piece.
inline constexpr char kProgress = '.', kResult = '=', kFailure = '!';

// Says how far a piece of work is.
using Say = std::function<void(const std::string&)>;

struct Jobs {
  std::size_t count = 0;
  int at_once = 1;     // 1: in this process
  bool apart = false;  // also one at a time in a process of its own
  // Returns the result of piece `n`, which has no line break.
  std::function<std::string(std::size_t n, const Say& say)> work;
  // Called in this process, in the order in which the pieces end.
  std::function<void(std::size_t n, const std::string& result)> done;
  std::function<void(std::size_t n, const std::string& text)> progress;
  // For messages: what piece `n` is.
  std::function<std::string(std::size_t n)> name;
  // Other ranks that serve() this one (rank_workers.hpp) and work beside `at_once` processes here, and what tells them their
  // piece.
  heed_program::Ranks* ranks = nullptr;
  std::function<std::string(std::size_t n)> order = {};
};

// Where a piece throws, or its process ends without a result, those that run already are finished, no other one is begun,
// and std::runtime_error says which it was. With several at a time, or apart, this process must not have used several threads
// before.
void run_jobs(const Jobs& jobs);

}  // namespace compare
