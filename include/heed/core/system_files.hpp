// SPDX-License-Identifier: Apache-2.0
#pragma once

// Calls of the operating system about files, by POSIX or by Windows' C library; io/atomic_file.hpp makes whole files of
// them. A file is a descriptor, as open() returns it. A failed call returns -1 or false, and leaves the reason in errno.

#include <heed/core/config.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <fcntl.h>
#include <sys/stat.h>
#if defined(_WIN32)
#include <io.h>
#include <share.h>
#else
#include <dirent.h>
#include <sys/file.h>
#include <unistd.h>
#endif

namespace heed {
inline namespace HEED_ABI {
namespace system_files {

// Paths are given as std::filesystem::path::c_str() gives them.
#if defined(_WIN32)
using PathChar = wchar_t;
using Mode = unsigned;
#else
using PathChar = char;
using Mode = mode_t;
#endif

struct Status {
  bool regular = false, named = false;  // named: no process has removed it
  std::uint64_t size = 0;               // in bytes
  Mode mode = 0;                        // permission bits
};

#if defined(_WIN32)

// True where an open file can be renamed, and a folder be synced to disk.
inline constexpr bool kPosix = false;

// _SH_DENYRW: no other process opens the file before it is closed. It stands for the lock.
[[nodiscard]] inline int open_wide(const PathChar* path, int flags, int sharing) {
  int descriptor = -1;
  return _wsopen_s(&descriptor, path, flags | _O_BINARY | _O_NOINHERIT, sharing,
                   _S_IREAD | _S_IWRITE) == 0
             ? descriptor
             : -1;
}
[[nodiscard]] inline int open_to_read(const PathChar* path) {
  return open_wide(path, _O_RDONLY, _SH_DENYNO);
}
[[nodiscard]] inline int create(const PathChar* path) {
  return open_wide(path, _O_WRONLY | _O_CREAT | _O_EXCL, _SH_DENYRW);
}
[[nodiscard]] inline bool lock(int) { return true; }
inline int close(int descriptor) { return _close(descriptor); }
[[nodiscard]] inline bool close_copy(int) { return true; }
[[nodiscard]] inline std::ptrdiff_t read(int descriptor, std::byte* to, std::size_t bytes) {
  return _read(descriptor, to, unsigned(bytes));
}
[[nodiscard]] inline std::ptrdiff_t write(int descriptor, const std::byte* from,
                                          std::size_t bytes) {
  return _write(descriptor, from, unsigned(bytes));
}
[[nodiscard]] inline bool sync(int descriptor) { return _commit(descriptor) == 0; }
[[nodiscard]] inline bool set_mode(int, Mode) { return true; }
[[nodiscard]] inline int open_folder(const PathChar*) { return -1; }
[[nodiscard]] inline Status status_of(const struct _stat64& found) {
  return {(found.st_mode & _S_IFMT) == _S_IFREG, true, std::uint64_t(found.st_size), 0};
}
[[nodiscard]] inline bool status_of(int descriptor, Status& to) {
  struct _stat64 found {};
  if (_fstat64(descriptor, &found) != 0) return false;
  to = status_of(found);
  return true;
}
[[nodiscard]] inline bool status_of(const PathChar* path, Status& to) {
  struct _stat64 found {};
  if (_wstat64(path, &found) != 0) return false;
  to = status_of(found);
  return true;
}
inline void remove(const PathChar* path) { (void)_wunlink(path); }
inline void remove_unlocked(const PathChar* folder, bool (*takes)(std::string_view)) {
  const std::wstring start = std::wstring(folder) + L"/";
  struct _wfinddata64_t entry {};
  const std::intptr_t search = _wfindfirst64((start + L"*").c_str(), &entry);
  if (search == -1) return;
  do {
    const std::wstring wide = entry.name, path = start + wide;
    std::string name;
    for (const wchar_t c : wide) name += c < 128 ? char(c) : '?';
    const int descriptor = takes(name) ? open_wide(path.c_str(), _O_RDWR, _SH_DENYRW) : -1;
    if (descriptor < 0) continue;
    close(descriptor);
    remove(path.c_str());
  } while (_wfindnext64(search, &entry) == 0);
  _findclose(search);
}

#else

inline constexpr bool kPosix = true;

// O_NONBLOCK keeps open() from waiting for the writer of a named pipe.
[[nodiscard]] inline int open_to_read(const PathChar* path) {
  return ::open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
}
// Makes a new file to write; EEXIST where there is one of that name.
[[nodiscard]] inline int create(const PathChar* path) {
  return ::open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
}
// Opens a folder for sync().
[[nodiscard]] inline int open_folder(const PathChar* path) {
  return ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}
// Locks the file for this process alone, without waiting; EWOULDBLOCK if another process has it.
[[nodiscard]] inline bool lock(int descriptor) {
  return ::flock(descriptor, LOCK_EX | LOCK_NB) == 0;
}
inline int close(int descriptor) { return ::close(descriptor); }
// Some file systems report a failed write only when a descriptor is closed. This closes a copy of the descriptor, since the
// lock must last.
[[nodiscard]] inline bool close_copy(int descriptor) {
  const int copy = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  return copy >= 0 && (::close(copy) == 0 || errno == EINTR);
}
[[nodiscard]] inline std::ptrdiff_t read(int descriptor, std::byte* to, std::size_t bytes) {
  return ::read(descriptor, to, bytes);
}
[[nodiscard]] inline std::ptrdiff_t write(int descriptor, const std::byte* from,
                                          std::size_t bytes) {
  return ::write(descriptor, from, bytes);
}
[[nodiscard]] inline bool sync(int descriptor) {
  while (::fsync(descriptor) != 0)
    if (errno != EINTR) return false;
  return true;
}
[[nodiscard]] inline bool set_mode(int descriptor, Mode mode) {
  return ::fchmod(descriptor, mode) == 0;
}
[[nodiscard]] inline Status status_of(const struct stat& found) {
  Status status{S_ISREG(found.st_mode), found.st_nlink > 0, std::uint64_t(found.st_size),
                found.st_mode};
  status.mode &= 0777;
  return status;
}
[[nodiscard]] inline bool status_of(int descriptor, Status& to) {
  struct stat found {};
  if (::fstat(descriptor, &found) != 0) return false;
  to = status_of(found);
  return true;
}
[[nodiscard]] inline bool status_of(const PathChar* path, Status& to) {
  struct stat found {};
  if (::stat(path, &found) != 0) return false;
  to = status_of(found);
  return true;
}
inline void remove(const PathChar* path) { (void)::unlink(path); }
// Removes the regular files of the folder that no process has locked, here or on another machine, and whose names satisfy
// `takes`, as far as possible.
inline void remove_unlocked(const PathChar* folder, bool (*takes)(std::string_view)) {
  DIR* const directory = ::opendir(folder);
  if (directory == nullptr) return;
  while (const dirent* entry = ::readdir(directory)) {
    if (!takes(entry->d_name)) continue;
    const int descriptor =
        ::openat(::dirfd(directory), entry->d_name, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (descriptor < 0) continue;
    Status found;
    if (status_of(descriptor, found) && found.regular && lock(descriptor))
      ::unlinkat(::dirfd(directory), entry->d_name, 0);
    ::close(descriptor);
  }
  ::closedir(directory);
}

#endif

}  // namespace system_files
}  // namespace HEED_ABI
}  // namespace heed
