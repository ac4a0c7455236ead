// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "../program/program.hpp"

#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

namespace compare {

// One line on standard error that replaces itself, at most ten times a second; nothing unless
// standard error is a terminal. The line is gone when the object is.
class Progress {
 public:
  Progress() : terminal_(heed_program::draws(STDERR_FILENO)) {}
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text) {
    const Clock::time_point now = Clock::now();
    if (!terminal_ || (drawn_ && now - last_ < std::chrono::milliseconds(100))) return;
    std::fprintf(stderr, "\r\033[K%.79s", text.c_str());
    std::fflush(stderr);
    last_ = now;
    drawn_ = true;
  }
  // Takes the line away, until the next one is shown.
  void clear() {
    if (std::exchange(drawn_, false)) std::fputs("\r\033[K", stderr);
  }

 private:
  using Clock = std::chrono::steady_clock;
  bool terminal_, drawn_ = false;
  Clock::time_point last_;
};

}  // namespace compare
