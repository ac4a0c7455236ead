// SPDX-License-Identifier: Apache-2.0
#include "ranks.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <sstream>
#include <thread>

namespace heed_program {

namespace {

// A waiting rank looks for messages without a pause for this long, then with pauses.
constexpr auto kEager = std::chrono::milliseconds(2);
constexpr auto kPause = std::chrono::microseconds(200);
// Time between two checks whether a process still lives.
constexpr auto kLook = std::chrono::milliseconds(50);
// Time that output needs to get through the launcher before all processes end.
constexpr auto kPassedOn = std::chrono::milliseconds(200);
// A rank that comes back from a pause after this time was stopped.
constexpr auto kStopped = std::chrono::seconds(1);
// Time within which waiting ranks answer when they are asked for whom they wait.
constexpr auto kAnswering = std::chrono::milliseconds(1000);
// Seconds by which each rank waits longer than the one before it, which needs less time than this to ask and to end all.
constexpr double kTurn = 1.5;
// Time by which the rank that reports a lost rank is ahead of the others.
constexpr auto kGrace = std::chrono::milliseconds(3000);

[[nodiscard]] std::string list_of(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i == 0 ? "" : i + 1 == ranks.size() ? " and " : ", ") + std::to_string(ranks[i]);
  return text;
}

[[nodiscard]] std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  return text;
}

[[nodiscard]] std::array<char, 256> host_name() {
  std::array<char, 256> name{};
  (void)::gethostname(name.data(), name.size() - 1);
  return name;
}

}  // namespace

Ranks::Ranks(std::unique_ptr<Link> link) : link_(std::move(link)) {}

void Ranks::meet_processes() {
  if (count() == 1) return;
  struct Process {
    std::array<char, 256> host;
    std::int64_t id;
  };
  const Process mine{host_name(), ::getpid()};
  for (const Process& process : gather(mine)) {
    // A process that cannot be seen, as in a container of the same name, counts as one of another machine.
    const bool seen = process.host == mine.host && ::kill(pid_t(process.id), 0) == 0;
    processes_.push_back(seen ? process.id : 0);
  }
}

bool Ranks::any(bool mine) {
  const std::vector<char> all = gather(char(mine));
  return std::ranges::count(all, char(1)) > 0;
}

std::vector<std::string> Ranks::gather_texts(const std::string& mine) {
  std::vector<std::string> all(std::size_t(count()), mine);
  const std::vector<std::uint64_t> sizes = gather(std::uint64_t(mine.size()));
  std::vector<Pending> pending;
  for (int r = 0; r < count(); ++r) {
    if (r == rank()) continue;
    std::string& text = all[std::size_t(r)];
    text.resize(sizes[std::size_t(r)]);
    pending.push_back({link_->receive(r, kData, std::as_writable_bytes(std::span(text))), r, true});
    pending.push_back({link_->send(r, kData, std::as_bytes(std::span(mine))), r, false});
  }
  wait(std::move(pending));
  return all;
}

void Ranks::gather_bytes(std::span<const std::byte> mine, std::span<std::byte> all) {
  std::vector<Pending> pending;
  for (int r = 0; r < count(); ++r) {
    if (r == rank()) continue;
    const auto theirs = all.subspan(std::size_t(r) * mine.size(), mine.size());
    pending.push_back({link_->receive(r, kData, theirs), r, true});
    pending.push_back({link_->send(r, kData, mine), r, false});
  }
  wait(std::move(pending));
}

// Rank r adds up piece r: every other rank sends it its numbers, and gets the sums. Each rank sends
// and receives 2 (count - 1) / count of all numbers.
void Ranks::sum(std::span<float> numbers) {
  if (count() == 1) return;
  const auto ranks = std::size_t(count()), me = std::size_t(rank());
  const auto piece = [&](std::size_t r) {
    const std::size_t begin = numbers.size() * r / ranks, end = numbers.size() * (r + 1) / ranks;
    return numbers.subspan(begin, end - begin);
  };
  const std::span<float> own = piece(me);
  std::vector<float> theirs(ranks * own.size());  // piece `me` of the other ranks, rank after rank
  std::vector<Pending> pending;
  for (std::size_t r = 0; r < ranks; ++r) {
    if (r == me) continue;
    const auto to = std::span(theirs).subspan(r * own.size(), own.size());
    pending.push_back({link_->receive(int(r), kData, std::as_writable_bytes(to)), int(r), true});
    pending.push_back({link_->send(int(r), kData, std::as_bytes(piece(r))), int(r), false});
  }
  wait(std::move(pending));
  std::ranges::copy(own, theirs.begin() + std::ptrdiff_t(me * own.size()));
  for (std::size_t i = 0; i < own.size(); ++i) {
    double all = 0;
    for (std::size_t r = 0; r < ranks; ++r) all += double(theirs[r * own.size() + i]);
    own[i] = float(all);
  }
  pending.clear();
  for (std::size_t r = 0; r < ranks; ++r) {
    if (r == me) continue;
    pending.push_back(
        {link_->receive(int(r), kData, std::as_writable_bytes(piece(r))), int(r), true});
    pending.push_back({link_->send(int(r), kData, std::as_bytes(own)), int(r), false});
  }
  wait(std::move(pending));
}

