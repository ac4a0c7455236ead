// SPDX-License-Identifier: Apache-2.0
#pragma once

// A lock between processes that use the same thing, such as a folder or the file of a checkpoint. They open a file that
// serves only the lock. The lock ends with the object and with its process, however that ends (flock). The last process
// that leaves removes the file; a killed process leaves it behind, which does no harm. A forked child shares its parent's
// locks: a child that outlives a killed parent keeps them.

#include <heed/io/atomic_file.hpp>

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

namespace heed_program {

class FileLock {
 public:
  // Holds nothing yet. The file's folder must exist.
  explicit FileLock(std::filesystem::path file) : file_(std::move(file)) {}
  ~FileLock() {
    // A file is removed only under an exclusive lock, so nobody holds it then. A process that waits
    // for it sees that it is gone, and makes another one.
    if (held_ && is_there() && ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0)
      ::unlink(file_.c_str());
    if (held_) ::flock(descriptor_, LOCK_UN);  // a forked child has the open file, too
    close();
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

  // Takes the lock for this object alone; false if another process has it. Throws
  // std::runtime_error if the file cannot be made.
  [[nodiscard]] bool try_alone() {
    if (!take(LOCK_EX | LOCK_NB)) return false;
    const std::string own = std::to_string(::getpid()) + " " + machine() + "\n";
    if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, own.data(), own.size(), 0) < 0)
      heed::io::fail_file(file_, "cannot write the file", errno);
    return true;
  }
  // Takes the lock beside others that share it, or turns an exclusive lock into a shared one. Waits
  // while another process has it alone.
  void share() { (void)take(LOCK_SH); }

  // The holder, for people: "process 12 on machine", or "another process" if that one has left and others share the lock.
  [[nodiscard]] std::string holder() const {
    std::ifstream in(file_);
    pid_t process = 0;
    std::string on;
    if (!(in >> process >> on) || process <= 0) return "another process";
    if (on == machine() && ::kill(process, 0) != 0 && errno == ESRCH) return "another process";
    return "process " + std::to_string(process) + " on " + heed::printable(on);
  }

 private:
  [[nodiscard]] static std::string machine() {
    char name[256] = "";
    return ::gethostname(name, sizeof name - 1) == 0 && name[0] != '\0' ? name : "localhost";
  }
  [[nodiscard]] bool take(int how) {
    while (true) {
      if (descriptor_ < 0)
        descriptor_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
      if (descriptor_ < 0) heed::io::fail_file(file_, "cannot make the file", errno);
      if (::flock(descriptor_, how) != 0) {
        if (errno == EINTR) continue;
        if (errno == EWOULDBLOCK) return held_ = false;
        if (errno != ENOSYS && errno != ENOTSUP && errno != ENOLCK)
          heed::io::fail_file(file_, "cannot lock the file", errno);
        if (!held_)
          std::fprintf(stderr, "%s: this file system has no locks; do not start a second run\n",
                       heed::printable(file_.string()).c_str());
      } else if (!is_there()) {  // the former holder has removed it
        close();
        continue;
      }
      return held_ = true;
    }
  }
  // True if the open file is still the one of that name.
  [[nodiscard]] bool is_there() const {
    struct stat own {
    }, named{};
    return ::fstat(descriptor_, &own) == 0 && ::stat(file_.c_str(), &named) == 0 &&
           own.st_dev == named.st_dev && own.st_ino == named.st_ino;
  }
  void close() {
    if (const int old = std::exchange(descriptor_, -1); old >= 0) ::close(old);
  }

  std::filesystem::path file_;
  int descriptor_ = -1;
  bool held_ = false;
};

}  // namespace heed_program
