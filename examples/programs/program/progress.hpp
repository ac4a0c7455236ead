// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "program.hpp"

#include <sys/ioctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <utility>

namespace heed_program {

// One line on standard error that replaces itself, at most ten times a second. It is cut to the
// terminal's width, since a line that wraps cannot be replaced. Nothing is shown unless standard
// error is a terminal. The line disappears with the object.
class Progress {
 public:
  Progress() = default;
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(const std::string& text) {
    const Clock::time_point now = Clock::now();
    if (!terminal_ || (drawn_ && now - last_ < std::chrono::milliseconds(100))) return;
    std::size_t shown = std::min(text.size(), columns() - 1);
    // A character is not cut in the middle.
    while (shown > 0 && shown < text.size() && (text[shown] & 0xC0) == 0x80) --shown;
    std::fprintf(stderr, "\r\033[K%.*s", int(shown), text.c_str());
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

  // Width of the terminal, at least 1; read each time, since people resize windows.
  [[nodiscard]] static std::size_t columns() {
    winsize size{};
    const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 80;
  }

  bool terminal_ = draws(STDERR_FILENO), drawn_ = false;
  Clock::time_point last_;
};

}  // namespace heed_program