void Ranks::post(int to, Kind kind, std::string text) {
  std::erase_if(sent_, [&](const Sent& old) { return link_->done(old.request); });
  auto kept = std::make_unique<std::string>(std::move(text));
  const Link::Request request = link_->send(to, kind, std::as_bytes(std::span(*kept)));
  sent_.push_back({request, std::move(kept)});
}

void Ranks::send_text(int to, std::string text) { post(to, kText, std::move(text)); }

std::optional<std::pair<int, std::string>> Ranks::take_short(Kind kind) {
  const std::optional<Link::Arrival> arrival = link_->arrived(kind);
  if (!arrival) return std::nullopt;
  std::string text(arrival->size, '\0');
  const Link::Request request =
      link_->receive(arrival->from, kind, std::as_writable_bytes(std::span(text)));
  while (!link_->done(request)) ::sched_yield();
  return std::pair{arrival->from, std::move(text)};
}

std::optional<std::pair<int, std::string>> Ranks::take_text() {
  if (count() == 1) return std::nullopt;
  const std::optional<Link::Arrival> arrival = link_->arrived(kText);
  if (!arrival) return std::nullopt;
  std::string text(arrival->size, '\0');
  wait({{link_->receive(arrival->from, kText, std::as_writable_bytes(std::span(text))),
         arrival->from, true}});
  return std::pair{arrival->from, std::move(text)};
}

std::pair<int, std::string> Ranks::wait_text(const std::vector<int>& from) {
  std::optional<std::pair<int, std::string>> text;
  wait_until([&] { return (text = take_text()).has_value(); }, [&] { return from; });
  return std::move(*text);
}

std::vector<int> Ranks::peers_of(const std::vector<Pending>& pending, bool incoming) {
  std::set<int> peers;
  for (const Pending& one : pending)
    if (one.incoming == incoming) peers.insert(one.peer);
  return {peers.begin(), peers.end()};
}

void Ranks::wait(std::vector<Pending> pending) {
  open_ = true;
  const auto ready = [&] {
    std::erase_if(pending, [&](const Pending& one) { return link_->done(one.request); });
    return pending.empty();
  };
  // A rank to which only sending is not finished may itself wait for another one.
  wait_until(ready, [&] {
    const std::vector<int> senders = peers_of(pending, true);
    return senders.empty() ? peers_of(pending, false) : senders;
  });
  open_ = false;
}

void Ranks::wait_until(const std::function<bool()>& ready,
                       const std::function<std::vector<int>()>& missing) {
  Clock::time_point start = Clock::now(), looked = start, last = start;
  std::optional<Inquiry> inquiry;
  while (!ready()) {
    const Clock::time_point now = Clock::now();
    // A process that was stopped itself has no reason to assume that others are.
    if (now - last > kStopped) {
      start = now;
      inquiry.reset();
    }
    last = now;
    if (now - start < kEager) {
      ::sched_yield();
      continue;
    }
    if (!ending_ && link_->arrived(kFailure)) throw OtherRankFailed();
    if (now - looked >= kLook) {
      require_alive(missing());
      looked = now;
    }
    answer_questions(missing);
    // Rank 0 finds out first, then rank 1.
    const double patience = timeout + kTurn * std::min(rank(), 2);
    if (timeout > 0 && std::chrono::duration<double>(now - start).count() >= patience) {
      if (!inquiry) inquiry.emplace(Inquiry{++inquiries_, {}, {}, now});
      ask(*inquiry, missing());
      if (now - inquiry->asked_at >= kAnswering)
        lose_silent(inquiry->silent.empty() ? missing() : inquiry->silent);
    }
    std::this_thread::sleep_for(kPause);
  }
}

void Ranks::answer_questions(const std::function<std::vector<int>()>& missing) {
  while (const auto question = take_short(kQuestion)) {
    std::string answer = question->second;
    for (const int r : missing()) answer += " " + std::to_string(r);
    post(question->first, kAnswer, std::move(answer));
  }
}

void Ranks::ask(Inquiry& inquiry, std::vector<int> ranks) {
  while (const auto answer = take_short(kAnswer)) {
    --unanswered_;
    std::istringstream words(answer->second);
    std::uint64_t number = 0;
    words >> number;
    if (number != inquiry.number) continue;  // an answer to an earlier inquiry
    std::erase(inquiry.silent, answer->first);
    for (int r = 0; words >> r;) ranks.push_back(r);
  }
  for (const int r : ranks) {
    if (r == rank() || !inquiry.asked.insert(r).second) continue;
    post(r, kQuestion, std::to_string(inquiry.number));
    ++unanswered_;
    inquiry.silent.push_back(r);
    inquiry.asked_at = Clock::now();
  }
  std::ranges::sort(inquiry.silent);
}

