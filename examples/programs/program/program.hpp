// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared by heed's programs: exit codes, standard streams, terminals, and the files that they write.

#include <heed/io/atomic_file.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <initializer_list>
#include <new>
#include <string>
#include <system_error>
#include <vector>

namespace heed_program {

// Thrown for options or input that cannot be used, which ends the program with exit code 2. The text is the whole
// sentence that is printed.
struct UsageError : std::runtime_error {
  explicit UsageError(const std::string& sentence)
      : std::runtime_error(heed::printable(sentence)) {}
};

// The exit codes, printed at the end of each --help.
inline constexpr const char* kExitCodes =
    "Exit codes:\n"
    "  0  done\n"
    "  1  a check failed, or the work could not be finished (memory, disk, numbers that are not "
    "finite)\n"
    "  2  options or input that cannot be used; one sentence on standard error says which\n";

// Runs f() and turns a std::runtime_error into a UsageError: an input that cannot be read was named by the user.
template <class F>
auto as_usage(F&& f) {
  try {
    return f();
  } catch (const std::runtime_error& error) {
    throw UsageError(error.what());
  }
}

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

// The exit code of a program, and the sentence that it prints on standard error; empty if all went well.
struct Ending {
  int code = 0;
  std::string sentence;
};

namespace detail {

// Opens standard streams that are closed on /dev/null. Otherwise a file that is opened later would
// get the number of such a stream, and output would go into it.
inline void occupy_standard_streams() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(descriptor, F_GETFD) < 0)
      (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
}

inline int complain(const char* name, const char* text, int code) {
  std::fprintf(stderr, "%s: %s\n", name, text);
  return code;
}

// The ending of body().
[[nodiscard]] inline Ending ending_of(const std::function<int()>& body) {
  try {
    return {body(), ""};
  } catch (const UsageError& error) {
    return {2, error.what()};
  } catch (const std::invalid_argument& error) {
    return {2, error.what()};
  } catch (const std::bad_alloc&) {
    return {1, "there is not enough memory"};
  } catch (const std::length_error&) {
    return {1, "there is not enough memory"};
  } catch (const std::exception& error) {
    return {1, error.what()};
  }
}

// Prints the sentence of an ending, if it has one, and another one if standard output is lost. Returns the exit code.
[[nodiscard]] inline int conclude(const char* name, const Ending& ending) {
  if (!ending.sentence.empty()) complain(name, ending.sentence.c_str(), ending.code);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return complain(name, "standard output cannot be written", ending.code == 0 ? 1 : ending.code);
  return ending.code;
}

}  // namespace detail

// Runs a program of that name and returns its exit code: the result of body(), or 1 or 2 if it throws.
[[nodiscard]] inline int run(const char* name, const std::function<int()>& body) {
  detail::occupy_standard_streams();
  return detail::conclude(name, detail::ending_of(body));
}

}  // namespace heed_program
