// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs pieces of work, one after another in this process, or several at a time in a process each. Processes share no
// memory: no state of one piece can reach another, and a process that the system ends takes no other with it.

#include <cstddef>
#include <functional>
#include <string>

namespace heed_program {
class Ranks;
}

namespace compare {

// The first character of each line that a process writes about its piece.
inline constexpr char kProgress = '.', kResult = '=', kFailure = '!';

// Reports the progress of a piece of work.
using Say = std::function<void(const std::string&)>;

struct Jobs {
  std::size_t count = 0;
  int at_once = 1;     // 1: in this process
  bool apart = false;  // also one at a time in a process of its own
  // Returns the result of piece `n`, a text without line breaks.
  std::function<std::string(std::size_t n, const Say& say)> work;
  // Called in this process, in the order in which the pieces end.
  std::function<void(std::size_t n, const std::string& result)> done;
  std::function<void(std::size_t n, const std::string& text)> progress;
  // The name of piece `n`, for messages.
  std::function<std::string(std::size_t n)> name;
  // Other ranks that serve() this one (rank_workers.hpp) and work beside `at_once` processes here,
  // and the order that tells them their piece.
  heed_program::Ranks* ranks = nullptr;
  std::function<std::string(std::size_t n)> order = {};
};

// Runs all pieces. If a piece throws, or its process ends without a result, running pieces are
// finished, no other is begun, and std::runtime_error names the piece. With several at a time, or
// apart, this process must not have used several threads before.
void run_jobs(const Jobs& jobs);

}  // namespace compare