void Ranks::require_alive(const std::vector<int>& missing) {
  std::vector<int> dead;
  for (const int r : missing) {
    const std::int64_t process = r < int(processes_.size()) ? processes_[std::size_t(r)] : 0;
    if (process != 0 && ::kill(pid_t(process), 0) != 0 && errno == ESRCH) dead.push_back(r);
  }
  if (!dead.empty())
    lose(dead, dead.size() == 1 ? " has ended too early" : " have ended too early");
}

void Ranks::lose_silent(const std::vector<int>& ranks) {
  lose(ranks, " sent nothing for " + seconds_text(timeout) + " s (--rank-timeout)");
}

void Ranks::lose(const std::vector<int>& missing, const std::string& what) {
  speaker_ = 0;
  while (std::ranges::count(missing, speaker_) > 0) ++speaker_;
  throw LostRank(list_of(missing) + what);
}

int Ranks::join_endings(const char* name, const Ending& mine) {
  ending_ = true;
  if (mine.code != 0)
    open_ = open_ ||
            !std::ranges::all_of(sent_, [&](const Sent& one) { return link_->done(one.request); });
  open_ = open_ || unanswered_ > 0;
  const std::string text =
      std::to_string(mine.code) + (open_ ? " open " : " done ") + mine.sentence;
  // A rank that has done its work may end while others still wait for each other.
  const Kind kind = mine.code == 0 ? kEnding : kFailure;
  std::vector<Ending> all(std::size_t(count()), mine);
  std::vector<Pending> sending;
  std::vector<int> missing;
  for (int r = 0; r < count(); ++r) {
    if (r == rank()) continue;
    sending.push_back({link_->send(r, kind, std::as_bytes(std::span(text))), r, false});
    missing.push_back(r);
  }
  const auto ready = [&] {
    std::erase_if(sending, [&](const Pending& one) { return link_->done(one.request); });
    for (const Kind theirs : {kEnding, kFailure}) {
      const auto ending = take_short(theirs);
      if (!ending) continue;
      const auto& [from, words] = *ending;
      const std::size_t space = words.find(' ');
      open_ = open_ || words.compare(space, 6, " open ") == 0;
      all[std::size_t(from)] = {std::stoi(words), words.substr(space + 6)};
      std::erase(missing, from);
    }
    return missing.empty() && sending.empty();
  };
  wait_until(ready, [&] { return missing.empty() ? peers_of(sending, false) : missing; });
  int code = 0;
  speaker_ = -1;
  bool same = true;
  for (int r = count(); r-- > 0;) {
    const Ending& one = all[std::size_t(r)];
    code = std::max(code, one.code);
    if (!one.sentence.empty()) speaker_ = r;
    same = same && one.sentence == mine.sentence;
  }
  if (speaker_ == rank())
    detail::complain(name, ((same ? "" : list_of({rank()}) + ": ") + mine.sentence).c_str(), code);
  return code;
}

int run_on_ranks(const char* name, const std::function<int(Ranks&)>& body) {
  detail::occupy_standard_streams();
  std::optional<Ranks> ranks;
  bool lost = false;
  Ending ending = detail::ending_of([&] {
    ranks.emplace(open_link());
    if (!ranks->first() && std::freopen("/dev/null", "w", stdout) == nullptr)
      throw std::runtime_error("/dev/null cannot be opened");
    try {
      ranks->meet_processes();
      return body(*ranks);
    } catch (const LostRank&) {
      lost = true;
      throw;
    } catch (const OtherRankFailed&) {
      return 1;
    }
  });
  if (!ranks || ranks->count() == 1) {
    if (ranks && ranks->link_) ranks->link_->close();
    return detail::conclude(name, ending);
  }
  if (!lost) {
    try {
      ending.code = ranks->join_endings(name, ending);
      const int code = detail::conclude(name, {ending.code, ""});
      if (!ranks->open_) {
        ranks->link_->close();
        return code;
      }
      // Messages that nobody will take prevent a joint ending: the rank that reported ends all
      // processes, once the launcher has had time to pass its sentence on.
      std::this_thread::sleep_for(ranks->rank() == std::max(0, ranks->speaker_) ? kPassedOn
                                                                                : kGrace);
      ranks->link_->abort(code);
      return code;
    } catch (const LostRank& error) {
      if (ending.sentence.empty()) ending = {1, error.what()};
    }
  }
  // The rank that reports ends the others.
  if (ranks->rank() != ranks->speaker_) std::this_thread::sleep_for(kGrace);
  (void)detail::conclude(name, ending);
  std::this_thread::sleep_for(kPassedOn);
  ranks->link_->abort(1);
  return 1;
}

}  // namespace heed_program
