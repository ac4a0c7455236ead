// SPDX-License-Identifier: Apache-2.0
// Random calls of every op, forward and backward, against the reference and against plain loops that share no code with
// heed (tests/fuzz/). A case is a function of its seed; one that fails prints the line that runs it again.
//
//   heed_fuzz_calls                             the first 20,000 cases
//   heed_fuzz_calls --seed 1000000 --count 5000
//   heed_fuzz_calls --seed 77                   one case, described
//
// Ends with 0 when all agree, 1 when one does not, 2 for options that it does not know.

#include "fuzz/check.hpp"

#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>

namespace {

struct Settings {
  std::uint64_t seed = 1, count = 20000;
  int threads = 2, shown = 20;
  std::string op;
  bool one = false;
};

constexpr const char* kHelp =
    "heed_fuzz_calls: random calls of every op against the slow twin and plain loops\n"
    "  --count N     cases (20000; 1 where only --seed is given)\n"
    "  --seed N      of the first case; the others count up from it (1)\n"
    "  --threads N   cases at a time (2)\n"
    "  --op NAME     cases of this op alone, the others are skipped\n"
    "  --scratch N   bytes that a thread keeps from case to case (as heed does)\n"
    "  --show N      failing cases that are printed in full (20)\n"
    "  --help\n";

[[nodiscard]] std::uint64_t number_of(const std::string& option, const char* text) {
  char* end = nullptr;
  const unsigned long long number = text == nullptr ? 0 : std::strtoull(text, &end, 10);
  if (text == nullptr || end == text || *end != '\0' || *text == '-')
    throw std::invalid_argument("heed_fuzz_calls: " + option + " is \"" +
                                (text == nullptr ? "" : text) + "\", it must be a whole number");
  return number;
}

[[nodiscard]] Settings read_options(int count, char** arguments) {
  Settings s;
  bool seeded = false, counted = false;
  for (int i = 1; i < count; i += 2) {
    const std::string option = arguments[i];
    const char* value = i + 1 < count ? arguments[i + 1] : nullptr;
    if (option == "--help") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (option == "--count")
      s.count = number_of(option, value), counted = true;
    else if (option == "--seed")
      s.seed = number_of(option, value), seeded = true;
    else if (option == "--threads")
      s.threads = int(std::clamp<std::uint64_t>(number_of(option, value), 1, 256));
    else if (option == "--scratch")
      heed::keep_scratch(number_of(option, value));
    else if (option == "--show")
      s.shown = int(std::min<std::uint64_t>(number_of(option, value), 1000000));
    else if (option == "--op")
      s.op = value == nullptr ? "" : value;
    else
      throw std::invalid_argument("heed_fuzz_calls: " + option +
                                  " is no option; --help lists them");
  }
  if (seeded && !counted) s.count = 1, s.one = true;
  const auto& ops = fuzz::op_list();
  if (!s.op.empty() &&
      std::none_of(ops.begin(), ops.end(), [&](const auto& entry) { return entry.name == s.op; }))
    throw std::invalid_argument("heed_fuzz_calls: --op is \"" + s.op + "\", no op has this name");
  return s;
}

// The seed of the current case, for the message of a crash.
thread_local unsigned long long running;

extern "C" void last_words(int signal) {
  char line[200];
  const int length = std::snprintf(
      line, sizeof(line), "heed_fuzz_calls --seed %llu\n  it ends the program by signal %d\n",
      running, signal);
  if (write(STDOUT_FILENO, line, std::min(sizeof(line) - 1, std::size_t(length))) < 0) _exit(3);
  _exit(1);
}

[[nodiscard]] std::string line_of(const fuzz::Case& c) {
  return "heed_fuzz_calls --seed " + std::to_string(c.seed) + "\n  " + c.text();
}

class Run {
 public:
  explicit Run(const Settings& settings) : settings_(settings) {}

  // True when all cases agree.
  bool all() {
    std::vector<std::thread> workers;
    for (int n = 0; n < settings_.threads; ++n) workers.emplace_back([this] { work(); });
    for (std::thread& worker : workers) worker.join();
    std::printf("%llu cases, %llu of them too near to a jump to be compared, %llu failed\n",
                static_cast<unsigned long long>(ran_), static_cast<unsigned long long>(near_),
                static_cast<unsigned long long>(failed_));
    for (const auto& [op, count] : by_op_)
      std::printf("  %s: %llu failed\n", op.c_str(), static_cast<unsigned long long>(count));
    return failed_ == 0;
  }

 private:
  void work() {
    for (;;) {
      const std::uint64_t n = next_++;
      if (n >= settings_.count) return;
      const fuzz::Case c = fuzz::Case::drawn(settings_.seed + n);
      if (!settings_.op.empty() && settings_.op != c.entry->name) continue;
      running = c.seed;
      if (settings_.one) {
        std::printf("%s\n", c.text().c_str());
        std::fflush(stdout);
      }
      note(c, fuzz::check(c));
    }
  }

  void note(const fuzz::Case& c, const fuzz::Verdict& verdict) {
    const std::lock_guard lock(mutex_);
    ++ran_;
    near_ += verdict.compared ? 0 : 1;
    if (verdict.fault.empty()) return;
    ++failed_;
    ++by_op_[c.entry->name];
    if (failed_ <= std::uint64_t(settings_.shown))
      std::printf("%s\n  %s\n", line_of(c).c_str(), verdict.fault.c_str());
    std::fflush(stdout);
  }

  Settings settings_;
  std::atomic<std::uint64_t> next_ = 0;
  std::mutex mutex_;
  std::uint64_t ran_ = 0, near_ = 0, failed_ = 0;
  std::map<std::string, std::uint64_t> by_op_;
};

}  // namespace

int main(int count, char** arguments) {
  try {
    const Settings settings = read_options(count, arguments);
    for (const int signal : {SIGFPE, SIGSEGV, SIGBUS, SIGILL, SIGABRT})
      std::signal(signal, last_words);
    return Run(settings).all() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
