// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "catch.hpp"

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace heed_test {

// A folder of its own for each run, removed at the end of the test.
struct TemporaryFolder {
  std::filesystem::path path;

  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "heed-test-").string();
    name.append(6, 'X');  // mkdtemp replaces these
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
};

}  // namespace heed_test
