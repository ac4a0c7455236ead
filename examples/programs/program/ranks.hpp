// SPDX-License-Identifier: Apache-2.0
#pragma once

// The processes that work on one run: those that a launcher of MPI started together, with ranks 0 to count - 1, or this one
// alone.
//
// All ranks run the same program and come to the same exchanges in the same order. Failures:
//   - what a rank throws ends all ranks; the lowest one that failed prints its sentence, once;
//   - a rank whose process has ended (on the same machine; the launcher watches the others), or that sends nothing for
//     `timeout` seconds and does not wait for another rank itself, is lost: the others throw LostRank, and one of them
//     prints its sentence.

#include "link.hpp"
#include "program.hpp"

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace heed_program {

// A rank has ended or does not answer.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Another rank has failed, and says why.
struct OtherRankFailed : std::runtime_error {
  OtherRankFailed() : std::runtime_error("another rank failed") {}
};

class Ranks {
 public:
  double timeout = 0;  // seconds that a rank may let the others wait; 0: for ever

  Ranks() = default;  // this process alone
  explicit Ranks(std::unique_ptr<Link> link);

  [[nodiscard]] int rank() const { return link_ ? link_->rank() : 0; }
  [[nodiscard]] int count() const { return link_ ? link_->count() : 1; }
  [[nodiscard]] bool first() const { return rank() == 0; }

  // Each rank's number, in the order of the ranks.
  template <class Number>
  [[nodiscard]] std::vector<Number> gather(const Number& mine) {
    static_assert(std::is_trivially_copyable_v<Number>);
    std::vector<Number> all(std::size_t(count()), mine);
    if (count() > 1)
      gather_bytes(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    return all;
  }
  // True if any rank says so.
  [[nodiscard]] bool any(bool mine);
  [[nodiscard]] std::vector<std::string> gather_texts(const std::string& mine);
  // Returns when all ranks have come here.
  void meet() { (void)gather(char(0)); }

  // Replaces each number by its sum over the ranks, added up in double in the order of the ranks and rounded once: the bits
  // are the same on all ranks, and in each run with as many ranks. All ranks give as many numbers.
  void sum(std::span<float> numbers);

  // Texts from one rank to another, beside the exchanges of all. A text that was sent must be taken.
  void send_text(int to, std::string text);
  // The next text that has arrived, with its sender.
  [[nodiscard]] std::optional<std::pair<int, std::string>> take_text();
  // Waits for the next text of one of these ranks.
  [[nodiscard]] std::pair<int, std::string> wait_text(const std::vector<int>& from);
  // Throws LostRank where one of these ranks has ended on this machine.
  void require_alive(const std::vector<int>& ranks);
  // Throws LostRank: these ranks have sent nothing for `timeout` seconds.
  [[noreturn]] void lose_silent(const std::vector<int>& ranks);

 private:
  friend int run_on_ranks(const char*, const std::function<int(Ranks&)>&);
  friend class RankGroup;
  using Clock = std::chrono::steady_clock;
  enum Kind { kData, kText, kEnding, kFailure, kQuestion, kAnswer };
  // A message under way, and the rank at its other end.
  struct Pending {
    Link::Request request;
    int peer;
    bool incoming;
  };
  // Keeps what send_text() sends until it is there.
  struct Sent {
    Link::Request request;
    std::unique_ptr<std::string> text;
  };

  // A rank that waits for one that waits itself must not blame it: it asks the ranks that it waits for, and those that they say
  // they wait for. What is stuck does not answer.
  struct Inquiry {
    std::uint64_t number;
    std::set<int> asked;
    std::vector<int> silent;  // have not answered
    Clock::time_point asked_at;
  };

  // Learns which ranks are processes of this machine.
  void meet_processes();
  void gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all);
  void wait(std::vector<Pending> pending);
  // The ranks from which, or to which, one of these is under way.
  [[nodiscard]] static std::vector<int> peers_of(const std::vector<Pending>& pending,
                                                 bool incoming);
  // Calls ready() until it returns true. missing() names the ranks that it waits for.
  void wait_until(const std::function<bool()>& ready,
                  const std::function<std::vector<int>()>& missing);
  void answer_questions(const std::function<std::vector<int>()>& missing);
  // Takes answers, and asks those of `ranks` and of the ranks that the answers name that were not asked before.
  void ask(Inquiry& inquiry, std::vector<int> ranks);
  void post(int to, Kind kind, std::string text);
  // The next message of that kind that has arrived, with its sender; one of a few words, whose sender need not be watched.
  [[nodiscard]] std::optional<std::pair<int, std::string>> take_short(Kind kind);
  [[noreturn]] void lose(const std::vector<int>& missing, const std::string& what);
  // Exchanges how each rank ended. Returns the code of this process and prints the sentence that is due.
  [[nodiscard]] int join_endings(const char* name, const Ending& mine);

  std::unique_ptr<Link> link_;
  std::vector<std::int64_t> processes_;  // of each rank on this machine; 0 on another one
  std::vector<Sent> sent_;
  std::uint64_t inquiries_ = 0;
  int unanswered_ = 0;   // questions of all inquiries
  int speaker_ = 0;      // who prints the sentence of a LostRank
  bool open_ = false;    // an exchange was left before its end, here or, at the end, on any rank
  bool ending_ = false;  // endings of other ranks are no interruption any more
};

// Runs a program of that name, on all ranks that a launcher started or on this one alone, and returns its exit code: as run()
// of program.hpp. Only rank 0 has a standard output.
[[nodiscard]] int run_on_ranks(const char* name, const std::function<int(Ranks&)>& body);

}  // namespace heed_program
