// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared by heed's programs: terminals, and the files that they write.

#include <heed/io/atomic_file.hpp>

#include "run.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <initializer_list>
#include <string>
#include <system_error>
#include <vector>

namespace heed_program {

// True if escape sequences, or colours, may be written to that descriptor.
[[nodiscard]] inline bool draws(int descriptor) {
  const char* terminal = std::getenv("TERM");
  return isatty(descriptor) == 1 && terminal != nullptr && *terminal != '\0' &&
         std::string(terminal) != "dumb";
}
[[nodiscard]] inline bool colours(int descriptor) {
  const char* none = std::getenv("NO_COLOR");
  return draws(descriptor) && (none == nullptr || *none == '\0');
}

// Throws UsageError unless `path`, the value of `option`, can be written; leaves nothing behind.
inline void require_output(const std::string& option, const std::string& path) {
  const std::filesystem::path target(path);
  const std::string begin = option + " " + path + ": ";
  if (!target.has_filename())
    throw UsageError(option + " is \"" + path + "\", it must name a file");
  struct stat old {
  }, stream{};
  if (::stat(path.c_str(), &old) == 0) {
    if (!S_ISREG(old.st_mode)) throw UsageError(begin + "exists and is not a regular file");
    for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO})
      if (::fstat(descriptor, &stream) == 0 && stream.st_dev == old.st_dev &&
          stream.st_ino == old.st_ino)
        throw UsageError(begin + "standard output or standard error is written there");
  } else if (errno != ENOENT) {  // e.g. a name that is too long, or a folder that is a file
    throw UsageError(begin + "cannot be written (" + std::generic_category().message(errno) + ")");
  }
  try {
    const heed::io::TemporaryFile attempt(target.has_parent_path() ? target.parent_path() : ".",
                                          target);
  } catch (const std::runtime_error& error) {
    throw UsageError(option + " " + error.what());
  }
}

// A file and the option that names it.
struct NamedFile {
  std::string option, path;
};

// True if both paths name one file: through links of either kind, or by their spelling if there is no file yet.
[[nodiscard]] inline bool same_file(const std::filesystem::path& a,
                                    const std::filesystem::path& b) {
  struct stat first {
  }, second{};
  if (::stat(a.c_str(), &first) == 0 && ::stat(b.c_str(), &second) == 0)
    return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
  std::error_code error;
  const auto whole = [&](const std::filesystem::path& path) {
    const auto full = std::filesystem::absolute(path, error);
    return error ? full : std::filesystem::weakly_canonical(full, error);
  };
  const std::filesystem::path from = whole(a), to = whole(b);
  return !error && from == to;
}

// Throws UsageError if the output would replace one of the others. A file with an empty path was not given.
inline void require_apart(const NamedFile& output, const std::vector<NamedFile>& others) {
  for (const NamedFile& other : others)
    if (!output.path.empty() && !other.path.empty() && same_file(output.path, other.path))
      throw UsageError(output.option + " " + output.path + ": would replace the file of " +
                       other.option + " " + other.path);
}
// Throws UsageError if a page written into `folder`, report.html and *.svg, would replace one of the others.
inline void require_pages_apart(const NamedFile& folder, const std::vector<NamedFile>& others) {
  const auto is_page = [](const std::filesystem::path& path) {
    return path.filename() == "report.html" || path.extension() == ".svg";
  };
  if (folder.path.empty()) return;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path, error))
    if (is_page(entry.path())) require_apart({folder.option, entry.path().string()}, others);
  for (const NamedFile& other : others) {
    const std::filesystem::path name = std::filesystem::path(other.path).filename();
    if (is_page(name))
      require_apart({folder.option, (std::filesystem::path(folder.path) / name).string()}, {other});
  }
}

// A word in the quotes that make a shell read it back unchanged.
[[nodiscard]] inline std::string shell_word(const std::string& word) {
  const auto among = [](char c, const char* set) {
    return std::string(set).find(c) != std::string::npos;
  };
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < ' ' || c == 0x7F; };
  bool plain = !word.empty(), control = false;
  for (const char c : word) {
    plain = plain && ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      among(c, "_-./=:,@%+"));
    control = control || is_control(c);
  }
  if (plain) return word;
  // $'...' keeps a line break or an escape sequence of a name from the terminal.
  std::string quoted = control ? "$'" : "'";
  for (const char c : word) {
    char octal[8];
    std::snprintf(octal, sizeof octal, "\\%03o",
                  static_cast<unsigned>(static_cast<unsigned char>(c)));
    if (control)
      quoted += is_control(c) || among(c, "'\\") ? octal : std::string(1, c);
    else
      quoted += c == '\'' ? "'\\''" : std::string(1, c);
  }
  return quoted + "'";
}

// Writes the text to a file, or to standard output for "-". If it throws std::runtime_error, an old file is unchanged.
inline void write_output(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::fputs(text.c_str(), stdout);
    return;
  }
  const std::span<const std::byte> piece = std::as_bytes(std::span(text));
  heed::io::write_file_atomically(path, std::span(&piece, 1));
}

// Takes every step even if some of them throw; then throws one std::runtime_error with the sentences of all failures.
inline void all_of(std::initializer_list<std::function<void()>> steps) {
  std::string failures;
  for (const auto& step : steps) {
    try {
      step();
    } catch (const std::exception& error) {
      failures += (failures.empty() ? "" : "; ") + std::string(error.what());
    }
  }
  if (!failures.empty()) throw std::runtime_error(failures);
}

}  // namespace heed_program
