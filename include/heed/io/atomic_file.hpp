// SPDX-License-Identifier: Apache-2.0
#pragma once

// Reads and writes whole files. A write happens as a whole or not at all: the bytes go to a temporary file
// in the target's folder, which is synced, closed and renamed over the target.
//
// Errors: std::runtime_error, one sentence `<path>: <what failed> (<text of errno>)`.

#include <heed/core/config.hpp>
#include <heed/core/error.hpp>
#include <heed/core/system.hpp>
#include <heed/core/system_files.hpp>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <optional>
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

// Throws "<path>: <what> (<text of the error>)"; `code` is the errno of the failed call.
[[noreturn]] inline void fail_file(const std::filesystem::path& path, const char* what,
                                   const std::error_code& error) {
  throw std::runtime_error(
      heed::detail::sentence(path.string(), ": ", what, " (", error.message(), ")"));
}
[[noreturn]] inline void fail_file(const std::filesystem::path& path, const char* what, int code) {
  fail_file(path, what, std::error_code(code, std::generic_category()));
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
  ~File() { close(); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  [[nodiscard]] system_files::Status status() const {
    system_files::Status found;
    if (!system_files::status_of(descriptor_, found))
      fail_file(reported_, "cannot query the file", errno);
    return found;
  }

  // Fills `bytes` from the front; returns how many bytes the file had left.
  [[nodiscard]] std::size_t read_all(std::span<std::byte> bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      const std::ptrdiff_t got = system_files::read(descriptor_, bytes.data() + done,
                                                    std::min(bytes.size() - done, largest_step));
      if (got == 0) break;
      if (got < 0 && errno != EINTR) fail_file(reported_, "cannot read the file", errno);
      if (got > 0) done += static_cast<std::size_t>(got);
    }
    return done;
  }

  void write_all(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::ptrdiff_t put =
          system_files::write(descriptor_, bytes.data(), std::min(bytes.size(), largest_step));
      if (put < 0 && errno != EINTR) fail_file(reported_, "cannot write the file", errno);
      if (put > 0) bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
  }

  // mode: permission bits, as Status has them.
  void set_mode(system_files::Mode mode) {
    if (!system_files::set_mode(descriptor_, mode))
      fail_file(reported_, "cannot set the mode", errno);
  }

  void sync(const char* what = "cannot sync the file to disk") {
    if (!system_files::sync(descriptor_)) fail_file(reported_, what, errno);
  }

  void close() {
    if (descriptor_ >= 0) system_files::close(std::exchange(descriptor_, -1));
  }

  // Ends the file's use, for a rename: closes a copy of the descriptor, since the lock must last, or
  // the file itself where an open file cannot be renamed.
  void finish() {
    const bool closed = system_files::kPosix
                            ? system_files::close_copy(descriptor_)
                            : system_files::close(std::exchange(descriptor_, -1)) == 0;
    if (!closed) fail_file(reported_, "cannot close the file", errno);
  }

 private:
  static constexpr std::size_t largest_step = std::size_t{1} << 30;  // macOS refuses 2^31 and more

  int descriptor_;
  const std::filesystem::path& reported_;
};

// A regular file that is read from its first byte to its last. `path` must outlive it.
class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path)
      : path_(path), file_(system_files::open_to_read(path.c_str()), path, "cannot open the file") {
    const system_files::Status status = file_.status();
    if (!status.regular)
      throw std::runtime_error(heed::detail::sentence(path.string(), ": not a regular file"));
    size_ = static_cast<std::size_t>(status.size);
  }

  // Size of the file in bytes when it was opened.
  [[nodiscard]] std::size_t size() const { return size_; }

  // Throws if the file is larger than this machine's memory: a sparse file may claim any size.
  void require_memory() const {
    const std::size_t memory = machine_memory();
    if (memory > 0 && size_ >= memory)
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
  system_files::remove_unlocked(folder.c_str(), [](std::string_view name) {
    const std::string_view begin = ".heed-", ending = ".tmp";
    return name.starts_with(begin) && name.ends_with(ending) &&
           name.find_first_not_of("0123456789-", begin.size()) == name.size() - ending.size();
  });
}

// A file that exists only until its destructor runs, unless it has been renamed. It is locked as long as the object exists,
// if the file system has locks, so that no other process takes it for a leftover.
class TemporaryFile {
 public:
  // Process number and counter give concurrent writers different names; files that cannot be removed are skipped.
  TemporaryFile(const std::filesystem::path& folder, const std::filesystem::path& reported)
      : file_(create(folder, path_), reported, "cannot create a temporary file in its folder"),
        reported_(reported) {}
  ~TemporaryFile() {
    if (path_.empty()) return;
    file_.close();
    system_files::remove(path_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  [[nodiscard]] File& file() { return file_; }

  void rename_to(const std::filesystem::path& target) {
    std::error_code error;
    std::filesystem::rename(path_, target, error);
    if (error) fail_file(reported_, "cannot rename the temporary file", error);
    path_.clear();
  }

 private:
  [[nodiscard]] static int create(const std::filesystem::path& folder,
                                  std::filesystem::path& path) {
    static std::atomic<unsigned> counter{0};
    remove_leftovers(folder);
    int descriptor = -1;
    for (int attempt = 0; attempt < 100; ++attempt) {
      path = folder / (".heed-" + std::to_string(process_number()) + "-" +
                       std::to_string(counter.fetch_add(1)) + ".tmp");
      descriptor = system_files::create(path.c_str());
      if (descriptor < 0 && errno != EEXIST) break;
      if (descriptor >= 0 && is_kept(descriptor)) break;
      if (descriptor >= 0) system_files::close(std::exchange(descriptor, -1));
    }
    return descriptor;
  }
  // Locks the file. False if another process has already removed it.
  [[nodiscard]] static bool is_kept(int descriptor) {
    system_files::Status found;
    return (system_files::lock(descriptor) || errno != EWOULDBLOCK) &&
           system_files::status_of(descriptor, found) && found.named;
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
  system_files::Status old;
  const bool exists = system_files::status_of(target.c_str(), old);
  if (exists && !old.regular)
    throw std::runtime_error(
        heed::detail::sentence(target.string(), ": exists and is not a regular file"));

  std::optional<File> folder_handle;
  if (system_files::kPosix)
    folder_handle.emplace(system_files::open_folder(folder.c_str()), target,
                          "cannot open its folder");
  TemporaryFile temporary(folder, target);
  if (exists) temporary.file().set_mode(old.mode);
  for (const std::span<const std::byte> piece : pieces) temporary.file().write_all(piece);
  temporary.file().sync();
  temporary.file().finish();
  temporary.rename_to(target);
  if (folder_handle) folder_handle->sync("written, but its folder cannot be synced to disk");
}

}  // namespace io
}  // namespace HEED_ABI
}  // namespace heed
