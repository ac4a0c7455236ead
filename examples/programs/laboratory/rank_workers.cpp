// SPDX-License-Identifier: Apache-2.0
#include "rank_workers.hpp"

namespace compare {

namespace {

constexpr char kOrder = '>', kDismissed = '.';
// Shortest time between two progress reports of a rank; a step of a small model is shorter.
constexpr auto kSayEvery = std::chrono::milliseconds(100);
constexpr auto kLookEvery = std::chrono::milliseconds(50);

}  // namespace

RankWorkers::RankWorkers(heed_program::Ranks* ranks)
    : ranks_(ranks), busy_(ranks ? std::size_t(ranks->count() - 1) : 0) {}

bool RankWorkers::give(std::size_t piece, const std::string& order) {
  for (std::size_t n = 0; n < busy_.size(); ++n) {
    if (busy_[n].has_piece) continue;
    ranks_->send_text(int(n) + 1, kOrder + order);
    busy_[n] = {true, piece, Clock::now()};
    return true;
  }
  return false;
}

bool RankWorkers::any_busy() const {
  return std::ranges::any_of(busy_, [](const Busy& one) { return one.has_piece; });
}

void RankWorkers::read(const Line& line) {
  if (busy_.empty()) return;
  while (const auto text = ranks_->take_text()) {
    Busy& from = busy_[std::size_t(text->first - 1)];
    from.heard = Clock::now();
    if (line(from.piece, text->second)) from.has_piece = false;
  }
  const Clock::time_point now = Clock::now();
  if (now - looked_ < kLookEvery) return;
  looked_ = now;
  std::vector<int> waited_for, silent;
  for (std::size_t n = 0; n < busy_.size(); ++n) {
    if (!busy_[n].has_piece) continue;
    waited_for.push_back(int(n) + 1);
    const double seconds = std::chrono::duration<double>(now - busy_[n].heard).count();
    if (ranks_->timeout > 0 && seconds >= ranks_->timeout) silent.push_back(int(n) + 1);
  }
  ranks_->require_alive(waited_for);
  if (!silent.empty()) ranks_->lose_silent(silent);
}

void serve(heed_program::Ranks& ranks,
           const std::function<std::string(const std::string& order, const Say& say)>& work) {
  using Clock = std::chrono::steady_clock;
  const double timeout = std::exchange(ranks.timeout, 0);  // an order may be long in coming
  while (true) {
    const std::string order = ranks.wait_text({0}).second;
    if (order[0] == kDismissed) break;
    Clock::time_point said;
    const auto say = [&](const std::string& text) {
      if (Clock::now() - said < kSayEvery) return;
      said = Clock::now();
      ranks.send_text(0, kProgress + text);
    };
    try {
      ranks.send_text(0, kResult + work(order.substr(1), say));
    } catch (const std::bad_alloc&) {
      ranks.send_text(0, std::string(1, kFailure) + "there is not enough memory");
    } catch (const std::exception& error) {
      ranks.send_text(0, kFailure + std::string(error.what()));
    }
  }
  ranks.timeout = timeout;
}

void dismiss(heed_program::Ranks& ranks) {
  for (int r = 1; r < ranks.count(); ++r) ranks.send_text(r, std::string(1, kDismissed));
}

}  // namespace compare
