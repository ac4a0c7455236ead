// SPDX-License-Identifier: Apache-2.0
#pragma once

// How each of heed's programs runs and ends: its exit code, its last sentence, its standard streams.

#include <heed/core/error.hpp>

#if !defined(_WIN32)
#include <fcntl.h>
#include <unistd.h>
#endif

#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>

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

// The exit code of a program, and the sentence that it prints on standard error; empty if all went well.
struct Ending {
  int code = 0;
  std::string sentence;
};

namespace detail {

// Opens standard streams that are closed on /dev/null. Otherwise a file that is opened later would
// get the number of such a stream, and output would go into it.
inline void occupy_standard_streams() {
#if !defined(_WIN32)
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(descriptor, F_GETFD) < 0)
      (void)::open("/dev/null", descriptor == STDIN_FILENO ? O_WRONLY : O_RDONLY);
#endif
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
