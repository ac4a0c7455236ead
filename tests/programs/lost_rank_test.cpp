// SPDX-License-Identifier: Apache-2.0

// Which rank is to blame if several wait: ranks that are threads of this program, with messages in its memory.

#include "catch.hpp"

#include "program/ranks.hpp"

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <thread>

namespace {

using heed_program::Link;
using heed_program::LostRank;
using heed_program::Ranks;

struct Message {
  int from, to, kind;
  std::vector<std::byte> bytes;
};
struct Mail {
  std::mutex mutex;
  std::list<Message> messages;  // sent and not received, in the order of sending
};

// Requests to send are done at once.
class MemoryLink final : public Link {
 public:
  MemoryLink(Mail& mail, int rank, int count) : mail_(mail), rank_(rank), count_(count) {}
  [[nodiscard]] int rank() const override { return rank_; }
  [[nodiscard]] int count() const override { return count_; }
  [[nodiscard]] Request send(int to, int kind, std::span<const std::byte> bytes) override {
    const std::lock_guard lock(mail_.mutex);
    mail_.messages.push_back({rank_, to, kind, {bytes.begin(), bytes.end()}});
    return 0;
  }
  [[nodiscard]] Request receive(int from, int kind, std::span<std::byte> bytes) override {
    wanted_.push_back({from, kind, bytes, false});
    return wanted_.size();
  }
  [[nodiscard]] bool done(Request request) override {
    const std::lock_guard lock(mail_.mutex);
    for (Wanted& wanted : wanted_) {
      if (wanted.is_done) continue;
      const auto found = std::ranges::find_if(mail_.messages, [&](const Message& m) {
        return m.to == rank_ && m.from == wanted.from && m.kind == wanted.kind;
      });
      if (found == mail_.messages.end()) continue;
      std::ranges::copy(found->bytes, wanted.to.begin());
      wanted.is_done = true;
      mail_.messages.erase(found);
    }
    return request == 0 || wanted_[request - 1].is_done;
  }
  [[nodiscard]] std::optional<Arrival> arrived(int kind) override {
    const std::lock_guard lock(mail_.mutex);
    for (const Message& m : mail_.messages)
      if (m.to == rank_ && m.kind == kind) return Arrival{m.from, m.bytes.size()};
    return std::nullopt;
  }
  void close() override {}
  void abort(int) override {}

 private:
  struct Wanted {
    int from, kind;
    std::span<std::byte> to;
    bool is_done;
  };
  Mail& mail_;
  int rank_, count_;
  std::vector<Wanted> wanted_;
};

// The sentence of rank 0 of three about its loss, in `waits`. Rank 2 waits for a text of rank 1,
// which sends it only when rank 0 is done.
template <class F>
[[nodiscard]] std::string said_by_first(const F& waits) {
  Mail mail;
  std::thread third([&] {
    Ranks ranks(std::make_unique<MemoryLink>(mail, 2, 3));
    (void)ranks.wait_text({1});
  });
  Ranks first(std::make_unique<MemoryLink>(mail, 0, 3));
  first.timeout = 0.2;
  std::string said;
  try {
    waits(first);
  } catch (const LostRank& lost) {
    said = lost.what();
  }
  Ranks(std::make_unique<MemoryLink>(mail, 1, 3)).send_text(2, "go on");
  third.join();
  return said;
}

}  // namespace

TEST_CASE("A rank that waits for a stuck one is not blamed by those that wait for both") {
  CHECK(said_by_first([](Ranks& ranks) { ranks.meet(); }) ==
        "rank 1 sent nothing for 0.2 s (--rank-timeout)");
}

TEST_CASE("Nor is it by those that wait for it alone") {
  CHECK(said_by_first([](Ranks& ranks) { (void)ranks.wait_text({2}); }) ==
        "rank 1 sent nothing for 0.2 s (--rank-timeout)");
}
