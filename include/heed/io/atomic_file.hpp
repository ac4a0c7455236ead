// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and writes whole files by POSIX calls. A write happens as a whole or not at all: the bytes go to a temporary file
// in the target's folder, which is synced, closed and renamed over the target.
//
// Errors: std::runtime_error, one sentence `<path>: <what failed> (<text of errno>)`.

#include <heed/core/config.hpp>
#include <heed/core/error.hpp>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace heed {
inline namespace HEED_ABI {
namespace io {

// Throws "<path>: <what> (<text of errno>)"; `code` is the errno of the failed call.
[[noreturn]] inline void fail_file(const std::filesystem::path& path, const char* what, int code) {
  throw std::runtime_error(heed::detail::sentence(path.string(), ": ", what, " (",
                                                  std::generic_category().message(code), ")"));
}

// Owns one descriptor; every message names `reported`, the path that the caller asked for, which
// must outlive the object (a copy could fail after the descriptor has been opened, and leak it).
class File {
 public:
  // A negative descriptor throws with the current errno, so the failed call may stand in place.
  File(int descriptor, const std::filesystem::path& reported, const char* what)
      : descriptor_(descriptor), reported_(reported) {
    if (descriptor_ < 0) fail_file(reported_, what, errno);
  }
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] struct stat status() const {
    struct stat found {};
    if (::fstat(descriptor_, &found) != 0) fail_file(reported_, "cannot query the file", errno);
    return found;
  }

  // Fills `bytes` from the front; returns how many bytes the file had left.
  [[nodiscard]] std::size_t read_all(std::span<std::byte> bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t got =
          ::read(descriptor_, bytes.data() + done, std::min(bytes.size() - done, largest_step));
      if (got == 0) break;
      if (got < 0 && errno != EINTR) fail_file(reported_, "cannot read the file", errno);
      if (got > 0) done += static_cast<std::size_t>(got);
    }
    return done;
  }

  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t put = ::write(descriptor_, bytes.data(), std::min(bytes.size(), largest_step));
      if (put < 0 && errno != EINTR) fail_file(reported_, "cannot write the file", errno);
      if (put > 0) bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
  }

  void set_mode(mode_t mode) {
    if (::fchmod(descriptor_, mode) != 0) fail_file(reported_, "cannot set the mode", errno);
  }

  void sync(const char* what = "cannot sync the file to disk") {
    while (::fsync(descriptor_) != 0)
      if (errno != EINTR) fail_file(reported_, what, errno);
  }

  // Some file systems report a failed write only when a descriptor is closed. This closes a copy of
  // the descriptor, since the lock must last.
  void close_copy() const {
    const int copy = ::fcntl(descriptor_, F_DUPFD_CLOEXEC, 0);
    if (copy < 0 || (::close(copy) != 0 && errno != EINTR))
      fail_file(reported_, "cannot close the file", errno);
  }

 private:
  static constexpr std::size_t largest_step = std::size_t{1} << 30;  // macOS refuses 2^31 and more

  int descriptor_;
  const std::filesystem::path& reported_;
};

// A regular file that is read from its first byte to its last. `path` must outlive it.
class InputFile {
 public:
  // O_NONBLOCK keeps open() from waiting for the writer of a named pipe; pipes are refused below.
  explicit InputFile(const std::filesystem::path& path)
      : path_(path),
        file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), path,
              "cannot open the file") {
    const struct stat status = file_.status();
    if (!S_ISREG(status.st_mode))
      throw std::runtime_error(heed::detail::sentence(path.string(), ": not a regular file"));
    size_ = static_cast<std::size_t>(status.st_size);
  }

  // Size of the file in bytes when it was opened.
  [[nodiscard]] std::size_t size() const { return size_; }

  // Throws if the file is larger than this machine's memory: a sparse file may claim any size.
  void require_memory() const {
    const long pages = ::sysconf(_SC_PHYS_PAGES), page = ::sysconf(_SC_PAGE_SIZE);
    if (pages <= 0 || page <= 0) return;  // unknown
    const std::size_t memory = static_cast<std::size_t>(pages) * static_cast<std::size_t>(page);
    if (size_ >= memory)
      throw std::runtime_error(heed::detail::sentence(
          path_.string(), ": the file has ", size_, " bytes, this machine's memory has ", memory));
  }

  // Fills `bytes` with the next bytes of the file.
  void read(std::span<std::byte> bytes) {
    const std::size_t got = file_.read_all(bytes);
    done_ += got;
    if (got != bytes.size())
      throw std::runtime_error(heed::detail::sentence(path_.string(),
                                                      ": the file shrank while it was read, from ",
                                                      size_, " bytes to ", done_));
  }

 private:
  const std::filesystem::path& path_;
  File file_;
  std::size_t size_ = 0, done_ = 0;
};

