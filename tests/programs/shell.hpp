// SPDX-License-Identifier: Apache-2.0
#pragma once

// Runs heed's programs as their users do, by shell commands.

#include "catch.hpp"
#include "temporary.hpp"

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace heed_test {

namespace fs = std::filesystem;
using Names = std::set<std::string>;

[[nodiscard]] inline std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE(in.good());
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

[[nodiscard]] inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

struct Result {
  int code;
  std::string out, err;
};

// Runs shell commands in a folder of its own; the programs are on the path.
class Shell {
 public:
  Shell() {
    std::ofstream text(folder_.path / "text.txt");
    for (int i = 0; i < 60; ++i) text << "line " << i * i << "\n";
    std::ofstream(folder_.path / "empty.txt").flush();
    std::ofstream(folder_.path / "bytes.txt") << std::string(400, '\xFF');
  }
  [[nodiscard]] Result run(const std::string& command) const {
    const std::string whole = "cd '" + folder_.path.string() +
                              "' && export PATH='" HEED_PROGRAMS "':\"$PATH\" && { " + command +
                              "; } >.out 2>.err </dev/null";
    const int status = std::system(whole.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read(path(".out")), read(path(".err"))};
  }
  [[nodiscard]] Result done(const std::string& command) const {
    Result result = run(command);
    INFO(command << "\n" << result.err);
    REQUIRE(result.code == 0);
    return result;
  }
  // Checks for exit code 2 and one sentence that has `words`.
  void refuses(const std::string& command, const std::string& words) const {
    const Result result = run(command);
    INFO(command << "\n" << result.out << result.err);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    CHECK(lines_of(result.err).size() == 1);
    CHECK(result.err.rfind("heed_", 0) == 0);
    CHECK(result.err.find(words) != std::string::npos);
  }
  [[nodiscard]] fs::path path(const std::string& name) const { return folder_.path / name; }
  [[nodiscard]] Names files(const std::string& folder) const {
    Names names;
    for (const auto& entry : fs::directory_iterator(path(folder)))
      names.insert(entry.path().filename().string());
    return names;
  }

 private:
  heed_test::TemporaryFolder folder_;
};

}  // namespace heed_test
