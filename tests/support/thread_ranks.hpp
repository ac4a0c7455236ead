// SPDX-License-Identifier: Apache-2.0
#pragma once

// Ranks that are threads of one process, with the members of heed::mpi::Communicator.

#include <heed/mpi/any_communicator.hpp>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

namespace heed_test {

// Messages on their way, by sender and receiver.
class Post {
 public:
  explicit Post(int ranks) : ranks_(ranks) {}
  [[nodiscard]] int ranks() const { return ranks_; }

  void send(int from, const heed::mpi::Send& message) {
    const std::lock_guard lock(guard_);
    const auto* bytes = static_cast<const char*>(message.data);
    letters_[{from, message.to}].emplace_back(bytes, bytes + message.bytes);
    arrived_.notify_all();
  }
  void receive(int to, const heed::mpi::Receive& message) {
    std::unique_lock lock(guard_);
    auto& from = letters_[{message.from, to}];
    arrived_.wait(lock, [&] { return !from.empty() || failed_; });
    if (from.empty()) throw std::runtime_error("another rank has failed");
    const std::vector<char> letter = std::move(from.front());
    from.pop_front();
    if (letter.size() != message.bytes) throw std::runtime_error("a message of another size");
    std::memcpy(message.data, letter.data(), letter.size());
  }
  void abandon() {
    const std::lock_guard lock(guard_);
    failed_ = true;
    arrived_.notify_all();
  }

 private:
  int ranks_;
  std::mutex guard_;
  std::condition_variable arrived_;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> letters_;
  bool failed_ = false;
};

class ThreadRank {
 public:
  ThreadRank(Post& post, int rank) : post_(post), rank_(rank) {}
  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return post_.ranks(); }

  class Transfer {
   public:
    Transfer() = default;
    Transfer(Post& post, int rank, std::vector<heed::mpi::Receive> receives)
        : post_(&post), rank_(rank), receives_(std::move(receives)) {}
    void wait() {
      for (const auto& message : std::exchange(receives_, {})) post_->receive(rank_, message);
    }

    void poke() const {}

   private:
    Post* post_ = nullptr;
    int rank_ = 0;
    std::vector<heed::mpi::Receive> receives_;
  };
  [[nodiscard]] Transfer start(std::span<const heed::mpi::Send> sends,
                               std::span<const heed::mpi::Receive> receives) const {
    for (const auto& message : sends) post_.send(rank_, message);
    return {post_, rank_, {receives.begin(), receives.end()}};
  }

 private:
  Post& post_;
  int rank_;
};

// Runs body(rank) on so many ranks at once. The first exception is thrown after all have ended.
template <class Body>
void on_ranks(int ranks, Body&& body) {
  Post post(ranks);
  std::vector<std::exception_ptr> errors(std::size_t(ranks), nullptr);
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(ThreadRank(post, r));
      } catch (...) {
        errors[std::size_t(r)] = std::current_exception();
        post.abandon();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace heed_test
