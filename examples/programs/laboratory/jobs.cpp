// SPDX-License-Identifier: Apache-2.0
#include "jobs.hpp"

#include "rank_workers.hpp"

#include "../program/program.hpp"

#include <poll.h>
#include <sys/wait.h>
#ifdef __linux__
#include <sys/prctl.h>
#endif

#include <csignal>
#include <list>
#include <optional>
#include <vector>

namespace compare {

namespace {

// Longest time until results of other ranks are read.
constexpr int kRanksMilliseconds = 5;

// Writes a line to the pipe. A failure is not reported: the reader sees the end.
void write_line(int to, char kind, const std::string& text) {
  std::string line = kind + text + "\n";
  for (std::size_t at = 0; at < line.size();) {
    const ssize_t put = ::write(to, line.data() + at, line.size() - at);
    if (put < 0 && errno != EINTR) ::_exit(1);
    if (put > 0) at += std::size_t(put);
  }
}

[[noreturn]] void run_piece(const Jobs& jobs, std::size_t n, int to, pid_t parent) {
#ifdef __linux__
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody would read the result
#endif
  if (::getppid() != parent) ::_exit(1);
  try {
    write_line(to, kResult,
               jobs.work(n, [&](const std::string& text) { write_line(to, kProgress, text); }));
  } catch (const std::bad_alloc&) {
    write_line(to, kFailure, "there is not enough memory");
  } catch (const std::exception& error) {
    write_line(to, kFailure, error.what());
  }
  ::_exit(0);  // without the parent's buffers and destructors
}

// A process that works on piece `n`. The destructor ends it.
class Worker {
 public:
  Worker(const Jobs& jobs, std::size_t n) : n_(n) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail("a pipe cannot be made");
    from_ = ends[0];
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) run_piece(jobs, n, ends[1], parent);
    ::close(ends[1]);
    if (pid_ < 0) {
      ::close(from_);
      fail("a process cannot be started");
    }
  }
  ~Worker() {
    ::close(from_);
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    (void)wait();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  [[nodiscard]] int descriptor() const { return from_; }
  [[nodiscard]] std::size_t piece() const { return n_; }

  // Reads the bytes that have arrived. Returns false at the end.
  [[nodiscard]] bool read(const Jobs& jobs) {
    char bytes[4096];
    const ssize_t got = ::read(from_, bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) return true;
    if (got <= 0) return false;
    text_.append(bytes, std::size_t(got));
    std::size_t begin = 0;
    for (std::size_t end; (end = text_.find('\n', begin)) != std::string::npos; begin = end + 1)
      take(jobs, text_.substr(begin, end - begin));
    text_.erase(0, begin);
    return true;
  }
  // After the end: passes on the result. Returns the fault, or nothing.
  [[nodiscard]] std::string finish(const Jobs& jobs) {
    const int status = wait();
    if (result_) jobs.done(n_, *result_);
    if (result_) return "";
    if (!failure_.empty()) return failure_;
    return WIFSIGNALED(status)
               ? "its process was ended by signal " + std::to_string(WTERMSIG(status))
               : "its process ended without a result";
  }

 private:
  [[noreturn]] static void fail(const char* what) {
    throw std::runtime_error(std::string(what) + " (" + std::generic_category().message(errno) +
                             ")");
  }
  void take(const Jobs& jobs, const std::string& line) {
    if (line.empty()) return;
    const std::string text = line.substr(1);
    if (line[0] == kProgress) jobs.progress(n_, text);
    if (line[0] == kResult) result_ = text;
    if (line[0] == kFailure) failure_ = text;
  }
  int wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

  std::size_t n_;
  int from_ = -1;
  pid_t pid_ = -1;
  std::string text_, failure_;
  std::optional<std::string> result_;
};

void run_in_processes(const Jobs& jobs) {
  std::list<Worker> workers;
  RankWorkers ranks(jobs.ranks);
  std::size_t next = 0;
  std::string failure;
  const auto take_line = [&](std::size_t piece, const std::string& line) {
    const std::string text = line.substr(1);
    if (line[0] == kProgress) jobs.progress(piece, text);
    if (line[0] == kResult) jobs.done(piece, text);
    if (line[0] == kFailure && failure.empty()) failure = jobs.name(piece) + ": " + text;
    return line[0] != kProgress;
  };
  // Invariant: pieces before `next` are done, or one of the workers or ranks has them.
  while (true) {
    while (failure.empty() && next < jobs.count && int(workers.size()) < jobs.at_once)
      workers.emplace_back(jobs, next++);
    while (failure.empty() && next < jobs.count && !ranks.none() &&
           ranks.give(next, jobs.order(next)))
      ++next;
    if (workers.empty() && !ranks.any_busy()) break;
    std::vector<pollfd> waiting;
    for (const Worker& worker : workers) waiting.push_back({worker.descriptor(), POLLIN, 0});
    if (::poll(waiting.data(), nfds_t(waiting.size()), ranks.none() ? -1 : kRanksMilliseconds) <
            0 &&
        errno != EINTR)
      throw std::runtime_error("the results of processes cannot be read (" +
                               std::generic_category().message(errno) + ")");
    ranks.read(take_line);
    std::size_t at = 0;
    for (auto worker = workers.begin(); worker != workers.end();) {
      const bool ready = waiting[at++].revents != 0;
      if (!ready || worker->read(jobs)) {
        ++worker;
        continue;
      }
      const std::string wrong = worker->finish(jobs);
      if (!wrong.empty() && failure.empty()) failure = jobs.name(worker->piece()) + ": " + wrong;
      worker = workers.erase(worker);
    }
  }
  if (!failure.empty()) throw std::runtime_error(failure);
}

}  // namespace

void run_jobs(const Jobs& jobs) {
  if (jobs.at_once > 1 || jobs.apart || jobs.ranks != nullptr) return run_in_processes(jobs);
  for (std::size_t n = 0; n < jobs.count; ++n)
    jobs.done(n, jobs.work(n, [&](const std::string& text) { jobs.progress(n, text); }));
}

}  // namespace compare