// All bytes of a regular file.
[[nodiscard]] inline std::vector<std::byte> read_file(const std::filesystem::path& path) {
  InputFile file(path);
  file.require_memory();
  std::vector<std::byte> bytes(file.size());
  file.read(bytes);
  return bytes;
}

// Removes the temporary files that killed processes left in the folder, as far as possible. A
// locked file has a living writer, here or on another machine.
inline void remove_leftovers(const std::filesystem::path& folder) {
  DIR* const directory = ::opendir(folder.c_str());
  if (directory == nullptr) return;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string_view name = entry->d_name, begin = ".heed-", ending = ".tmp";
    if (!name.starts_with(begin) || !name.ends_with(ending) ||
        name.find_first_not_of("0123456789-", begin.size()) != name.size() - ending.size())
      continue;
    const int descriptor =
        ::openat(::dirfd(directory), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor < 0) continue;
    struct stat found {};
    if (::fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode) &&
        ::flock(descriptor, LOCK_EX | LOCK_NB) == 0)
      ::unlinkat(::dirfd(directory), entry->d_name, 0);
    ::close(descriptor);
  }
  ::closedir(directory);
}

// A file that exists only until its destructor runs, unless it has been renamed. It is locked as long as the object exists,
// if the file system has locks, so that no other process takes it for a leftover.
class TemporaryFile {
 public:
  // Process number and counter give concurrent writers different names; O_EXCL skips files that cannot be removed.
  TemporaryFile(const std::filesystem::path& folder, const std::filesystem::path& reported)
      : file_(create(folder, path_), reported, "cannot create a temporary file in its folder"),
        reported_(reported) {}
  ~TemporaryFile() {
    if (!path_.empty()) ::unlink(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  [[nodiscard]] File& file() { return file_; }

  void rename_to(const std::filesystem::path& target) {
    if (std::rename(path_.c_str(), target.c_str()) != 0)
      fail_file(reported_, "cannot rename the temporary file", errno);
    path_.clear();
  }

 private:
  [[nodiscard]] static int create(const std::filesystem::path& folder,
                                  std::filesystem::path& path) {
    static std::atomic<unsigned> counter{0};
    remove_leftovers(folder);
    int descriptor = -1;
    for (int attempt = 0; attempt < 100; ++attempt) {
      path = folder / (".heed-" + std::to_string(::getpid()) + "-" +
                       std::to_string(counter.fetch_add(1)) + ".tmp");
      descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (descriptor < 0 && errno != EEXIST) break;
      if (descriptor >= 0 && is_kept(descriptor)) break;
      if (descriptor >= 0) ::close(std::exchange(descriptor, -1));
    }
    return descriptor;
  }
  // Locks the file. False if another process has already removed it.
  [[nodiscard]] static bool is_kept(int descriptor) {
    struct stat found {};
    return (::flock(descriptor, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) &&
           ::fstat(descriptor, &found) == 0 && found.st_nlink > 0;
  }

  std::filesystem::path path_;  // before file_, whose creation fills it; empty once renamed
  File file_;
  const std::filesystem::path& reported_;
};

// Writes the pieces one after the other as the new content of `target`. A failure before the rename
// leaves the old file untouched and no temporary file; a killed process may leave a `.heed-*.tmp`,
// which the next write into the folder removes.
// An existing file keeps its permission bits; a symbolic link is replaced, not followed; a target
// that exists and is no regular file (a device, a folder) is refused.
inline void write_file_atomically(const std::filesystem::path& target,
                                  std::span<const std::span<const std::byte>> pieces) {
  require(target.has_filename(), "write_file_atomically: target is '", target.string(),
          "', it must name a file");
  const std::filesystem::path folder = target.has_parent_path() ? target.parent_path() : ".";
  struct stat old {};
  const bool exists = ::stat(target.c_str(), &old) == 0;
  if (exists && !S_ISREG(old.st_mode))
    throw std::runtime_error(
        heed::detail::sentence(target.string(), ": exists and is not a regular file"));

  File folder_handle(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC), target,
                     "cannot open its folder");
  TemporaryFile temporary(folder, target);
  if (exists) temporary.file().set_mode(old.st_mode & 0777);
  for (const std::span<const std::byte> piece : pieces) temporary.file().write_all(piece);
  temporary.file().sync();
  temporary.file().close_copy();
  temporary.rename_to(target);
  folder_handle.sync("written, but its folder cannot be synced to disk");
}

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
