// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <heed/core/system.hpp>

#include "catch.hpp"

#include <filesystem>
#include <string>
#include <system_error>

namespace heed_test {

// A folder of its own for each run, removed at the end of the test.
struct TemporaryFolder {
  std::filesystem::path path;

  TemporaryFolder() {
    const std::string name = "heed-test-" + std::to_string(heed::process_number()) + "-";
    for (int n = 0; path.empty(); ++n) {
      const auto free = std::filesystem::temp_directory_path() / (name + std::to_string(n));
      if (std::filesystem::create_directory(free)) path = free;
    }
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
};

}  // namespace heed_test
