// SPDX-License-Identifier: Apache-2.0
#pragma once

// The processes that work on one run: those that a launcher of MPI started together, with ranks 0 to count - 1, or this one
// alone.
//
// All ranks run the same program and reach the same exchanges in the same order. Failures:
//   - an exception of a rank ends all ranks; the lowest rank that failed prints its sentence, once;
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

// Thrown when a rank has ended or does not answer.
struct LostRank : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Thrown when another rank has failed; the text gives the reason.
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
  // True if `mine` is true on any rank.
  [[nodiscard]] bool any(bool mine);
  [[nodiscard]] std::vector<std::string> gather_texts(const std::string& mine);
  // Returns when all ranks have called it.
  void meet() { (void)gather(char(0)); }

  // Replaces each number by its sum over the ranks, added up in double in the order of the ranks and rounded once: the bits
  // are the same on all ranks, and in each run with as many ranks. All ranks give as many numbers.
  void sum(std::span<float> numbers);

  // Sends a text from one rank to another, beside the exchanges of all. Every text must be taken.
  void send_text(int to, std::string text);
  // The next text that has arrived, with its sender.
  [[nodiscard]] std::optional<std::pair<int, std::string>> take_text();
  // Waits for the next text of one of these ranks.
  [[nodiscard]] std::pair<int, std::string> wait_text(const std::vector<int>& from);
  // Throws LostRank if one of these ranks has ended on this machine.
  void require_alive(const std::vector<int>& ranks);
  // Throws LostRank because these ranks have sent nothing for `timeout` seconds.
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
  // Keeps the memory of a text of send_text() until it is delivered.
  struct Sent {
    Link::Request request;
    std::unique_ptr<std::string> text;
  };

  // An inquiry: a rank that waits for one that waits itself must not blame it. It asks the ranks
  // for which it waits, and then the ranks for which those wait. A stuck rank does not answer.
  struct Inquiry {
    std::uint64_t number;
    std::set<int> asked;
    std::vector<int> silent;  // ranks that have not answered
    Clock::time_point asked_at;
  };

  // Learns which ranks are processes of this machine.
  void meet_processes();
  void gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all);
  void wait(std::vector<Pending> pending);
  // The ranks from which, or to which, one of these messages is under way.
  [[nodiscard]] static std::vector<int> peers_of(const std::vector<Pending>& pending,
                                                 bool incoming);
  // Calls ready() until it returns true. missing() names the ranks for which it waits.
  void wait_until(const std::function<bool()>& ready,
                  const std::function<std::vector<int>()>& missing);
  void answer_questions(const std::function<std::vector<int>()>& missing);
  // Takes answers, and asks those of `ranks`, and of the ranks that the answers name, that were not asked before.
  void ask(Inquiry& inquiry, std::vector<int> ranks);
  void post(int to, Kind kind, std::string text);
  // The next message of that kind that has arrived, with its sender. It is one of a few words, so
  // its sender need not be watched.
  [[nodiscard]] std::optional<std::pair<int, std::string>> take_short(Kind kind);
  [[noreturn]] void lose(const std::vector<int>& missing, const std::string& what);
  // Exchanges the endings of all ranks. Prints the sentence that is due, and returns the exit code of this process.
  [[nodiscard]] int join_endings(const char* name, const Ending& mine);

  std::unique_ptr<Link> link_;
  std::vector<std::int64_t> processes_;  // by rank; 0: not on this machine
  std::vector<Sent> sent_;
  std::uint64_t inquiries_ = 0;
  int unanswered_ = 0;  // questions of all inquiries
  int speaker_ = 0;     // rank that prints the sentence of a LostRank
  bool open_ = false;  // an exchange was left before its end: here, or, once ranks end, on any rank
  bool ending_ = false;  // true once endings of other ranks are no interruption any more
};

// Runs a program of that name, on all ranks that a launcher started or on this one alone, and returns its exit code: as run()
// of program.hpp. Only rank 0 has a standard output.
[[nodiscard]] int run_on_ranks(const char* name, const std::function<int(Ranks&)>& body);

}  // namespace heed_program
